"""A model folder's tokenizer, checked against the model, and the grammars of requests over its vocabulary."""

from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mbd_core.checkpoint.safetensor_files import read_json
from mbd_core.decoding.grammar.guide import Grammars
from mbd_core.decoding.grammar.schemas import GrammarRefused
from mbd_core.models.model_config import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path, config: ModelConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder.

    Raises `ValueError` unless its mask id is the model's (if the model has a mask) and all its ids lie in the model's
    vocabulary, and its chat templates can be parsed. A tokenizer that names no mask token (LLaDA's) must have a
    special token at the model's mask id.
    """
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    kind = _tokenizer_kind(folder)
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {' '.join(str(error).split())}") from None
    added = tokenizer.added_tokens_decoder.get(config.mask_token_id)
    unnamed = tokenizer.mask_token is None and added is not None and added.special
    if config.has_mask and tokenizer.mask_token_id != config.mask_token_id and not unnamed:
        raise ValueError(
            f"{folder}: config.json says mask_token_id={config.mask_token_id} but the tokenizer's mask token "
            f"{tokenizer.mask_token!r} is {tokenizer.mask_token_id}"
        )
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has ids up to {highest}, the model only a vocabulary of {config.vocab_size}; "
            "take the tokenizer that came with the model"
        )
    _check_templates(folder, tokenizer)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has one of the files that every tokenizer has."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _check_templates(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for a chat template that cannot be parsed, with the line of the error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    found = tokenizer.chat_template
    for name, template in (found if isinstance(found, dict) else {"default": found} if found else {}).items():
        try:
            render_jinja_template([], chat_template=template)  # it parses the template, and shows no conversation
        except TemplateSyntaxError as error:
            raise ValueError(
                f"{folder}: the chat template '{name}' cannot be parsed: line {error.lineno}: {error.message}; mend "
                "it in chat_template.jinja or tokenizer_config.json"
            ) from None


def _tokenizer_kind(folder: Path) -> Any:
    """The class that loads a folder's tokenizer, never running code from the checkpoint."""
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast  # tokenizer.json is the whole tokenizer
    # imported here: the other classes take half a second to import, and most folders need none of them
    from transformers import AutoTokenizer, Qwen2Tokenizer

    settings = folder / "tokenizer_config.json"
    if settings.exists() and read_json(settings).get("tokenizer_class") == "DreamTokenizer":
        return Qwen2Tokenizer  # DreamTokenizer is Qwen2's tokenizer under another name
    return AutoTokenizer


def grammars_of(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> Grammars:
    """The grammars of requests. Answers end with the model's first EOS; the model's mask and its other EOS tokens are
    never allowed."""
    eos, *others = model.eos_token_ids or (0,)
    return Grammars(partial(_vocabulary, tokenizer, eos), eos_token_id=eos, forbidden=(model.mask_token_id, *others))


def _vocabulary(tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=eos_token_id)
    except ValueError as error:
        raise GrammarRefused(f"the model's tokenizer cannot follow a grammar: {error}") from None
