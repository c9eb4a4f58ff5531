"""A model folder made ready to serve: engine, tokenizer, and the decoding its author recommends."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.decoding.config import DecodingConfig, decoding_config
from mbd_core.engine.engine import Engine, EngineConfig
from mbd_core.models.config import ModelConfig
from mbd_core.models.loader import load_generation_defaults, load_model, load_tokenizer
from mbd_core.trace import TraceRecorder


@dataclass(frozen=True)
class LoadedModel:
    """An engine with what surrounds it; `defaults` is the model's `generation_config.json`."""

    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    config: ModelConfig
    defaults: dict[str, Any]

    def decoding(self, overrides: Mapping[str, Any]) -> DecodingConfig:
        """The model's defaults with a request's own fields; `ValueError` for what cannot be honoured."""
        return decoding_config(self.defaults, overrides, block_size=self.config.block_size)


def load_engine(folder: Path, config: EngineConfig, *, trace: TraceRecorder | None = None) -> LoadedModel:
    """Load a Hugging Face model folder into an engine; `ValueError` names what is wrong with the folder."""
    model = load_model(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder, model.config)
    defaults = load_generation_defaults(folder)
    _check_agreement(folder, model.config, defaults)
    engine = Engine(model, config, trace=trace, vocab_limit=len(tokenizer))
    return LoadedModel(folder.name, engine, tokenizer, model.config, defaults)


def _check_agreement(folder: Path, config: ModelConfig, defaults: Mapping[str, Any]) -> None:
    """The ids that both JSON files name must be the same ones."""
    eos = defaults.get("eos_token_id", list(config.eos_token_ids))
    for name, there, here in (
        ("mask_token_id", defaults.get("mask_token_id", config.mask_token_id), config.mask_token_id),
        ("eos_token_id", set(eos if isinstance(eos, list) else [eos]), set(config.eos_token_ids)),
    ):
        if there != here:
            raise ValueError(f"{folder}: generation_config.json says {name}={there}, config.json says {here}")
