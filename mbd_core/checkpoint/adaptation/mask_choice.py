"""The mask token of a model that has none: the tokenizer's own, an unused special token, or a new token.

The choice is written into the tokenizer's files key by key, so that everything else in them stays as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.safetensor_files import read_json
from mbd_core.files import write_json

NEW_MASK = "<|mask|>"
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@dataclass(frozen=True, kw_only=True)
class MaskChoice:
    """A mask token, its id, the reason for the choice, and whether the tokenizer lacks the token."""

    token: str
    token_id: int
    reason: str
    is_new: bool = False

    def __str__(self) -> str:
        return f"{self.token} ({self.token_id}), {self.reason}"


def choose_mask(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], wanted: str | None = None) -> MaskChoice:
    """The mask token: `wanted`; or else the tokenizer's own, its last unused special token, or a new token.

    `ends` are the ids that end the model's answers. A special token is unused if it has no role (beginning, end,
    padding, unknown) and the chat template does not name it. Raises `ValueError` if `wanted` is in use.
    """
    uses = _uses(tokenizer, ends)
    specials = {entry.content: number for number, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    unused = [token for token in sorted(specials, key=specials.__getitem__) if token not in uses]
    vocabulary = tokenizer.get_vocab()
    next_id = max(vocabulary.values(), default=-1) + 1
    if wanted is not None:
        if not wanted.strip():
            raise ValueError("--mask-token must be a text that is not blank")
        if wanted in vocabulary and wanted not in unused:
            use = uses.get(wanted, "a token of ordinary text")
            others = f"take an unused one, such as {unused[-1]}" if unused else f"take a new one, such as {NEW_MASK}"
            raise ValueError(f"--mask-token {wanted} is {use}, which the model must tell from a mask; {others}")
        is_new = wanted not in vocabulary
        number = next_id if is_new else vocabulary[wanted]
        return MaskChoice(token=wanted, token_id=number, reason="as asked for", is_new=is_new)
    own = tokenizer.mask_token
    if own in vocabulary and own not in uses:
        return MaskChoice(token=own, token_id=vocabulary[own], reason="the tokenizer's own mask token")
    if unused:
        return MaskChoice(token=unused[-1], token_id=specials[unused[-1]], reason="an unused special token")
    name = next(n for n in (NEW_MASK, *(f"<|mask_{i}|>" for i in range(len(vocabulary) + 1))) if n not in vocabulary)
    reason = "a new token, because every special token is in use"
    return MaskChoice(token=name, token_id=next_id, reason=reason, is_new=True)


def _uses(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> dict[str, str]:
    """The special tokens in use, each with its use."""
    uses = {tokenizer.convert_ids_to_tokens(number): "an end of answers" for number in ends}
    roles = {
        "the beginning of texts": tokenizer.bos_token,
        "the end of texts": tokenizer.eos_token,
        "the padding": tokenizer.pad_token,
        "the unknown token": tokenizer.unk_token,
        "a separator": tokenizer.sep_token,
        "a class token": tokenizer.cls_token,
    }
    uses |= {token: role for role, token in roles.items() if token is not None}
    templates = tokenizer.chat_template or ""
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
    named = [entry.content for entry in tokenizer.added_tokens_decoder.values() if entry.content in text]
    return uses | dict.fromkeys(named, "named by the chat template")


def write_mask(folder: Path, choice: MaskChoice) -> None:
    """Write the mask's role into a folder's tokenizer files, and also the token if it is new."""
    settings_path, whole_path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    settings = _read(settings_path)
    settings["mask_token"] = choice.token
    if whole_path.exists():
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if choice.is_new:
        entry = {"content": choice.token, **SPECIAL}
        if whole_path.exists():
            whole = _read(whole_path)
            whole["added_tokens"] = [*(whole.get("added_tokens") or ()), {"id": choice.token_id, **entry}]
            write_json(whole_path, whole)
        if "added_tokens_decoder" in settings or not whole_path.exists():
            settings["added_tokens_decoder"] = {
                **settings.get("added_tokens_decoder", {}),
                str(choice.token_id): entry,
            }
    write_json(settings_path, settings)
    roles_path = folder / "special_tokens_map.json"
    if roles_path.exists():
        write_json(roles_path, {**_read(roles_path), "mask_token": choice.token})


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
