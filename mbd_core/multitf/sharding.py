"""Weights, gradients and optimizer states cut among the workers: FSDP2 (`fully_shard`), layer by layer.

Each worker keeps its part of every tensor, in float32. A layer's whole weights exist while it computes, gathered in
the precision of the run, and its gradients are summed in float32 into the parts. What is not a layer (embeddings, last
norm, head) is gathered once a step, because the loss uses the head in pieces.

The numbers are those of replicated weights, up to the order of sums; in bfloat16 the residual stream is bfloat16 too.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.tensor_parallel import parallelize
from mbd_core.multitf.train_config import ExpertsCut


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
    """Cut the model among the workers of the default process group; `objective` is what is called in a step.

    With `tensor_parallel` each so many workers, one after another, share every layer, and what each of them has of it
    is cut among such groups. A model on a CPU moves to `device` layer by layer; one on the meta device gets memory for
    its parts, no values.
    """
    if tensor_parallel > 1:
        groups = (world_size // tensor_parallel, tensor_parallel)
        both = init_device_mesh(device.type, groups, mesh_dim_names=("data", "tensor"))
        both._flatten("workers")  # the gradients' norm is summed over all in one exchange, so alike on each
        parallelize(model, both["tensor"], cut_experts)
        mesh = both["data"]
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
    """What this worker holds of a tensor: its part, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be cut; every worker must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, the same on every worker, cut as `other` is; nothing is sent."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
