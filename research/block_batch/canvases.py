"""The canvases that the study compares: one for each block length alone, and BlockBatch over all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS, merge_fields
from mbd_core.models.model_config import ModelConfig

VARIED = {"canvas": ("block_length", "cache"), "branches": ("block_lengths",)}


@dataclass(frozen=True, kw_only=True)
class ComparedCanvases:
    """Fast-dLLM's dual cache by block length, and BlockBatch with a branch for each of them."""

    single: dict[int, Canvas]
    block_batch: Canvas


def compared_canvases(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    max_tokens: int,
    tau: float | None = None,
    fields: Mapping[str, Any] | None = None,
) -> ComparedCanvases:
    """The canvases at `lengths`, ascending, with confidence threshold `tau` and other decoding `fields`.

    Raises `ValueError` for a block-causal model, for lengths that cannot be compared, and for fields that cannot be
    honoured or that the comparison itself varies.
    """
    if config.attention != "full":
        raise ValueError(
            f"a {config.architecture} attends in blocks: BlockBatch needs full attention (LLaDA, Dream, DiffuCoder)"
        )
    _check_lengths(lengths, max_tokens)
    others, canvas, branches = _parts(fields or {})
    if tau is not None:
        if "tau" in canvas:
            raise ValueError("the threshold is given twice, as --tau and as canvas.tau in --decoding; leave one out")
        canvas = {**canvas, "tau": tau}

    def build(method: str, changed: Mapping[str, Any]) -> Canvas:
        changes = {**others, "canvas": {**canvas, **changed}}
        result = decoding_config({}, merge_fields(METHODS[method], changes), block_size=config.block_size).canvas
        assert result is not None
        return result

    return ComparedCanvases(
        single={n: build("fast-dllm-dual", {"block_length": n}) for n in lengths},
        block_batch=build("block-batch", {"branches": {**branches, "block_lengths": list(lengths)}}),
    )


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    text = ",".join(map(str, lengths))
    if len(lengths) < 2 or list(lengths) != sorted(set(lengths)) or lengths[0] < 1:
        raise ValueError(f"--block-lengths {text} must be at least two lengths, ascending, each once")
    if lengths[-1] > max_tokens:
        raise ValueError(f"--block-lengths {text}: {lengths[-1]} exceeds --max-tokens {max_tokens}; leave it out")


def _parts(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split decoding fields: those outside `canvas`, those of `canvas` outside `branches`, those of `branches`."""
    canvas = fields.get("canvas", {})
    branches = canvas.get("branches", {}) if isinstance(canvas, Mapping) else None
    if not isinstance(canvas, Mapping) or not isinstance(branches, Mapping):
        raise ValueError(f"--decoding {dict(fields)}: canvas must be a JSON object, and branches in it as well")
    for owner, part in (("canvas", canvas), ("branches", branches)):
        for name in VARIED[owner]:
            if name in part:
                raise ValueError(f"--decoding has {owner}.{name}, which the study varies itself; leave it out")
    others = {name: value for name, value in fields.items() if name != "canvas"}
    return others, {name: value for name, value in canvas.items() if name != "branches"}, dict(branches)
