"""Weights, gradients and optimizer states sharded over the workers: FSDP2 (`fully_shard`), layer by layer.

Each worker keeps its part of every tensor, in float32. A layer's whole weights exist while it computes, gathered in
the precision of the run, and its gradients are summed in float32 into the parts. Tensors outside the layers
(embeddings, last norm, head) are gathered once a step, because the loss uses the head in pieces.

The numbers equal replicated weights', up to the order of sums. In bfloat16 the residual stream is bfloat16 too.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    distribute_tensor,
)

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import ExpertsCut
from mbd_core.multitf.step.parallel import parallelize


def shard_model(
    objective: nn.Module,
    model: Decoder,
    *,
    device: torch.device,
    world_size: int,
    in_bfloat16: bool,
    tensor_parallel: int = 1,
    cut_experts: ExpertsCut = "expert",
) -> None:
    """Shards the model over the workers of the default process group; `objective` is the module that a step calls.

    `tensor_parallel` successive workers share every layer, and each worker's part is sharded further over the groups
    of such workers. A model on a CPU moves to `device` layer by layer. A model on the meta device gets memory for its
    parts, without values.
    """
    if tensor_parallel > 1:
        groups = (world_size // tensor_parallel, tensor_parallel)
        meshes = init_device_mesh(device.type, groups, mesh_dim_names=("data", "tensor"))
        # the gradients' norm is summed over all workers in one exchange, so it is the same on each
        meshes._flatten("workers")
        parallelize(model, meshes["tensor"], cut_experts)
        mesh = meshes["data"]
    else:
        mesh = init_device_mesh(device.type, (world_size,))
    # Inputs stay as they are: integers, float32 rotations, and a float64 divisor that bfloat16 would round.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if in_bfloat16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    if any(p.is_meta for p in model.parameters()):
        objective.to_empty(device=device)


def own_part(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor, or all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Every worker must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, the same on every worker, sharded like `other`; no data is sent."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
