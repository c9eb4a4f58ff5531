"""The comparison of Fig. 2: a trace of the same prompts under SingleBD and under MultiBD, or under named methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import NAMED_METHODS
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.evaluation.sweep.grid import plan_variants
from mbd_core.models.decoder import Decoder
from mbd_core.trace.recorder import TraceRecorder
from mbd_core.trace.traced_run import TracedRun, read_run

MAX_ROWS = 8
MULTI_BUFFER_SIZE = 4  # if the model recommends SingleBD or no buffer size


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A method's trace, and the counts of its requests."""

    method: str
    run: TracedRun
    counts: list[Counts]

    @property
    def settings(self) -> dict[str, Any]:
        """The report's lines on the requests: useful tokens, forwards, and tokens per forward."""
        mean_tpf = sum(c.tpf for c in self.counts) / len(self.counts)
        return {
            f"{self.method} useful tokens": sum(c.num_tokens for c in self.counts),
            f"{self.method} forwards": sum(c.num_forwards for c in self.counts),
            f"{self.method} mean TPF": round(mean_tpf, 4),
        }


def compared_decodings(
    defaults: Mapping[str, Any], fields: Mapping[str, Any], *, block_size: int, buffer_size: int | None
) -> dict[str, DecodingConfig]:
    """SingleBD, and MultiBD with `buffer_size` slots (default: the model's recommendation, or 4).

    `fields` override the model's own decoding fields `defaults`. Raises `ValueError` for settings that are not
    possible.
    """
    recommended = decoding_config(defaults, {}, block_size=block_size).buffer_size
    size = buffer_size or (recommended if recommended > 1 else MULTI_BUFFER_SIZE)
    if size < 2:
        raise ValueError(f"--buffer-size {size} is SingleBD itself; give at least 2")
    return {
        name: decoding_config(defaults, {**fields, "buffer_size": slots}, block_size=block_size)
        for name, slots in (("SingleBD", 1), ("MultiBD", size))
    }


def named_decodings(
    defaults: Mapping[str, Any], fields: Mapping[str, Any], names: Sequence[str], *, block_size: int
) -> dict[str, DecodingConfig]:
    """The decodings of methods by their names in a report. `fields` override each method's own fields. Raises
    `ValueError` for an unknown method, and for settings that are not possible."""
    methods = dict(NAMED_METHODS) | {
        name: {**NAMED_METHODS[name], **fields} for name in names if name in NAMED_METHODS
    }
    variants = plan_variants({}, names, methods=methods, defaults=defaults, block_size=block_size)
    return {variant.method: variant.decoding for variant in variants if variant.decoding is not None}


def record_run(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    path: Path,
    *,
    method: str,
    decoding: DecodingConfig,
    max_tokens: int,
    vocab_limit: int | None = None,
    draft_model: Decoder | None = None,
) -> RecordedRun:
    """Decode the prompts by one method and write a detailed trace to `path`; request n has the id "n".

    Raises the engine's `ValueError`.
    """
    recorder = TraceRecorder(detail=True)
    config = EngineConfig(max_rows=MAX_ROWS, buffer_size=decoding.buffer_size)
    engine = Engine(model, config, trace=recorder, vocab_limit=vocab_limit, draft_model=draft_model)
    requests = [
        Request(request_id=str(number), prompt=tuple(prompt), max_tokens=max_tokens, decoding=decoding)
        for number, prompt in enumerate(prompts)
    ]
    counts = [output.counts for output in engine.generate(requests)]
    recorder.write(path)
    name = f"{method} (buffer of {decoding.buffer_size})" if decoding.buffer_size > 1 else method
    return RecordedRun(method=method, run=read_run(path, name=name), counts=counts)
