"""`torch.compile` of a model in training: one compiled layer, which all layers of a kind share.

A layer is one graph. Of a layer with experts the projections and the shared expert are, each: which experts compute is
known to no trace. The last layer, whose MLP has the predicted tokens alone, is one graph more. Lengths differ from
batch to batch, so sizes are symbols from the first compilation on, and a new length compiles nothing. What remains is
bounded: one sample at once or several, a forward with gradients or without (roll-outs, teachers), a layer with an
adapter switched off.

`fullgraph` makes an error of what cannot be traced. Without it a layer would fall apart into graphs that differ from
one call to the next, and activation checkpointing must meet the same ones twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mbd_core.models.decoder import Attend, Attention, Decoder, DecoderLayer, Rope
from mbd_core.models.mlp import SwiGLU
from mbd_core.models.moe import MoE
from mbd_core.ops.attention_dense import DenseAttention
from mbd_core.ops.attention_flex import in_many_variants

BACKEND = "inductor"


def compile_layers(model: Decoder) -> None:
    """Compile every layer's forward; hooks, FSDP2's too, and activation checkpointing stay outside of it."""
    whole, project, shared = (_compiled(f) for f in (DecoderLayer.forward, Attention.project, SwiGLU.forward))
    for layer in model.model.layers:
        if not isinstance(layer.mlp, MoE):
            layer.forward = partial(_call, whole, layer)
            continue
        attention: Any = layer.self_attn
        attention.project = partial(project, attention)
        if layer.mlp.shared_experts is not None:
            layer.mlp.shared_experts.forward = partial(shared, layer.mlp.shared_experts)  # type: ignore[method-assign]


def _compiled(function: Callable[..., Any]) -> Any:
    return in_many_variants(torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True))


def _call(forward: Any, layer: Any, rows: list[Tensor], ropes: list[Rope], attend: Attend, *others: Any) -> Any:
    """A layer's compiled forward, once what a dense mask keeps for all layers is there: a trace that makes it would be
    another one than those that find it."""
    if isinstance(attend, DenseAttention):
        attend.added(rows[0].device.type, layer.self_attn.q_proj.weight.dtype)
    return forward(layer, rows, ropes, attend, *others)
