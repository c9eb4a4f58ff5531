"""Text that spells a control token stays text; control tokens that a chat template writes stay control tokens.

A tokenizer reads `<|endoftext|>` as the end of a text wherever it stands. So before a template renders messages, the
first character of each control token in their contents becomes a private character. Then the tokenizer finds only the
template's own control tokens. If the text between two of these holds private characters, its original characters are
tokenised without a search for control tokens. All other text keeps its usual tokens. Texts keep their lengths, so
templates may strip, split and dump them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

from mbd_core.json_text import HALF

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
PRIVATE = range(0xFDD0, 0x110000)
"""Candidates for private characters. Unicode's non-characters come first, because texts hardly have them."""


@dataclass(frozen=True)
class Masking:
    """The control tokens in some texts, and a private character for each of their first characters."""

    controls: tuple[str, ...] = ()
    private: Mapping[str, str] = field(default_factory=dict)

    def masked(self, text: str) -> str:
        """A text in which a tokenizer finds no control token."""
        for control in self.controls:
            while control in text:
                text = text.replace(control, self.private[control[0]] + control[1:])
        return text

    def masked_json(self, value: T) -> T:
        """An object of JSON whose texts are masked."""
        return json.loads(self.masked(_json(value))) if self.controls else value

    def plain(self, text: str) -> str:
        """A masked text with its original characters."""
        return text.translate({ord(private): first for first, private in self.private.items()})

    def hides_in(self, text: str) -> bool:
        """Whether a text has private characters."""
        return any(private in text for private in self.private.values())


@dataclass(frozen=True)
class MaskedText:
    """A text for `token_ids`: its contents are masked, the template's own text is not."""

    text: str
    masking: Masking = Masking()

    @property
    def plain(self) -> str:
        return self.masking.plain(self.text)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens that steer and are not text: BOS, EOS, mask, padding and all tokens marked special.

    Tokens that a model writes as text, like `<think>`, are added to a vocabulary without that mark.
    """
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*added, *tokenizer.all_special_tokens} - {""}


def masking_of(tokenizer: PreTrainedTokenizerBase, *values: Any) -> Masking:
    """The masking of all texts in `values`, objects of JSON. It changes nothing if no text spells a control token."""
    texts = [value if isinstance(value, str) else _json(value) for value in values]
    controls = tuple(sorted(c for c in control_tokens(tokenizer) if any(c in text for text in texts)))
    characters = set().union(*texts) if controls else set()
    free = (chr(code) for code in PRIVATE if chr(code) not in characters)
    firsts = sorted({control[0] for control in controls})
    return Masking(controls, dict(zip(firsts, free, strict=False)))


def fixed_masking(tokenizer: PreTrainedTokenizerBase) -> Masking:
    """A masking of every control token, for texts that come one by one. They must not hold its private characters."""
    controls = tuple(sorted(control_tokens(tokenizer)))
    firsts = sorted({control[0] for control in controls})
    return Masking(controls, dict(zip(firsts, map(chr, PRIVATE), strict=False)))


def literal(tokenizer: PreTrainedTokenizerBase, text: str) -> MaskedText:
    """A text without a template: all of it stays text."""
    masking = masking_of(tokenizer, text)
    return MaskedText(masking.masked(text), masking)


def token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[MaskedText], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """The ids of texts, tokenised together, with or without the tokenizer's own special tokens around them.

    Raises `ValueError` for a text with half of a surrogate pair. Raises it too for a text that spells a control token,
    if the tokenizer has no offsets (is not a fast one).
    """
    if not texts:
        return []
    for masked in texts:
        if half := HALF.search(masked.text):
            raise ValueError(f"a text holds {half[0]!r}, half of a surrogate pair, which is no character; remove it")
    hides = [masked.masking.hides_in(masked.text) for masked in texts]
    plain = [masked.text for masked, has_private in zip(texts, hides, strict=True) if not has_private]
    plain_ids = iter(tokenizer(plain, add_special_tokens=add_special_tokens)["input_ids"] if plain else [])
    return [
        _masked_ids(tokenizer, masked, add_special_tokens=add_special_tokens) if has_private else next(plain_ids)
        for masked, has_private in zip(texts, hides, strict=True)
    ]


def evaluated_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    masking: Masking,
    *,
    in_chat: bool,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """The ids of a text of an evaluation.

    A text made by a chat template (`in_chat`, contents masked by `masking`) or beginning with the BOS gets no special
    tokens. Any other text gets the tokenizer's own, and all of it stays text.
    """
    bos = tokenizer.bos_token
    is_whole = in_chat or (bool(bos) and text.startswith(bos))
    masked_text = MaskedText(text, masking) if is_whole else literal(tokenizer, text)
    special = not is_whole if add_special_tokens is None else add_special_tokens
    return token_ids(tokenizer, [masked_text], add_special_tokens=special)[0]


def _masked_ids(tokenizer: PreTrainedTokenizerBase, masked: MaskedText, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. A stretch with private characters gets the ids of the original characters."""
    if not tokenizer.is_fast:
        raise ValueError(
            "a text spells a control token, which only a tokenizer with a tokenizer.json can keep as text"
        )
    text, masking = masked.text, masked.masking
    encoding = tokenizer(
        text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, return_special_tokens_mask=True
    )
    controls = set(tokenizer.convert_tokens_to_ids(sorted(control_tokens(tokenizer))))
    without_controls = _without_controls(tokenizer, len(tokenizer))
    ids, stretch, start = list[int](), list[int](), 0

    def end_stretch(end: int) -> None:
        part = text[start:end]
        ids.extend(
            without_controls.encode(masking.plain(part), add_special_tokens=False).ids
            if masking.hides_in(part)
            else stretch
        )
        stretch.clear()

    for number, (begin, end), is_around in zip(
        encoding["input_ids"], encoding["offset_mapping"], encoding["special_tokens_mask"], strict=True
    ):
        if is_around:  # it has no characters, and stands before or after the whole text
            if stretch:
                end_stretch(len(text))
                start = len(text)
            ids.append(number)
        elif number in controls:
            end_stretch(begin)
            ids.append(number)
            start = end
        else:
            stretch.append(number)
    end_stretch(len(text))
    return ids


@lru_cache(maxsize=4)
def _without_controls(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Tokenizer:
    """A copy of the tokenizer that finds no control tokens in texts, cached while it has `num_tokens` tokens.

    The original stays unchanged because other threads use it. Both share the vocabulary, which is large.
    """
    assert num_tokens == len(tokenizer)
    whole, controls = tokenizer.backend_tokenizer, control_tokens(tokenizer)
    plain = Tokenizer(whole.model)
    added = whole.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (plain.add_special_tokens if token.content in controls else plain.add_tokens)([token])
    if {number: token.content for number, token in plain.get_added_tokens_decoder().items()} != {
        number: token.content for number, token in added.items()
    }:  # its added tokens were numbered with gaps: the copy keeps the numbers
        plain = Tokenizer.from_str(whole.to_str())
        plain.no_truncation()
        plain.no_padding()
    plain.normalizer, plain.pre_tokenizer = whole.normalizer, whole.pre_tokenizer
    plain.encode_special_tokens = True
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
