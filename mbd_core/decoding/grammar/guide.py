"""The tokens that an answer under a grammar may have at its next position, and its end within the budget of tokens.

The positions of an answer are decided from left to right, several in a forward: a grammar knows the continuation of a
text, but not the text after a gap. Three kinds of tokens are decided at once and need no forward: tokens that the
grammar forces, the only allowed token, and an EOS if nothing else has room.

A guide always knows a closing: tokens that complete the answer within its budget (`closings.py`). A decision that
leaves no closing is undone, and the closing's next token is decided instead. So an answer is never cut in its middle,
and an answer whose grammar becomes too complex is closed.

The matcher is llguidance's. It is imported when a grammar is compiled, so an engine without grammars runs without it,
for example in the benchmarks of a bare GPU machine.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mbd_core.decoding.grammar.closings import NUM_TRIED, Closings, Search, Vocabulary
from mbd_core.decoding.grammar.grammar import FORM, Grammar
from mbd_core.decoding.grammar.matchers import compile_grammar, first_line, tool_matchers
from mbd_core.decoding.grammar.schemas import GrammarRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True)
class AllowedToken:
    """An allowed token, and its probability among the allowed tokens.

    overruled  the model's likeliest token is not allowed
    """

    token: int
    probability: float
    overruled: bool


Pick = Callable[[int, np.ndarray], AllowedToken]
"""The choice at the i-th open position among the allowed tokens (V,)."""

TAU_OVERRULED = 0.1  # the threshold of an overruled choice, if it is below `tau` and `tau` is below 1

MAX_COMPILED = 32  # grammars cached for other requests
MAX_SEARCH, MAX_THOROUGH = 256, 16  # most tokens of a closing found between two forwards, quickly and thoroughly


@dataclass(eq=False)
class GuideState:
    """An engine's view of an answer under a grammar. The guide itself may be in another process.

    pending  decided tokens without a place in the Block Buffer
    ended    an EOS is decided
    """

    pending: list[int] = field(default_factory=list)
    ended: bool = False

    def rest(self, number: int) -> list[int]:
        """The tokens after the answer's first `number` tokens; none here, because only the guide knows them."""
        return []


