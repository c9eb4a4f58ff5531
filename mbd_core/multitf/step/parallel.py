"""Tensor and expert parallelism in training: workers that share their samples, each with its part of every layer.

    attention   heads: q, k and v by rows, o by columns
    MLP         width: gate and up by rows, down by columns; the same for shared experts
    experts     whole experts, some on each worker (`expert`), or a part of each expert's width (`width`)
    the rest    whole on each worker: embeddings, norms, router, head

All tensors are DTensors, whole ones too, so that FSDP2 (`sharding.py`) shards every tensor once more over the groups
of these workers, and checkpoints know each part's place. The residual stream is whole on each worker: the workers'
outputs are summed after the attention and after the MLP, and in the backward pass the gradients of their inputs.

Shape legend: T tokens, K experts a token, D hidden, E experts on this worker, F expert width on this worker.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from mbd_core.models.decoder import Decoder, DecoderLayer
from mbd_core.models.mlp import Experts, MoE, Router, compute_experts
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shard import split_dim
from mbd_core.multitf.config import ExpertsCut


def check_divides(config: ModelConfig, size: int, experts: ExpertsCut) -> None:
    """Raise `ValueError` naming the size that does not divide among `size` workers."""
    moe = config.moe
    sizes = {"num_key_value_heads": config.num_kv_heads, "intermediate_size": config.intermediate_size}
    if moe is not None:
        sizes |= {"shared experts' width": moe.shared_size}
        sizes |= (
            {"num_experts": moe.num_experts}
            if experts == "expert"
            else {"moe_intermediate_size": moe.intermediate_size}
        )
    for name, value in sizes.items():
        if value % size:
            raise ValueError(f"{name}={value} of the model does not divide among --tensor-parallel {size} workers")


def cut_dim(name: str, experts: ExpertsCut) -> int | None:
    """The dimension along which the decoder's tensor `name` is sharded, `None` if every worker of a group holds it
    whole."""
    is_stacked = name.endswith(("experts.gate_proj", "experts.up_proj", "experts.down_proj"))
    return 0 if is_stacked and experts == "expert" else split_dim(name)


def parallelize(model: Decoder, mesh: DeviceMesh, experts: ExpertsCut) -> None:
    """Shards the model's layers over the workers of `mesh`, which has one dimension. Every worker calls it.

    A model with values must have the same values on each worker. Raises `ValueError` as `check_divides` does.
    """
    check_divides(model.config, mesh.size(), experts)
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        parallelize_module(layer, mesh, _layer_plan(layer, experts), src_data_rank=None)
    styles: dict[str, ParallelStyle] = {"model.embed_tokens": _WholeStyle(), "model.norm": _WholeStyle()}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    parallelize_module(model.lm_head, mesh, _WholeStyle(), src_data_rank=None)


def _layer_plan(layer: DecoderLayer, experts: ExpertsCut) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"input_layernorm": _WholeStyle(), "post_attention_layernorm": _WholeStyle()}
    plan |= {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {"self_attn.o_proj": RowwiseParallel()}
    if layer.self_attn.q_norm is not None:
        plan |= {"self_attn.q_norm": _WholeStyle(Shard(-2)), "self_attn.k_norm": _WholeStyle(Shard(-2))}
    dense = "mlp"
    if isinstance(layer.mlp, MoE):
        plan |= {"mlp.gate": _RouterStyle(), "mlp.experts": _ExpertsStyle(experts)}
        dense = "mlp.shared_experts"
        if layer.mlp.shared_experts is None:
            return plan
    plan |= {f"{dense}.gate_proj": ColwiseParallel(), f"{dense}.up_proj": ColwiseParallel()}
    return plan | {f"{dense}.down_proj": RowwiseParallel()}


class _WholeStyle(ParallelStyle):
    """A module with whole weights on each worker. Its input is the same on all workers, or sharded by `layout`."""

    def __init__(self, layout: Placement | None = None) -> None:
        self.layout = layout or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, (self.layout,), run_check=False), *inputs[1:])

        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        _replicate(module, device_mesh)
        return distribute_module(module, device_mesh, input_fn=enter, output_fn=leave)


class _RouterStyle(ParallelStyle):
    """A router with whole weights: its scores, and so the choice of experts, are the same on each worker."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        _replicate(module, device_mesh)
        setattr(module, "logits", partial(_scores, module.logits, device_mesh))  # noqa: B010
        return module


