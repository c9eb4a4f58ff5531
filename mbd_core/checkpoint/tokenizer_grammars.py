"""The grammars of a model's requests over its own tokenizer."""

from functools import partial

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerBase

from mbd_core.decoding.grammar import GrammarRefused
from mbd_core.decoding.guide import Grammars
from mbd_core.models.model_config import ModelConfig


def grammars_of(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> Grammars:
    """Answers end with the model's first EOS; its mask and its other EOS tokens are never allowed."""
    eos, *others = model.eos_token_ids or (0,)
    return Grammars(partial(_vocabulary, tokenizer, eos), eos_token_id=eos, forbidden=(model.mask_token_id, *others))


def _vocabulary(tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=eos_token_id)
    except ValueError as error:
        raise GrammarRefused(f"the model's tokenizer cannot follow a grammar: {error}") from None
