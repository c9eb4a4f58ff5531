"""A model as the API sees it: its name, its tokenizer, its limits, and where its tokens come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.folder import edit_note
from mbd_core.decoding.decoding_config import DecodingConfig, decoding_config
from mbd_core.decoding.speed_front import SpeedFront, read_front
from mbd_core.engine.admission import Admission
from mbd_core.serving.token_stream import TokenSource


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an engine tells those who send it requests.

    generation  the model's `generation_config.json`, with the engine's block size for a model trained without one
    capacity    requests that may run and wait together
    """

    admission: Admission
    block_size: int
    generation: Mapping[str, Any]
    capacity: int


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """`limits` are those of one engine, `num_engines` how many take the requests, at most.

    adapter  the LoRA adapter that stands behind the name
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    limits: EngineLimits
    source: TokenSource
    num_engines: int = 1
    adapter: str | None = None

    @property
    def capacity(self) -> int:
        """Requests that all engines together take at once."""
        return self.num_engines * self.limits.capacity

    @cached_property
    def speed_front(self) -> SpeedFront | None:
        """The model's measured front, if it has one."""
        return read_front(self.limits.generation, block_size=self.limits.block_size)

    def decoding(self, overrides: Mapping[str, Any]) -> DecodingConfig:
        """The model's defaults with a request's own fields; `ValueError` for what cannot be honoured."""
        return decoding_config(self.limits.generation, overrides, block_size=self.limits.block_size)

    def edit_note(self, decoding: DecodingConfig) -> str | None:
        """The note on T2T under a model that was not trained for it."""
        return edit_note(self.name, self.limits.generation, decoding)
