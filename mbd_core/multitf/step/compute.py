"""A step's precision and its compiled layers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mbd_core.models.decoder import Attention, Decoder, DecoderLayer
from mbd_core.models.layer_parts import Attend
from mbd_core.models.mlp import MoE, SwiGLU
from mbd_core.models.rope import Rope
from mbd_core.multitf.config import Precision
from mbd_core.ops.attention.whole import DenseAttention, in_many_variants, score_dtype
from mbd_core.ops.machine import computes_bfloat16


def compute_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """The setting `precision` on `device`: `auto` becomes bfloat16 if the device computes it, else float32."""
    if precision == "auto":
        return "bfloat16" if computes_bfloat16(device) else "float32"
    return precision


# `torch.compile` of a model in training: one compiled layer, which all layers of a kind share.
#
# A layer is one graph. In a layer with experts the projections and the shared expert are one graph each, because no
# trace knows the choice of experts. The last layer, whose MLP computes only the predicted tokens, is another graph.
# Lengths differ from batch to batch, so sizes are symbols from the first compilation on, and a new length compiles
# nothing. The remaining variants are few: one sample at once or several, a forward with gradients or without
# (roll-outs, teachers), a layer with an adapter switched off.
#
# `fullgraph` makes an error of code that cannot be traced. Without it a layer would fall apart into graphs that differ
# from one call to the next, and activation checkpointing must meet the same graphs twice.

BACKEND = "inductor"


def compile_layers(model: Decoder) -> None:
    """Compiles every layer's forward. Hooks, FSDP2's too, and activation checkpointing stay outside."""
    compiled_layer, compiled_projection, compiled_mlp = (
        _compile(f) for f in (DecoderLayer.forward, Attention.project, SwiGLU.forward)
    )
    for layer in model.model.layers:
        if not isinstance(layer.mlp, MoE):
            layer.forward = partial(_call, compiled_layer, layer)
            continue
        attention: Any = layer.self_attn
        attention.project = partial(compiled_projection, attention)
        if layer.mlp.shared_experts is not None:
            layer.mlp.shared_experts.forward = partial(compiled_mlp, layer.mlp.shared_experts)  # type: ignore[method-assign]


def _compile(function: Callable[..., Any]) -> Any:
    return in_many_variants(torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True))


def _call(forward: Any, layer: Any, rows: list[Tensor], ropes: list[Rope], attend: Attend, *others: Any) -> Any:
    """A layer's compiled forward. Builds the dense mask's cache first; building it inside would trace a second
    graph."""
    if isinstance(attend, DenseAttention):
        attend.added(score_dtype(rows[0].device.type, layer.self_attn.q_proj.weight.dtype))
    return forward(layer, rows, ropes, attend, *others)
