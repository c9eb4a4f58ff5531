"""Log-probabilities of an answer's tokens in OpenAI's two shapes: chat's objects and completions' columns."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from mbd_core.decoding.answers.piece import Piece
from mbd_core.serving.text.committed import BROKEN, CommittedText, DecodeTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte, in a tokenizer with byte fallback; else plain text
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI writes this


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    """an object for each token"""
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a scored prompt"""
    top_logprobs: list[dict[str, float] | None] | None
    """with `logprobs` above 0: this number of likeliest tokens at each position, and the position's own token; with
    `echo` only the likeliest token"""
    text_offset: list[int]
    """where each token begins in the choice's text"""


class TokenTexts:
    """The text of a single token and, if the tokenizer shows them, its bytes; cached per token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def __call__(self, token: int) -> tuple[str, bytes | None]:
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def _look_up(self, token: int) -> tuple[str, bytes | None]:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # in the model's vocabulary but not in the tokenizer's
            return "", b""
        assert isinstance(text, str) and isinstance(piece, str)
        if (byte := BYTE_PIECE.fullmatch(piece)) is not None and text != piece:
            return text, bytes.fromhex(byte[1])
        if all(letter in LETTERS for letter in piece):
            raw = bytes(LETTERS[letter] for letter in piece)
            if raw.decode("utf-8", "replace") == text:
                return text, raw
        return text, None if BROKEN in text else text.encode()


class ChoiceLogprobs:
    """The log-probabilities of one choice. The pieces of a stream join to the lists of the whole answer.

    Every counted token has an entry, also tokens of a stop string. `text_offset` is the position, in the choice's
    text, of the first character that the token completes or begins.
    """

    def __init__(self, texts: TokenTexts, decode: DecodeTokens, *, chat: bool) -> None:
        self._texts, self._chat = texts, chat
        self._text = CommittedText(decode)
        self._length = 0

    def add(self, piece: Piece) -> ChatLogprobs | CompletionLogprobs:
        """The entries of the next tokens (natural logarithms), with the likeliest tokens at their positions."""
        tokens, logprobs, tops = piece.tokens, piece.logprobs or (), piece.tops
        if not self._chat:
            columns = self.columns(tokens, logprobs)
            if tops is not None:
                own = zip(tokens, logprobs, tops, strict=True)
                columns["top_logprobs"] = [self._by_name((*top, (token, value))) for token, value, top in own]
            return columns
        entries: list[TokenLogprob] = []
        for i, pair in enumerate(zip(tokens, logprobs, strict=True)):
            others = [] if tops is None else [self._entry(*top) for top in tops[i]]
            entries.append({**self._entry(*pair), "top_logprobs": others})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> TopLogprob:
        text, raw = self._texts(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": None if raw is None else list(raw)}

    def _by_name(self, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by the names of their tokens; of two tokens with the same name the first counts."""
        return {self.name(token): max(value, LEAST_LOGPROB) for token, value in reversed(pairs)}

    def columns(self, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> CompletionLogprobs:
        """The entries of the next tokens in the form of completions."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(self._text.push(token))
        return {
            "tokens": [self.name(token) for token in tokens],
            "token_logprobs": [max(value, LEAST_LOGPROB) for value in logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def name(self, token: int) -> str:
        """A token's name in completions."""
        text, raw = self._texts(token)
        return _escape(raw) if BROKEN in text and raw is not None else text


def _escape(raw: bytes) -> str:
    """OpenAI's name of a token that is part of a character."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _letters() -> dict[str, int]:
    """Byte-level BPE's alphabet: a printable Latin-1 byte is its own letter; other bytes have letters from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_values = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(byte_values)}


LETTERS = _letters()
