"""Which tokens one answer may have at its next position, and how it can still end in time.

The positions of an answer are decided from left to right, several in a forward: a grammar knows what may follow a
text, and nothing of what may stand behind a gap. What the grammar forces is decided at once and needs no forward, as
does a token that alone is allowed, and an EOS where nothing else has room.

A guide always knows a closing: tokens that complete the answer within its budget. A decision after which no closing is
found is taken back, and the closing's own token is decided instead. So an answer is never cut in its middle, and one
whose grammar becomes too complex to go on with is closed.

The matcher is llguidance's. Only compiling a grammar imports it: an engine without grammars, as in the benchmarks of a
bare GPU machine, runs without it.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mbd_core.decoding.grammar.grammar import Grammar, GrammarRefused, Syntax, at, check_bounds, inner_schemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True)
class AllowedToken:
    """A token among the allowed ones, its probability among them, and whether the model's likeliest token of all is
    none of them: the grammar overrules the model there."""

    token: int
    probability: float
    overruled: bool


Pick = Callable[[int, np.ndarray], AllowedToken]
"""The choice at the i-th open position among the allowed tokens (V,)."""

TAU_OVERRULED = 0.1  # what an overruled choice must exceed, where it is below `tau` and `tau` is below 1

# A step beyond them ends in an error and not in seconds of work; a first mask may take half a second.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 300_000, "step_lexer_fuel": 20_000, "max_lexer_states": 50_000}
MAX_COMPILED = 32  # grammars that are kept for other requests
MAX_SEARCH, MAX_THOROUGH = 256, 16  # tokens of a closing that is looked for between two forwards, in the two ways
NUM_TRIED, NUM_FOLLOWED = 64, 24  # tokens that are tried at a position, and those whose next position is looked at
MAX_LITERALS = 32
MASK_TRIES = 40  # trying a token costs about this part of computing which ones are allowed
STEP_TRIES = 25_000  # of all rows of a step together, from which on no other row begins to look for a new closing


class Search:
    """What the guides of one step may do together to find closings, counted in tokens that are tried.

    It is counted and not timed: the same rows are always decided alike. A search that has begun goes to its own end.

    error  why the matcher could not go on in the latest walk that found no end; empty where it could
    """

    def __init__(self, tries: float = math.inf) -> None:
        self._num_left = tries
        self.error = ""

    @property
    def is_over(self) -> bool:
        """Whether no other search may begin."""
        return self._num_left <= 0

    def count(self, tries: int) -> None:
        self._num_left -= tries


class Vocabulary(Protocol):
    """What a guide needs of a tokenizer: llguidance's form of it."""

    def __call__(self) -> LLTokenizer: ...


