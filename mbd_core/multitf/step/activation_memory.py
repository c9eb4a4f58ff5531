"""The bytes that a step keeps for its backward pass, counted on tensors without memory (the meta device).

One layer of each kind runs on a training sequence of the given length, and the tensors that autograd saves are added
up. So the count follows the layer's code. The last layer is counted like the others, although its MLP runs on the
predicted tokens alone: their number depends on the noise. Two parts have counts of their own. Attention is counted as
a fused kernel's: queries, keys, values, output, and a float32 number for each query and head. Experts are counted as
grouped products (`ops.experts`): a token's assignment to an expert keeps its input, four inner tensors, and its output
in float32.

Shape legend: T tokens, A assignments, D hidden, F expert width.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mbd_core.models.decoder import DecoderLayer
from mbd_core.models.mlp import MoE, SwiGLU
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.rope import rotary
from mbd_core.multitf.config import ExpertsCut


@dataclass(frozen=True)
class KeptBytes:
    """Bytes for one sequence: of all layers together, of their inputs, and of the largest layer."""

    layers: int
    inputs: int
    layer: int


def kept_bytes(
    config: ModelConfig,
    *,
    tokens: int,
    dtype: torch.dtype,
    tensor_parallel: int = 1,
    cut_experts: ExpertsCut = "expert",
) -> KeptBytes:
    """The bytes that `tokens` tokens in one sequence keep in the layers of this model, computed in `dtype`.

    With `tensor_parallel` the result is one worker's bytes; experts that are cut by expert count as equal shares.
    """
    kinds = {
        sparse: _layer_bytes(config, sparse, tokens, dtype, tensor_parallel, cut_experts)
        for sparse in set(_kinds(config))
    }
    layer_bytes = [kinds[sparse] for sparse in _kinds(config)]
    inputs = config.num_layers * tokens * config.hidden_size * dtype.itemsize
    return KeptBytes(layers=sum(layer_bytes), inputs=inputs, layer=max(layer_bytes))


def _kinds(config: ModelConfig) -> list[bool]:
    return [config.is_sparse(layer) for layer in range(config.num_layers)]


def _layer_bytes(
    config: ModelConfig, sparse: bool, tokens: int, dtype: torch.dtype, parallel: int, cut: ExpertsCut
) -> int:
    number = _kinds(config).index(sparse)
    storages: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # the tensor stays alive, so that no address is used twice
        storages[storage._cdata] = (tensor, storage.nbytes())
        return tensor

    with torch.device("meta"):
        layer = _own_layer(config, number, parallel, cut).to(dtype)
        if isinstance(layer.mlp, MoE):
            width = layer.mlp.experts.gate_proj.shape[1]
            share = parallel if cut == "expert" else 1
            setattr(layer.mlp.experts, "forward", partial(_counted_experts, width, share))  # noqa: B010
        x = torch.empty(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
        rope = rotary(torch.arange(tokens)[None], config)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer([x], rope, _fused_attention, number, None, None)
        others = (*layer.parameters(), *layer.buffers(), *(part for part in rope if part is not None))
        other_addresses = {t.untyped_storage()._cdata for t in others}
        return sum(size for address, (_, size) in storages.items() if address not in other_addresses)


def _own_layer(config: ModelConfig, number: int, parallel: int, cut: ExpertsCut) -> DecoderLayer:
    """The part of a layer that one of `parallel` workers has; with `cut` expert, all experts: `share` divides them."""
    moe = config.moe
    worker_config = replace(
        config,
        num_heads=config.num_heads // parallel,
        num_kv_heads=config.num_kv_heads // parallel,
        intermediate_size=config.intermediate_size // parallel,
    )
    if moe is not None and cut == "width":
        worker_config = replace(worker_config, moe=replace(moe, intermediate_size=moe.intermediate_size // parallel))
    layer = DecoderLayer(worker_config, number)
    if isinstance(layer.mlp, MoE) and layer.mlp.shared_experts is not None:
        assert moe is not None
        layer.mlp.shared_experts = SwiGLU(config.hidden_size, moe.shared_size // parallel)
    return layer


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("this attention only counts")


def _fused_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = _FusedAttention.apply(q, k, v)
    return out


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, width: int, share: int) -> Tensor:
        x_AD = x_TD.new_empty(-(-weights_TK.numel() // share), x_TD.shape[1])
        inner = [x_AD.new_empty(len(x_AD), width) for _ in range(4)]
        ctx.save_for_backward(x_AD, *inner, x_AD.float().clone(), weights_TK)
        return torch.empty_like(x_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("these experts only count")


def _counted_experts(width: int, share: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out: Tensor = _GroupedExperts.apply(x_TD, weights_TK, width, share)
    return out
