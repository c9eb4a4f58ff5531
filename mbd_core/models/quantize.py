"""Rounded weights in a model: FP8 in its experts only or in all matrix products of its layers, int8 in all products.

"experts" and "all" round with a scale per output channel. "blocks" are the experts with a scale per block of 128 x 128
weights, as releases store them; `checkpoint.loading` keeps the values and scales of such files instead of rounding.

Embeddings, norms and lm_head are few bytes, so they are not rounded to FP8. The router chooses experts, so it is not
rounded either. Int8 saves arithmetic (`ops/layer/int8.py`), so lm_head is rounded too; a tied embedding stays wide.
A batch-invariant forward stays batch-invariant. A tensor-parallel rank rounds its own part with its own scales, so its
rounding is never coarser than the whole model's.
"""

from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder
from mbd_core.models.gemma import GeGLU, GemmaExperts
from mbd_core.models.lora import PRODUCTS
from mbd_core.models.mlp import Experts
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.fp8 import Fp8Experts, Fp8Linear, fp8_obstacle
from mbd_core.ops.layer.int8 import Int8Experts, Int8Linear, Int8Module, Int8Part


def quantize_weights(model: Decoder, parts: Fp8Parts, layer: int | None = None) -> Decoder:
    """Rounds `model`'s experts ("experts", "blocks") or all matrices of its layers to FP8 in place, and returns the
    model. `layer` rounds this layer alone.

    Wide tensors are freed one by one, so the peak memory is the model and about one tensor. All checks run before the
    first change. Raises `ValueError` for unknown parts, a model without experts (but for "all") or with FP8 weights
    already, weights that are not finite, and a device or sizes that no FP8 product takes.
    """
    old_parts = quantized_parts(model) if layer is None else None
    if old_parts is not None:
        raise ValueError(
            f"the model's weights are FP8 already (parts={old_parts!r}); load it again to round other weights"
        )
    names = [name for name in fp8_names(model, parts) if layer is None or name.startswith(f"model.layers.{layer}.")]
    for name in names:
        _check(name, model.get_submodule(name))
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _round(model.get_submodule(name), parts))
    return model


def fp8_names(model: Decoder, parts: Fp8Parts) -> list[str]:
    """The names of the modules that `quantize_weights` replaces. Raises its errors about `parts`."""
    if parts not in get_args(Fp8Parts):
        raise ValueError(f"parts={parts!r} is unknown; choose one of {', '.join(get_args(Fp8Parts))}")
    names = _module_names(model, parts)
    if not names:
        raise ValueError(
            f"parts={parts!r} rounds experts and this {model.config.architecture} has none; use parts='all'"
        )
    return names


def quantized_parts(model: nn.Module) -> Fp8Parts | None:
    """The FP8 part of a model's weights; `None` without FP8 weights."""
    kinds = {type(module) for module in model.modules()}
    if Fp8Linear in kinds:
        return "all"
    stacks = [module for module in model.modules() if isinstance(module, Fp8Experts)]
    if not stacks:
        return None
    return "experts" if stacks[0].block is None else "blocks"


def round_to_int8(model: Decoder, layer: int | None = None) -> Decoder:
    """Rounds every matrix product of `model`, but the routers', to int8 in place, and returns the model. `layer`
    rounds this layer alone.

    Raises `ValueError` for a model on a GPU, whose narrow weights are FP8.
    """
    device = model.model.norm.weight.device.type
    if device not in ("cpu", "meta"):
        raise ValueError(f"dtype=int8 cannot be honoured on {device}: int8 products are for CPUs; use fp8 on a GPU")
    root = model if layer is None else model.model.layers[layer]
    for parent in [module for module in root.modules() if not isinstance(module, nn.Linear)]:
        _join(parent)
    for name in [name for name, module in root.named_modules() if isinstance(module, Experts | nn.Linear)]:
        parent_name, _, child = name.rpartition(".")
        setattr(root.get_submodule(parent_name), child, _int8_module(root.get_submodule(name)))
    return model


@torch.no_grad()
def _join(parent: nn.Module) -> None:
    """Rounds the linear layers of `parent` that read one input to parts of one int8 product."""
    for names in PRODUCTS.values():
        layers = {name: layer for name in names if isinstance(layer := getattr(parent, name, None), nn.Linear)}
        if len(layers) > 1:
            for name, part in zip(layers, Int8Part.of(list(layers.values())), strict=True):
                setattr(parent, name, part)


def is_int8(model: nn.Module) -> bool:
    """Whether the model's products are int8."""
    return any(isinstance(module, Int8Module) for module in model.modules())


@torch.no_grad()
def _int8_module(module: nn.Module) -> Int8Module:
    if isinstance(module, nn.Linear):
        return Int8Linear(module)
    return Int8Experts(module, GeGLU.act if isinstance(module, GemmaExperts) else F.silu)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once, and of packed weights."""
    packed = sum(module.packed_bytes for module in model.modules() if isinstance(module, Int8Module))
    return packed + sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def rounded_bytes(model: Decoder, parts: Fp8Parts) -> int:
    """`weight_bytes` of a model after rounding. Its tensors may lie on the meta device."""
    block = fp8.RELEASED if parts == "blocks" else None
    wide = {id(p): p for name in _module_names(model, parts) for p in model.get_submodule(name).parameters()}
    weights = [fp8.empty_weight(p.shape, block, "meta") for p in wide.values() if p.ndim > 1]
    wide_bytes = sum(p.nbytes for p in wide.values() if p.ndim > 1)
    return weight_bytes(model) - wide_bytes + sum(weight.num_bytes for weight in weights)


def _module_names(model: Decoder, parts: Fp8Parts) -> list[str]:
    """The names of the modules to replace. Raises `ValueError` for a model that has no FP8 form."""
    check_fp8(model.config, parts)
    kinds = (Experts, nn.Linear) if parts == "all" else Experts
    return [f"model.layers.{name}" for name, m in model.model.layers.named_modules() if isinstance(m, kinds)]


def takes_fp8(config: ModelConfig) -> bool:
    """Whether FP8 products compute the model's layers. They gate by SiLU; Gemma gates by GELU."""
    return config.gemma is None


def check_fp8(config: ModelConfig, parts: Fp8Parts) -> None:
    """Raise `ValueError` for a model that has no FP8 form."""
    if not takes_fp8(config):
        raise ValueError(
            f"fp8={parts} cannot be honoured: FP8 products gate by SiLU, and {config.architecture} gates by GELU"
        )


@torch.no_grad()
def _check(name: str, module: nn.Module) -> None:
    for part, weight in module.named_parameters():
        obstacle = fp8_obstacle(weight) if weight.ndim > 1 else None
        if obstacle is not None:
            raise ValueError(f"{name}.{part} of shape {tuple(weight.shape)} cannot be FP8: {obstacle}")
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name}.{part} has values that are not finite; FP8 cannot hold them")


@torch.no_grad()
def _round(module: nn.Module, parts: Fp8Parts) -> nn.Module:
    if isinstance(module, nn.Linear):
        return Fp8Linear(module)

    def take(name: str) -> Tensor:
        weight = module.get_parameter(name).detach()
        delattr(module, name)
        return weight

    # no wide stack is kept beyond its rounding
    return Fp8Experts(lambda name: fp8.quantize(take(name), block=fp8.RELEASED if parts == "blocks" else None))