def _scores(logits: Callable[[Tensor], Tensor], mesh: DeviceMesh, x_TD: Tensor) -> Tensor:
    scores = logits(DTensor.from_local(x_TD, mesh, (Replicate(),), run_check=False))
    assert isinstance(scores, DTensor)
    return scores.to_local()


class _ExpertsStyle(ParallelStyle):
    """Some of the experts, or a part of each expert's width, computed on local tensors."""

    def __init__(self, cut: ExpertsCut) -> None:
        self.cut = cut

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = cut_dim(f"experts.{name}", self.cut)
            assert dim is not None
            _distribute(module, name, parameter, device_mesh, Shard(dim))
        forward = _some_experts if self.cut == "expert" else _part_of_experts
        setattr(module, "forward", partial(forward, module, device_mesh))  # noqa: B010
        return module


def _part_of_experts(experts: Experts, mesh: DeviceMesh, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted experts, each with this worker's part of the width, summed over the workers."""
    x_TD, weights_TK = _replicated_input(x_TD, mesh), _replicated_input(weights_TK, mesh)
    return _added_up(compute_experts(x_TD, *_local(experts), ids_TK, weights_TK), mesh)


def _some_experts(experts: Experts, mesh: DeviceMesh, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted experts, of which this worker computes its own, summed over the workers.

    Every worker has all tokens, so no token is sent. If no token chose a worker's experts, its first expert gets a
    token with weight zero. Its weights then have gradients, zeros, as on every other worker.
    """
    x_TD, weights_TK = _replicated_input(x_TD, mesh), _replicated_input(weights_TK, mesh)
    gate_EFD, up_EFD, down_EDF = _local(experts)
    ids_TK = ids_TK - mesh.get_local_rank() * len(gate_EFD)
    tokens_A, columns_A = ((ids_TK >= 0) & (ids_TK < len(gate_EFD))).nonzero(as_tuple=True)
    if len(tokens_A):
        ids_A1, weights_A1 = ids_TK[tokens_A, columns_A, None], weights_TK[tokens_A, columns_A, None]
    else:
        tokens_A = tokens_A.new_zeros(1)
        ids_A1, weights_A1 = ids_TK.new_zeros(1, 1), 0.0 * weights_TK[:1, :1]
    out_AD = compute_experts(x_TD[tokens_A], gate_EFD, up_EFD, down_EDF, ids_A1, weights_A1)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    return _added_up(out_TD.index_add(0, tokens_A, out_AD.float()).to(x_TD.dtype), mesh)


def _local(experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    parameters = (experts.gate_proj, experts.up_proj, experts.down_proj)
    gate, up, down = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return gate, up, down


def _replicated_input(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor on each worker, which uses it for its part. The gradients are added up."""
    return DTensor.from_local(x, mesh, (Replicate(),), run_check=False).to_local(grad_placements=(Partial(),))


def _added_up(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the workers, on each of them."""
    return (
        DTensor.from_local(x, mesh, (Partial(),), run_check=False).redistribute(placements=(Replicate(),)).to_local()
    )


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            _distribute(module, name, parameter, mesh, Replicate())


def _distribute(module: nn.Module, name: str, parameter: nn.Parameter, mesh: DeviceMesh, layout: Placement) -> None:
    """Makes a module's parameter this worker's part, cut from the values that are here."""
    part = distribute_tensor(parameter.detach(), mesh, (layout,), src_data_rank=None)
    module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
