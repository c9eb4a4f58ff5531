"""The replacement of a running engine's weights, between two steps.

The parameters keep their addresses, so that CUDA graphs and the fused forward's joint weights stay valid.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from mbd_core.checkpoint.block_experts import has_blocks
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tensors import FLOAT32_ALWAYS
from mbd_core.engine.config import SwapMode
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts
from mbd_core.models.quantize import quantized_parts
from mbd_core.models.shard import served_dim
from mbd_core.ops.experts.fp8 import FP8, BlockShape, Fp8Module, quantize
from mbd_core.ops.layer.int8 import Int8Joint, Int8Module, Int8Part

WeightSource = Path | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights on the host, by the decoder's names, that fit the model they were staged for. `mode`:

    wait     running requests end with the old weights before the swap, and no other request begins
    preempt  the swap happens at once; running requests are preempted, keep their committed tokens, and go on. Only a
             canvas that has handed out tokens ends first, because its new start would contradict them

    `version` is the version of the weights; `None` means the old version plus 1.
    """

    tensors: Mapping[str, Tensor]
    mode: SwapMode
    version: int | None = None


def stage_weights(model: Decoder, source: WeightSource, mode: SwapMode) -> StagedWeights:
    """Reads and checks the weights of `source`, a model folder or the decoder's tensors by name, for `model`'s part.

    They take the host's memory until they are in place. Raises `ValueError` naming the tensor or field that does not
    fit, and leaves `model` unchanged.
    """
    if mode not in get_args(SwapMode):
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(get_args(SwapMode))}")
    dtype = model.model.norm.weight.dtype
    if isinstance(source, Path):
        try:
            keeps = quantized_parts(model) == "blocks" and has_blocks(source)
            parts: Fp8Parts | None = "blocks" if keeps else None
            source_model = load_model(source, dtype=dtype, shard=model.shard, reduce=model.reduce, fp8=parts)
        except OSError as error:
            raise ValueError(f"the folder of the weights cannot be read: {error}") from error
        theirs, ours = source_model.config, model.config
        if differs := [f.name for f in fields(ours) if getattr(theirs, f.name) != getattr(ours, f.name)]:
            name = differs[0]
            raise ValueError(
                f"{source} cannot take the place of the weights: its {name} is {getattr(theirs, name)}, the model's "
                f"{getattr(ours, name)}"
            )
        if keeps and _blocks(source_model) != _blocks(model):
            raise ValueError(f"{source} cannot take the place of the weights: its FP8 experts are in other blocks")
        return StagedWeights(_without_tied_head(source_model, source_model.state_dict()), mode)
    return StagedWeights(_check_tensors(model, source, dtype), mode)


def _blocks(model: Decoder) -> dict[str, BlockShape | None]:
    return {name: module.block for name, module in model.named_modules() if isinstance(module, Fp8Module)}


def _without_tied_head(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    is_tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in tensors.items() if not (is_tied and name == "lm_head.weight")}


def _check_tensors(model: Decoder, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies whole tensors, or this rank's part of them; at most one whole tensor is held at a time."""
    with torch.device("meta"):
        whole = Decoder(model.whole_config).state_dict()
    places = _without_tied_head(model, whole)
    shard, parts = model.shard, dict[str, Tensor]()
    for name, tensor in tensors:
        if name not in whole:
            raise ValueError(f"the new weights have a tensor that this model lacks: '{name}'")
        if name not in places:
            continue
        shape, dim = tuple(places[name].shape), served_dim(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"the new weights' '{name}' has shape {tuple(tensor.shape)}; the model asks for {shape}")
        part = tensor if dim is None else tensor.chunk(shard.size, dim=dim)[shard.rank]
        to = torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype
        parts[name] = part.detach().to("cpu", to, copy=True)
        if not bool(parts[name].isfinite().all()):
            raise ValueError(f"the new weights' '{name}' has values that are not finite")
    if names := places.keys() - parts.keys():
        raise ValueError(f"the new weights lack a tensor of this model: '{min(names)}'")
    return parts


@torch.no_grad()
def overwrite(model: Decoder, weights: StagedWeights) -> None:
    """Copies staged weights over the model's weights, in place. Weights that are FP8 or int8 only in the model are
    rounded anew, with new scales."""
    places = {name: tensor for name, tensor in model.state_dict().items() if name in weights.tensors}
    for name, place in places.items():
        _copy(place, weights.tensors[name])
    num_rounded = 0
    joined: dict[Int8Joint, list[tuple[int, str]]] = {}  # the weights of each joint product, with their first rows
    for prefix, module in model.named_modules():
        if isinstance(module, Fp8Module):
            for buffer, values in module.named_buffers(recurse=False):
                weight = buffer.removesuffix("_values")
                if weight != buffer and f"{prefix}.{weight}" in weights.tensors:
                    full_weight = weights.tensors[f"{prefix}.{weight}"].to(values.device)
                    fp8_weight = quantize(full_weight, block=module.block)
                    _copy(values, fp8_weight.values)
                    module.get_buffer(f"{weight}_scale").copy_(fp8_weight.scale)
                    num_rounded += 1
        if isinstance(module, Int8Part):
            joined.setdefault(module.joint, []).append((module.columns.start, f"{prefix}.weight"))
        elif isinstance(module, Int8Module) and not isinstance(module, Int8Joint):
            for weight in [name.removesuffix("_scale") for name in module.state_dict() if name.endswith("_scale")]:
                source = f"{prefix}.{weight}"
                is_tied = model.config.tie_word_embeddings and source == "lm_head.weight"
                module.round_weight(weight, weights.tensors["model.embed_tokens.weight" if is_tied else source])
                num_rounded += not is_tied
    for joint, sources in joined.items():
        joint.round_weight("weight", torch.cat([weights.tensors[source] for _, source in sorted(sources)]))
        num_rounded += len(sources)
    assert len(places) + num_rounded == len(weights.tensors), "a staged weight has no place in the model"


def _copy(place: Tensor, source: Tensor) -> None:
    """Copies a tensor in place, FP8 as bytes."""
    if place.dtype == FP8:
        place, source = place.view(torch.uint8), source.view(torch.uint8)
    place.copy_(source)