class Closings:
    """Looks for short ends of answers, in two ways. The quick one takes tokens that close something, which ends JSON.
    The thorough one takes tokens after which little, or something new, may follow. Both try at each position whether
    one more token ends the answer, or a literal of the grammar."""

    def __init__(self, tokenizer: LLTokenizer, *, eos_token_id: int, forbidden: Sequence[int]) -> None:
        self.eos_token_id, self._tokenizer, self._size = eos_token_id, tokenizer, tokenizer.vocab_size
        texts = [tokenizer.decode_bytes([token]) for token in range(self._size)]
        special = [texts[t].decode(errors="replace") for t in range(self._size) if tokenizer.is_special_token(t)]
        self._special = [text for text in special if text]
        self._rank_V = np.array([_rank(text) for text in texts])
        self._lengths_V = np.array([len(text) for text in texts])
        self._order_V = np.lexsort((-self._lengths_V, self._rank_V))
        single = np.flatnonzero(self._lengths_V == 1)
        self._single = np.array(sorted(single, key=lambda t: _BYTE_RANK[texts[t][0]]), dtype=np.int64)
        self._quotes = np.flatnonzero([text == b'"' for text in texts])
        self._never = np.array(sorted(forbidden), dtype=np.int64)

    def literals(self, grammar: Grammar) -> list[list[int]]:
        """The tokens of plain words and marks that stand in a grammar's text."""
        if grammar.syntax == "json_schema":
            return []
        words = dict.fromkeys(re.findall(r"[^\\.^$|?*+()\[\]{}\"\s]{2,}", grammar.whole))
        return [self._tokenizer.tokenize_str(text) for text in list(words)[:MAX_LITERALS]]

    def special_in(self, grammar: Grammar) -> str:
        """Why an answer may not be found, if a special token's text stands in the grammar; else empty."""
        text = grammar.whole.replace("\\", "")
        name = next((special for special in self._special if special in text), None)
        return "" if name is None else f"'{name}' is a special token's text, which no answer has"

    def allowed(self, matcher: LLMatcher) -> np.ndarray | None:
        """The tokens (V,) that may come next; `None` where the matcher cannot say."""
        if matcher.is_error():
            return None
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            return None
        mask_V = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask_V[self._never[self._never < self._size]] = False
        return mask_V if mask_V.any() else None

    def find(
        self, matcher: LLMatcher, limit: int, *, literals: Sequence[Sequence[int]], thorough: int, search: Search
    ) -> list[int] | None:
        """At most `limit` tokens, the last one an EOS, that complete what the matcher has seen; it is not changed.

        Where the quick way finds none, the thorough one is taken, which costs far more: for `thorough` tokens at most.
        """
        closing = self._walk(matcher, limit, literals, self._quick, search)
        return closing or self._walk(matcher, min(limit, thorough), literals, self._thorough, search)

    def _walk(
        self, matcher: LLMatcher, limit: int, literals: Sequence[Sequence[int]], choose: _Choose, search: Search
    ) -> list[int] | None:
        matcher = matcher.deep_copy()
        tokens: list[int] = []
        uses: Counter[int] = Counter()
        while len(tokens) < limit and not matcher.is_error():
            if matcher.is_stopped() or matcher.is_accepting():
                return [*tokens, self.eos_token_id]
            next_tokens = matcher.compute_ff_tokens()
            if not next_tokens:
                mask_V = self.allowed(matcher)
                search.count(MASK_TRIES)
                if mask_V is None:
                    break
                last_tokens = self._last_tokens(matcher, mask_V, literals, search)
                next_tokens = last_tokens or [choose(matcher, mask_V, uses, search)]
            if not matcher.consume_tokens(next_tokens):
                break
            tokens += next_tokens
        search.error = _first_line(matcher.get_error()) if matcher.is_error() else ""
        return None

    def _last_tokens(
        self, matcher: LLMatcher, mask_V: np.ndarray, literals: Sequence[Sequence[int]], search: Search
    ) -> list[int] | None:
        """Tokens with which the answer is complete."""
        candidates = self._order_V[mask_V[self._order_V]][:NUM_TRIED]
        single = self._single[mask_V[self._single]]
        for tokens in (*([t] for t in (*candidates.tolist(), *single.tolist())), *literals):
            search.count(len(tokens))
            if matcher.validate_tokens([*tokens, self.eos_token_id]) == len(tokens) + 1:
                return list(tokens)
        return None

    def _quick(self, matcher: LLMatcher, mask_V: np.ndarray, uses: Counter[int], search: Search) -> int:
        candidates = self._order_V[mask_V[self._order_V]][:NUM_TRIED].tolist()
        if mask_V.sum() > self._size // 4:  # inside a string, where brackets are text
            candidates = self._quotes[mask_V[self._quotes]].tolist() or candidates
        token = int(min(candidates, key=lambda t: self._rank_V[t] + uses[t] / 2))
        uses[token] += 1
        return token

    def _thorough(self, matcher: LLMatcher, mask_V: np.ndarray, seen: Counter[int], search: Search) -> int:
        """`seen` counts what was allowed at earlier positions."""
        candidates = self._order_V[mask_V[self._order_V]][: NUM_FOLLOWED // 4].tolist()
        candidates += self._single[mask_V[self._single]][:NUM_FOLLOWED].tolist()
        seen[hash(mask_V.tobytes())] += 1
        follows: dict[int, tuple[int, int, int]] = {}
        for token in dict.fromkeys(candidates):
            next_matcher = matcher.deep_copy()
            search.count(MASK_TRIES)
            if next_matcher.consume_token(token) and (next_V := self.allowed(next_matcher)) is not None:
                num_uses = seen[hash(next_V.tobytes())]
                follows[token] = (num_uses, int(next_V.sum()), -int(self._lengths_V[token]))
        return min(follows, key=lambda t: follows[t]) if follows else int(candidates[0])


_Choose = Callable[["LLMatcher", np.ndarray, Counter[int], Search], int]


def _rank(text: bytes) -> int:
    """Brackets that close, quotes, digits, other text, brackets that open."""
    if text and not text.strip(b"}])"):
        return 0
    if text and not text.strip(b'}])"'):
        return 1
    if text.isdigit():
        return 2
    return 4 if any(bracket in text for bracket in b"{[(") else 3


def _byte_ranks() -> list[int]:
    """The place of each byte: ends of lines and strings, closing brackets, other marks, digits, letters, the rest."""
    first = b"\n\"'}])>;.,:@#|/-+=_ "
    order = [*first, *b"0123456789", *range(97, 123), *range(65, 91)]
    order += [byte for byte in (*range(33, 127), *range(128), *range(128, 256)) if byte not in order]
    ranks = {byte: rank for rank, byte in reversed(list(enumerate(order)))}
    return [ranks[byte] for byte in range(256)]


_BYTE_RANK = _byte_ranks()


@dataclass(eq=False)
class GuideState:
    """What a decoding engine knows of an answer under a grammar; the guide itself may be in another process.

    pending  tokens that are decided and have no place in the Block Buffer yet
    ended    an EOS is decided
    """

    pending: list[int] = field(default_factory=list)
    ended: bool = False

    def rest(self, number: int) -> list[int]:
        """A way from the answer's first `number` tokens to its end; only the guide knows one."""
        return []


class Guide(GuideState):
    """One answer's way through its grammar.

    waited     steps in a row in which nothing was decided, because the searches of other rows were enough work
    num_waits  all such steps: the answer's noise does not count them
    """

    def __init__(
        self,
        matcher: LLMatcher,
        closings: Closings,
        *,
        literals: Sequence[Sequence[int]],
        budget: int,
        committed: Sequence[int],
        closing: Sequence[int],
        tools: bool = False,
    ) -> None:
        """`matcher` has seen what is `committed`. `budget` is how many tokens the answer may still have, its EOS
        included; `GrammarRefused` if no way to its end is found, in the words of who gave `tools` or a grammar.
        `closing` is a known one, or empty."""
        self._matcher, self._closings, self._literals, self._num_left = matcher, closings, literals, budget
        self._decided_tokens = list(committed)
        known_closing = list(closing) if closing and len(closing) <= budget and self._accepts(list(closing)) else None
        search = Search()
        new_closing = (
            closings.find(matcher, budget, literals=literals, thorough=MAX_SEARCH, search=search) or known_closing
        )
        if new_closing is None:
            accepts, it = ("calls a tool", "the tools") if tools else ("the grammar accepts", "it")
            remedy = f"simplify {it}: {search.error}" if search.error else f"raise max_tokens or simplify {it}"
            raise GrammarRefused(f"no answer of at most {budget} tokens was found that {accepts}; {remedy}")
        self._closing = new_closing
        self.waited = self.num_waits = 0
        self._room = (0, 0)  # the places and rows that it had when it began to wait
        super().__init__(self._forced_by_closing())
        self.ended = self._ends(self.pending)
        self._decided_tokens += self.pending
        self._num_left -= len(self.pending)

    def extend(
        self, num_places: int, num_rows: int, pick: Pick, *, tau: float, quota: int, search: Search
    ) -> list[tuple[int, float]]:
        """Decide tokens for at most `num_places` open positions, and their probabilities. Where that takes a new
        closing and `search` is over, there are none, and nothing has changed.

        `pick` chooses at the first `num_rows` of them. The first `quota` choices are taken, further ones while their
        probability exceeds `tau`, or `TAU_OVERRULED` where the grammar overrules the model: its confidence is then
        that of another text. With `tau` 1 only the quota is taken. A forced token has probability 1. What has no place
        becomes `pending`. Places that were added while it waited are not used: it decides what it would have decided
        at once.
        """
        assert not self.pending and not self.ended
        if self.waited:
            num_places, num_rows = map(min, self._room, (num_places, num_rows))
        self._room = (num_places, num_rows)
        eager = tau if tau >= 1 else min(tau, TAU_OVERRULED)
        trail: list[tuple[int, float]] = []
        marks = [0]  # lengths of the trail after each choice
        mask_V = self._closings.allowed(self._matcher)
        while mask_V is not None and len(trail) < min(num_rows, num_places):
            choice = pick(len(trail), mask_V)
            if len(marks) > quota and choice.probability <= (eager if choice.overruled else tau):
                break
            trail.append((choice.token, choice.probability))
            mask_V = None
            if choice.token != self._closings.eos_token_id:
                self._matcher.consume_token(choice.token)
                forced_tokens, mask_V = self._force(self._num_left - len(trail))
                trail += [(token, 1.0) for token in forced_tokens]
            marks.append(len(trail))
        trail = self._close(trail, marks, search)
        if len(trail) == self._num_left - 1 and self._closing == [self._closings.eos_token_id]:
            trail.append((self._closing.pop(), 1.0))  # nothing else has room
        self.waited = 0 if trail else self.waited + 1
        self.num_waits += not trail
        self._num_left -= len(trail)
        self._decided_tokens += [token for token, _ in trail]
        self.pending = [token for token, _ in trail[num_places:]]
        self.ended = self._ends([token for token, _ in trail])
        return trail[:num_places]

    def rest(self, number: int) -> list[int]:
        """A way from the answer's first `number` tokens to its end: what is decided behind them, and a closing."""
        return self._decided_tokens[number:] + self._closing

    def _ends(self, tokens: list[int]) -> bool:
        return tokens[-1:] == [self._closings.eos_token_id]

    def _force(self, limit: int) -> tuple[list[int], np.ndarray | None]:
        """Consume the tokens that must follow, about `limit` at most; and what is allowed (V,) behind them: `None`
        after an EOS, and where the matcher cannot say. A token must follow where the text must go on with it, and
        where no other one is allowed."""
        eos, tokens = self._closings.eos_token_id, list[int]()
        while True:
            forced_tokens = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
            if not forced_tokens:
                mask_V = self._closings.allowed(self._matcher)
                if mask_V is None or len(tokens) >= limit or mask_V.sum() > 1:
                    return tokens, mask_V
                forced_tokens = [int(mask_V.argmax())]
            tokens += forced_tokens
            if tokens[-1] == eos:
                return tokens, None
            self._matcher.consume_tokens(forced_tokens)

    def _forced_by_closing(self) -> list[int]:
        """Forced tokens, taken from the closing; none where it writes the same text with other tokens."""
        tokens, _ = self._force(self._num_left)
        if self._closing[: len(tokens)] != tokens:
            self._matcher.rollback(len(tokens) - self._ends(tokens))
            return []
        self._closing = self._closing[len(tokens) :]
        return tokens

    def _close(self, trail: list[tuple[int, float]], marks: list[int], search: Search) -> list[tuple[int, float]]:
        """As many of the choices as leave a closing; if none does, or there is none, the closing's next token.

        A new closing is looked for once, behind all choices; behind fewer of them only what is known counts. None of
        the choices, where it takes a new one and `search` was over before."""
        has_searched, may_look = False, not search.is_over
        while len(marks) > 1 and not self._matcher.is_error():
            tokens = [token for token, _ in trail]
            closing = self._rest_of_closing(tokens)
            if closing is None and not self._ends(tokens):
                closing = self._end_of_known(self._num_left - len(tokens), search)
                if closing is None and not has_searched:
                    if not may_look:
                        return self._without(trail, 0)
                    closing = self._find_closing(self._num_left - len(tokens), search)
            has_searched = True
            if closing is not None:
                self._closing = closing
                return trail
            marks.pop()
            trail = self._without(trail, marks[-1])
        if self._matcher.is_error() or self._closing[:1] == [self._closings.eos_token_id]:
            tokens, self._closing = self._closing, []  # the matcher can say nothing more
        else:
            tokens, self._closing = self._closing[:1], self._closing[1:]
            self._matcher.consume_token(tokens[0])
            tokens += self._forced_by_closing()
        return [(token, 1.0) for token in tokens]

    def _without(self, trail: list[tuple[int, float]], number: int) -> list[tuple[int, float]]:
        """The first `number` of the choices; the matcher forgets the others."""
        tokens = [token for token, _ in trail[number:] if token != self._closings.eos_token_id]
        self._matcher.rollback(len(tokens))
        return trail[:number]

    def _rest_of_closing(self, tokens: list[int]) -> list[int] | None:
        """What is left of the known closing after these tokens, if they are its first ones, or the answer's last."""
        if tokens[-1] == self._closings.eos_token_id:
            return [] if len(tokens) <= self._num_left else None
        closing = self._closing
        return closing[len(tokens) :] if tokens == closing[: len(tokens)] else None

    def _end_of_known(self, limit: int, search: Search) -> list[int] | None:
        """An end of the known closing that is a closing of at most `left` tokens."""
        closing = self._closing
        for start in range(len(closing) - 1, max(-1, len(closing) - NUM_TRIED), -1):
            search.count(len(closing) - start)
            if len(closing) - start <= limit and self._accepts(closing[start:]):
                return closing[start:]
        return None

    def _find_closing(self, num_left: int, search: Search) -> list[int] | None:
        limit = min(num_left, MAX_SEARCH)
        return self._closings.find(self._matcher, limit, literals=self._literals, thorough=MAX_THOROUGH, search=search)

    def _accepts(self, tokens: list[int]) -> bool:
        if len(tokens) == 1:  # an EOS
            return self._matcher.is_stopped() or self._matcher.is_accepting()
        return self._matcher.validate_tokens(tokens) == len(tokens)


class Grammars:
    """Compiles the grammars of one model's requests; may be called from several threads.

    A grammar that was compiled lately is not compiled again.
    """

    def __init__(self, vocabulary: Vocabulary, *, eos_token_id: int, forbidden: Sequence[int] = ()) -> None:
        """`vocabulary` is called once, with the first grammar; `forbidden` tokens are never allowed."""
        self._vocabulary, self._eos_token_id, self._forbidden = vocabulary, eos_token_id, tuple(forbidden)
        self._parts: tuple[LLTokenizer, Closings] | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guide(
        self, grammar: Grammar, *, max_tokens: int, committed: Sequence[int] = (), closing: Sequence[int] = ()
    ) -> Guide:
        """The guide of an answer of at most `max_tokens` tokens, its EOS included, that begins with `committed` and
        can go on with `closing`, if that is known. Raises `GrammarRefused`.

        Where the answer may be cut, its EOS has a place behind the last token, which is never reached.
        """
        matcher, closings = self._matcher(grammar)
        if not matcher.consume_tokens(list(committed)):
            raise GrammarRefused("the grammar does not accept the tokens that were committed before")
        try:
            return Guide(
                matcher,
                closings,
                literals=closings.literals(grammar),
                budget=max_tokens - len(committed) + grammar.may_be_cut,
                committed=committed,
                closing=closing,
                tools=bool(grammar.schemas),
            )
        except GrammarRefused:
            if not (special := closings.special_in(grammar)):
                raise
            accepted = "calls a tool" if grammar.schemas else "the grammar accepts"
            raise GrammarRefused(f"no answer was found that {accepted}: {special}") from None

    def _matcher(self, grammar: Grammar) -> tuple[LLMatcher, Closings]:
        """A matcher of its own, at the beginning."""
        with self._lock:
            if self._parts is None:
                tokenizer = self._vocabulary()
                self._parts = (
                    tokenizer,
                    Closings(tokenizer, eos_token_id=self._eos_token_id, forbidden=self._forbidden),
                )
            tokenizer, closings = self._parts
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar].deep_copy(), closings
        compiled = _compile(tokenizer, grammar)
        if closings.allowed(compiled) is None:
            reason = closings.special_in(grammar) or _first_line(compiled.get_error())
            accepts = "accept no call" if grammar.schemas else "accepts no text"
            raise GrammarRefused(f"{grammar.subject()} {accepts}: {reason or 'no token may begin the answer'}")
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy(), closings


