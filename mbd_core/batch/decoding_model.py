"""A model that decodes a batch."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mbd_core.engine.engine import Engine


@dataclass(frozen=True)
class DecodingModel:
    """An engine, and the tokenizer of its model."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase


class ModelRefused(ValueError):
    """A model cannot be loaded with the engine's configuration, for example without memory for a KV page."""