class Guide(GuideState):
    """One answer's way through its grammar.

    waited     steps in a row without a decision, because other rows used up the step's searches
    num_waits  all such steps; the answer's noise does not count them
    """

    def __init__(
        self,
        matcher: LLMatcher,
        closings: Closings,
        *,
        literals: Sequence[Sequence[int]],
        marks: Sequence[Sequence[int]] = (),
        budget: int,
        committed: Sequence[int],
        closing: Sequence[int],
    ) -> None:
        """`matcher` has seen the `committed` tokens. `budget` bounds the answer's further tokens, its EOS included.
        `closing` is at most as long."""
        self._matcher, self._closings, self._num_left = matcher, closings, budget
        self._literals, self._marks = literals, marks
        self._decided_tokens, self._closing = list(committed), list(closing)
        self.waited = self.num_waits = 0
        self._room = (0, 0)  # the answer's places and rows when it began to wait
        super().__init__(self._forced_by_closing())
        self.ended = self._ends(self.pending)
        self._decided_tokens += self.pending
        self._num_left -= len(self.pending)

    def extend(
        self, num_places: int, num_rows: int, pick: Pick, *, tau: float, quota: int, search: Search
    ) -> list[tuple[int, float]]:
        """Decides tokens for at most `num_places` open positions. Returns them with their probabilities.

        If a new closing is needed and `search` is over, no token is decided, and the answer waits. `pick` chooses at
        the first `num_rows` of the positions. The first `quota` choices are taken. Further choices are taken while
        their probability exceeds `tau`. If the grammar overrules the model, `TAU_OVERRULED` is enough, because the
        model's confidence is then in another text. With `tau` 1 only the quota is taken. A forced token has
        probability 1. Tokens without a place become `pending`.

        Positions added while the row waited are ignored, so waiting does not change the result.
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
                forced_tokens, mask_V = self._force(self._num_left - len(trail), self._matcher)
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

    def next_token(self, pick: Pick, search: Search) -> list[tuple[int, float]]:
        """Decides the next token: a pending token, or the choice of `pick`.

        Returns it with its probability, or nothing while the guide waits.
        """
        if self.pending:
            token, self.pending = self.pending[0], self.pending[1:]
            return [(token, 1.0)]
        return self.extend(1, 1, pick, tau=1.0, quota=1, search=search)

    def draft(self, number: int, pick: Pick) -> list[tuple[int, float]]:
        """At most `number` next tokens that the grammar allows, and their probabilities: choices, and forced tokens.

        The guide does not change. The tokens end after an EOS, or where the matcher cannot say what is allowed.
        """
        matcher, trail = self._matcher.deep_copy(), list[tuple[int, float]]()
        mask_V = None if self.pending or self.ended else self._closings.allowed(matcher)
        while mask_V is not None and len(trail) < number:
            choice = pick(len(trail), mask_V)
            trail.append((choice.token, choice.probability))
            mask_V = None
            if choice.token != self._closings.eos_token_id:
                matcher.consume_token(choice.token)
                forced_tokens, mask_V = self._force(number - len(trail), matcher)
                trail += [(token, 1.0) for token in forced_tokens]
        return trail[:number]

    def allowed(self) -> np.ndarray | None:
        """The tokens (V,) that are allowed next; `None` if the matcher cannot say."""
        return self._closings.allowed(self._matcher)

    def rest(self, number: int) -> list[int]:
        """The tokens after the answer's first `number` tokens: decided tokens, then the closing."""
        return self._decided_tokens[number:] + self._closing

    def _ends(self, tokens: list[int]) -> bool:
        return tokens[-1:] == [self._closings.eos_token_id]

    def _force(self, limit: int, matcher: LLMatcher) -> tuple[list[int], np.ndarray | None]:
        """Lets the matcher consume the tokens that must follow, about `limit` at most. Returns these tokens, and the
        tokens (V,) that are allowed after them.

        The second result is `None` after an EOS, and if the matcher cannot say. A token must follow if the text must
        go on with it, or if no other token is allowed.
        """
        eos, tokens = self._closings.eos_token_id, list[int]()
        while True:
            forced_tokens = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
            if not forced_tokens:
                mask_V = self._closings.allowed(matcher)
                if mask_V is None or len(tokens) >= limit or mask_V.sum() > 1:
                    return tokens, mask_V
                forced_tokens = [int(mask_V.argmax())]
            tokens += forced_tokens
            if tokens[-1] == eos:
                return tokens, None
            matcher.consume_tokens(forced_tokens)

    def _forced_by_closing(self) -> list[int]:
        """Forced tokens, taken from the closing; none if the closing writes the same text with other tokens."""
        tokens, _ = self._force(self._num_left, self._matcher)
        if self._closing[: len(tokens)] != tokens:
            self._matcher.rollback(len(tokens) - self._ends(tokens))
            return []
        self._closing = self._closing[len(tokens) :]
        return tokens

    def _close(self, trail: list[tuple[int, float]], marks: list[int], search: Search) -> list[tuple[int, float]]:
        """As many choices as leave a closing; if even one choice leaves none, the known closing's next token.

        A new closing is searched once, after all choices. After fewer choices only the known closing counts. No choice
        is taken if the choices need a new closing and `search` was over before.
        """
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
        """The first `number` of the choices. The matcher forgets the rest."""
        tokens = [token for token, _ in trail[number:] if token != self._closings.eos_token_id]
        self._matcher.rollback(len(tokens))
        return trail[:number]

    def _rest_of_closing(self, tokens: list[int]) -> list[int] | None:
        """The rest of the known closing, if it begins with `tokens`; `None` if it does not.

        Nothing remains if `tokens` end in an EOS; the result is `None` if they exceed the budget.
        """
        if tokens[-1] == self._closings.eos_token_id:
            return [] if len(tokens) <= self._num_left else None
        closing = self._closing
        return closing[len(tokens) :] if tokens == closing[: len(tokens)] else None

    def _end_of_known(self, limit: int, search: Search) -> list[int] | None:
        """A suffix of the known closing that is a closing of at most `limit` tokens; `None` if there is none."""
        closing = self._closing
        for start in range(len(closing) - 1, max(-1, len(closing) - NUM_TRIED), -1):
            search.count(len(closing) - start)
            if len(closing) - start <= limit and self._accepts(closing[start:]):
                return closing[start:]
        return None

    def _find_closing(self, num_left: int, search: Search) -> list[int] | None:
        limit = min(num_left, MAX_SEARCH)
        return self._closings.find(
            self._matcher,
            limit,
            literals=self._literals,
            marks=self._marks,
            thorough=MAX_THOROUGH,
            search=search,
        )

    def _accepts(self, tokens: list[int]) -> bool:
        return completes(self._matcher, tokens)