MAX_PLACES = 200  # parts of a schema that are compiled alone, to find the one that cannot be honoured


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    matcher, reason = _matcher_of(tokenizer, grammar.syntax, grammar.whole)
    if matcher is None:
        for subject, schema in grammar.parts:
            _check_part(tokenizer, subject, schema)
        if grammar.schemas:
            why = f"their parameters are too many to be followed together ({reason})"
            raise GrammarRefused(f"the {grammar.num_tools} tools cannot be honoured: {why}; give fewer tools")
        raise GrammarRefused(f"{grammar.subject()} cannot be honoured: {reason}")
    for subject, schema in grammar.parts:
        try:
            check_bounds(schema)
        except GrammarRefused as error:
            raise GrammarRefused(f"{subject} {error}") from None
    return matcher


_REMEDIES = {
    "Unimplemented keys": "leave them out, and check them yourself",
    "look-around": "write the pattern without it, or leave it out and check it yourself",
    "lookarounds": "give ^ and $ at the pattern's ends alone",
    "backreferences": "write the pattern without them, or leave it out and check it yourself",
    "Invalid type": "give string, number, integer, boolean, array, object or null, in small letters",
    "type must be": "leave it out for any value",
    "intersection stack level": "a reference leads to itself; give the schema that it stands for",
}
"""By a part of llguidance's message: what to do."""


