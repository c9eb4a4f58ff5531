"""Text that spells a control token stays text; those that a chat template itself writes stay control tokens.

A tokenizer takes `<|endoftext|>` for the end of a text wherever it stands. So before a template renders its contents,
the first character of each control token that they spell becomes a private character, and the tokenizer finds the
template's own alone. A stretch between two of those that holds private characters then gets the tokens of its own
characters, where no control token is looked for; all others keep the tokens that they always had. Texts keep their
lengths, so templates may strip, split and dump them.
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
"""Where private characters are looked for: Unicode's non-characters, which texts hardly have, come first."""


@dataclass(frozen=True)
class Masking:
    """The control tokens that some texts spell, and a private character for each of their first characters."""

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
        """A text with its own characters."""
        return text.translate({ord(private): first for first, private in self.private.items()})

    def hides_in(self, text: str) -> bool:
        """Whether a text has private characters."""
        return any(private in text for private in self.private.values())


@dataclass(frozen=True)
class MaskedText:
    """A text for `token_ids`: its contents are masked, and what a template wrote is not."""

    text: str
    masking: Masking = Masking()

    @property
    def plain(self) -> str:
        return self.masking.plain(self.text)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens that steer and are no text: BOS, EOS, mask, padding and all that are marked special.

    Tokens that a model writes as text, as `<think>`, are added to a vocabulary without that mark.
    """
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*added, *tokenizer.all_special_tokens} - {""}


def masking_of(tokenizer: PreTrainedTokenizerBase, *values: Any) -> Masking:
    """The masking of all texts in `values`, objects of JSON; it changes nothing where none spells a control token."""
    texts = [value if isinstance(value, str) else _json(value) for value in values]
    controls = tuple(sorted(c for c in control_tokens(tokenizer) if any(c in text for text in texts)))
    characters = set().union(*texts) if controls else set()
    free = (chr(code) for code in PRIVATE if chr(code) not in characters)
    firsts = sorted({control[0] for control in controls})
    return Masking(controls, dict(zip(firsts, free, strict=False)))


def fixed_masking(tokenizer: PreTrainedTokenizerBase) -> Masking:
    """A masking of every control token, whatever the texts: for those that come one by one. They must hold none of its
    private characters."""
    controls = tuple(sorted(control_tokens(tokenizer)))
    firsts = sorted({control[0] for control in controls})
    return Masking(controls, dict(zip(firsts, map(chr, PRIVATE), strict=False)))


def literal(tokenizer: PreTrainedTokenizerBase, text: str) -> MaskedText:
    """A text that no template wrote: all of it stays text."""
    masking = masking_of(tokenizer, text)
    return MaskedText(masking.masked(text), masking)


def token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[MaskedText], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """The ids of texts, tokenised together; with or without the special tokens that the tokenizer sets around them.

    Raises `ValueError` for a text that holds half of a surrogate pair, and for one that spells a control token under a
    tokenizer without offsets (not a fast one).
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
    """The ids of a text of an evaluation. One that a chat template made (`in_chat`, its contents masked by `masking`),
    or that begins with the BOS, gets no special tokens; any other the tokenizer's own, and all of it stays text."""
    bos = tokenizer.bos_token
    is_whole = in_chat or (bool(bos) and text.startswith(bos))
    masked_text = MaskedText(text, masking) if is_whole else literal(tokenizer, text)
    special = not is_whole if add_special_tokens is None else add_special_tokens
    return token_ids(tokenizer, [masked_text], add_special_tokens=special)[0]


def _masked_ids(tokenizer: PreTrainedTokenizerBase, masked: MaskedText, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text, where a stretch with private characters has those of the characters that they stand for."""
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
        if is_around:  # it has no characters, and stands before all of the text or after it
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
    """The same tokenizer, which finds no control tokens in texts.

    A tokenizer of its own, since other threads tokenise meanwhile; the vocabulary, which is large, is the same object.
    It is kept as long as the tokenizer has so many tokens (`num_tokens`).
    """
    assert num_tokens == len(tokenizer)
    whole, controls = tokenizer.backend_tokenizer, control_tokens(tokenizer)
    plain = Tokenizer(whole.model)
    added = whole.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (plain.add_special_tokens if token.content in controls else plain.add_tokens)([token])
    if {number: token.content for number, token in plain.get_added_tokens_decoder().items()} != {
        number: token.content for number, token in added.items()
    }:  # its added tokens were numbered with gaps: a copy keeps their numbers
        plain = Tokenizer.from_str(whole.to_str())
        plain.no_truncation()
        plain.no_padding()
    plain.normalizer, plain.pre_tokenizer = whole.normalizer, whole.pre_tokenizer
    plain.encode_special_tokens = True
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