def completes(matcher: LLMatcher, tokens: list[int]) -> bool:
    """Whether `tokens`, the last one an EOS, complete the matcher's text."""
    if len(tokens) == 1:
        return matcher.is_stopped() or matcher.is_accepting()
    return matcher.validate_tokens(tokens) == len(tokens)


class Grammars:
    """Compiles the grammars of one model's requests, from several threads. Recent grammars are cached."""

    def __init__(self, vocabulary: Vocabulary, *, eos_token_id: int, forbidden: Sequence[int] = ()) -> None:
        """`vocabulary` is called once, with the first grammar; `forbidden` tokens are never allowed."""
        self._vocabulary, self._eos_token_id, self._forbidden = vocabulary, eos_token_id, tuple(forbidden)
        self._parts: tuple[LLTokenizer, Closings] | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guide(
        self, grammar: Grammar, *, max_tokens: int, committed: Sequence[int] = (), closing: Sequence[int] = ()
    ) -> Guide:
        """The guide of an answer of at most `max_tokens` tokens, its EOS included. Raises `GrammarRefused`, also if no
        closing is found.

        The answer begins with `committed` and can go on with `closing`, if a closing is known. If the answer may be
        cut, the budget has one more place, for an EOS that the answer never reaches.
        """
        matcher, closings = self._matcher(grammar)
        if not matcher.consume_tokens(list(committed)):
            raise GrammarRefused("the grammar does not accept the tokens that were committed before")
        budget = max_tokens - len(committed) + grammar.may_be_cut
        literals, marks, search = closings.literals(grammar), closings.marks(grammar), Search()
        look = partial(closings.find, limit=budget, literals=literals, marks=marks, search=search)
        found = look(matcher, thorough=MAX_SEARCH)
        if not found and 0 < len(closing) <= budget and completes(matcher, list(closing)):
            found = list(closing)
        if not found:  # the search above went along one tool
            tools = tool_matchers(closings.tokenizer, grammar)
            begun = (tool for tool in tools if tool.consume_tokens(list(committed)))
            found = next(filter(None, (look(tool, thorough=0) for tool in begun)), None)
        if not found:
            raise GrammarRefused(_no_answer(grammar, budget, closings.special_in(grammar), search.error))
        return Guide(
            matcher, closings, literals=literals, marks=marks, budget=budget, committed=committed, closing=found
        )

    def _matcher(self, grammar: Grammar) -> tuple[LLMatcher, Closings]:
        """A new matcher at the beginning of the grammar."""
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
        compiled = compile_grammar(tokenizer, grammar)
        if closings.allowed(compiled) is None:
            reason = closings.special_in(grammar) or first_line(compiled.get_error())
            accepts = "accept no call" if grammar.num_tools else "accepts no text"
            raise GrammarRefused(f"{grammar.subject()} {accepts}: {reason or 'no token may begin the answer'}")
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy(), closings


def _no_answer(grammar: Grammar, budget: int, special: str, error: str) -> str:
    """The refusal of a grammar without a closing of at most `budget` tokens."""
    accepts, it = "the grammar accepts", "it"
    if grammar.num_tools:
        text = FORM in dict(grammar.schemas)  # an answer without a call
        accepts, it = f"calls a tool{' or fits the JSON schema' if text else ''}", "the tools"
    if special:
        return f"no answer was found that {accepts}: {special}"
    remedy = f"simplify {it}: {error}" if error else f"raise max_tokens or simplify {it}"
    return f"no answer of at most {budget} tokens was found that {accepts}; {remedy}"