def _check_part(tokenizer: LLTokenizer, subject: str, schema: str) -> None:
    """Raise `GrammarRefused` for a schema that llguidance does not take, with the place of its least part."""
    matcher, reason = _matcher_of(tokenizer, "json_schema", schema)
    if matcher is not None:
        return
    root = json.loads(schema)
    shared = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
    path: tuple[str, ...] = ()
    part, tries = root, MAX_PLACES
    while True:
        for way, inner in inner_schemas(part):
            tries -= 1
            if tries < 0:
                break
            found, inner_reason = _matcher_of(tokenizer, "json_schema", json.dumps({**shared, **inner}))
            if found is None:
                part, path, reason = inner, (*path, *way), inner_reason
                break
        else:
            break
        if tries < 0:
            break
    if "coerce_one_of" in reason:
        reason = "oneOf needs alternatives that exclude each other by type or by constants; give anyOf"
    elif "Default retriever" in reason:
        reason = "a reference to another document is not followed; put its schema into $defs"
    else:
        reason += next((f"; {remedy}" for found, remedy in _REMEDIES.items() if found in reason), "")
    raise GrammarRefused(f"{subject} cannot be honoured{at(path)}: {reason}")


def _matcher_of(tokenizer: LLTokenizer, syntax: Syntax, text: str) -> tuple[LLMatcher | None, str]:
    """A matcher of a text, or `None` and why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        if syntax == "json_schema":
            text = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        elif syntax == "regex":
            text = LLMatcher.grammar_from_regex(text)
        else:
            text = LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        return None, _first_line(str(error))
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    return (None, _first_line(matcher.get_error())) if matcher.is_error() else (matcher, "")


def _first_line(text: str) -> str:
    """The first line of an error, and the last one too where the first only announces it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] = f"{lines[0]} {lines[-1].removeprefix('error: ')}"
    return lines[0][:200]
