"""Short ends of answers under a grammar: the search for tokens that complete an answer within its budget.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.matchers import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_TRIED, NUM_FOLLOWED = 64, 24  # tokens tried at a position, and tokens whose next position is looked at
MAX_LITERALS = 32
MASK_TRIES = 40  # computing the allowed tokens costs about as much as trying this number of tokens
STEP_TRIES = 25_000  # of all rows of a step together; beyond these no other row begins to look for a new closing


class Search:
    """The budget of one step's guides to find closings, counted in tried tokens.

    It is a count instead of a time, so that the same rows are always decided alike. A search that has begun goes to
    its own end.

    error  why the matcher failed in the latest walk that found no closing; empty if it did not fail
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
    """A tokenizer in llguidance's form."""

    def __call__(self) -> LLTokenizer: ...


class Closings:
    """Searches for short ends of answers, in two ways.

    The quick way takes tokens that close something; it suffices for JSON. The thorough way takes tokens after
    which few tokens are allowed, or another set of tokens than before. At each position, both ways try whether one
    more token, or a literal of the grammar, ends the answer.
    """

    def __init__(self, tokenizer: LLTokenizer, *, eos_token_id: int, forbidden: Sequence[int]) -> None:
        self.eos_token_id, self.tokenizer, self._size = eos_token_id, tokenizer, tokenizer.vocab_size
        texts = [tokenizer.decode_bytes([token]) for token in range(self._size)]
        special = [texts[t].decode(errors="replace") for t in range(self._size) if tokenizer.is_special_token(t)]
        self._special = [text for text in special if text]
        self._rank_V = np.array([_rank(text) for text in texts])
        self._lengths_V = np.array([len(text) for text in texts])
        self._order_V = np.lexsort((-self._lengths_V, self._rank_V))
        single = np.flatnonzero(self._lengths_V == 1)
        self._single = np.array(sorted(single, key=lambda t: _BYTE_RANK[texts[t][0]]), dtype=np.int64)
        self._quotes = np.flatnonzero([text == b'"' for text in texts])
        self._by_text = {text: token for token, text in enumerate(texts) if len(text) > 1}
        self._never = np.array(sorted(forbidden), dtype=np.int64)

    def literals(self, grammar: Grammar) -> list[list[int]]:
        """The tokens of plain words and marks in a grammar's text."""
        if grammar.syntax == "json_schema":
            return []
        words = dict.fromkeys(re.findall(r"[^\\.^$|?*+()\[\]{}\"\s]{2,}", grammar.whole))
        return [self.tokenizer.tokenize_str(text) for text in list(words)[:MAX_LITERALS]]

    def marks(self, grammar: Grammar) -> list[list[int]]:
        """The tokens of each mark that ends a string without quotes: its own token, and the tokens of its
        characters."""
        own = [self._by_text[mark.encode()] for mark in grammar.marks if mark.encode() in self._by_text]
        return [[token] for token in own] + [self.tokenizer.tokenize_str(mark) for mark in grammar.marks]

    def special_in(self, grammar: Grammar) -> str:
        """The reason why an answer may not be found, if a special token's text stands in the grammar; else empty."""
        text = grammar.whole.replace("\\", "")
        name = next((special for special in self._special if special in text), None)
        return "" if name is None else f"'{name}' is a special token's text, which no answer has"

    def allowed(self, matcher: LLMatcher) -> np.ndarray | None:
        """The tokens (V,) that may come next; `None` if the matcher cannot say."""
        if matcher.is_error():
            return None
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            return None
        mask_V = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask_V[self._never[self._never < self._size]] = False
        return mask_V if mask_V.any() else None

    def find(
        self,
        matcher: LLMatcher,
        limit: int,
        *,
        literals: Sequence[Sequence[int]],
        marks: Sequence[Sequence[int]] = (),
        thorough: int,
        search: Search,
    ) -> list[int] | None:
        """At most `limit` tokens, the last one an EOS, that complete the matcher's text. The matcher is unchanged.

        `marks` end strings without quotes.

        If the quick way finds no closing, the thorough way is tried, which costs far more, for at most `thorough`
        tokens.
        """
        closing = self._walk(matcher, limit, literals, marks, self._quick, search)
        return closing or self._walk(matcher, min(limit, thorough), literals, marks, self._thorough, search)

    def _walk(
        self,
        matcher: LLMatcher,
        limit: int,
        literals: Sequence[Sequence[int]],
        marks: Sequence[Sequence[int]],
        choose: _Choose,
        search: Search,
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
                next_tokens = last_tokens or self._mark_tokens(matcher, mask_V, marks, search)
                next_tokens = next_tokens or [choose(matcher, mask_V, uses, search)]
            if not matcher.consume_tokens(next_tokens):
                break
            tokens += next_tokens
        search.error = first_line(matcher.get_error()) if matcher.is_error() else ""
        return None

    def _last_tokens(
        self, matcher: LLMatcher, mask_V: np.ndarray, literals: Sequence[Sequence[int]], search: Search
    ) -> list[int] | None:
        """Tokens that complete the answer."""
        candidates = self._order_V[mask_V[self._order_V]][:NUM_TRIED]
        single = self._single[mask_V[self._single]]
        for tokens in (*([t] for t in (*candidates.tolist(), *single.tolist())), *literals):
            search.count(len(tokens))
            if matcher.validate_tokens([*tokens, self.eos_token_id]) == len(tokens) + 1:
                return list(tokens)
        return None

    def _mark_tokens(
        self, matcher: LLMatcher, mask_V: np.ndarray, marks: Sequence[Sequence[int]], search: Search
    ) -> list[int]:
        """The tokens of a mark that ends the string in which the text stands; none if it is in no string."""
        if not marks or mask_V.sum() <= self._size // 4:
            return []
        for tokens in marks:
            next_matcher = matcher.deep_copy()
            search.count(MASK_TRIES)
            if next_matcher.validate_tokens(list(tokens)) == len(tokens) and next_matcher.consume_tokens(list(tokens)):
                next_V = self.allowed(next_matcher)
                if next_V is None or next_V.sum() <= self._size // 4:
                    return list(tokens)
        return []

    def _quick(self, matcher: LLMatcher, mask_V: np.ndarray, uses: Counter[int], search: Search) -> int:
        candidates = self._order_V[mask_V[self._order_V]][:NUM_TRIED].tolist()
        if mask_V.sum() > self._size // 4:  # inside a string, where brackets are text
            candidates = self._quotes[mask_V[self._quotes]].tolist() or candidates
        token = int(min(candidates, key=lambda t: self._rank_V[t] + uses[t] / 2))
        uses[token] += 1
        return token

    def _thorough(self, matcher: LLMatcher, mask_V: np.ndarray, seen: Counter[int], search: Search) -> int:
        """The thorough way; `seen` counts the allowed tokens at earlier positions."""
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


def _rank(text: bytes) -> int:
    """The rank of a token's text, low if it may end an answer: closing brackets, quotes, digits, other text, opening
    brackets."""
    if text and not text.strip(b"}])"):
        return 0
    if text and not text.strip(b'}])"'):
        return 1
    if text.isdigit():
        return 2
    return 4 if any(bracket in text for bracket in b"{[(") else 3


def _byte_ranks() -> list[int]:
    """The rank of each byte: ends of lines and strings, closing brackets, other marks, digits, letters, the rest."""
    first = b"\n\"'}])>;.,:@#|/-+=_ "
    order = [*first, *b"0123456789", *range(97, 123), *range(65, 91)]
    order += [byte for byte in (*range(33, 127), *range(128), *range(128, 256)) if byte not in order]
    ranks = {byte: rank for rank, byte in reversed(list(enumerate(order)))}
    return [ranks[byte] for byte in range(256)]


_BYTE_RANK = _byte_ranks()

_Choose = Callable[["LLMatcher", np.ndarray, Counter[int], Search], int]
