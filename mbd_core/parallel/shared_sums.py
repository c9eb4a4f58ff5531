"""Sums over the GPUs of one machine in one shot: each rank writes its part where the others read it.

The partial sums of a decode step are small, and NCCL's all-reduce of them is mostly waiting. Here a rank writes its
part into memory that all of them map (torch's symmetric memory), all meet at a barrier on the device, and the kernel
that needs the sum reads every part (`ops/residual_norm.py`). All read them in the order of the ranks, so all get the
same bits. There are two places, one for each sum of a layer. When a rank writes to one again, all have met at the
other's barrier in between, and have read the first.

Larger parts, of prompts, go over NCCL. This has not been run on GPUs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.models.decoder import Decoder
from mbd_core.models.kernel_layer import Sum
from mbd_core.models.quantize import Parts
from mbd_core.ops.residual_norm import RankParts
from mbd_core.parallel.group import Group

LIMIT = 2**19
"""Bytes of a part: one shot moves (ranks - 1) times as much to each rank, which pays for small parts alone."""


class SharedSums:
    """The `SharedReduce` of a group whose ranks can map each other's memory; made by all of them together."""

    def __init__(self, group: Group, places: Sequence[Tensor], handles: Sequence[Any]) -> None:
        """`places` are the two pieces of memory of this rank, `handles` torch's, by which all ranks map them."""
        self._group, self._places, self._handles = group, places, handles
        size, device = group.rank.size, places[0].device
        self._timeout = int(1000 * group.rank.timeout)
        self._parts = []
        for handle in handles:
            others = [handle.get_buffer(rank, (LIMIT,), torch.uint8) for rank in range(size)]
            self._parts.append(RankParts(torch.tensor([t.data_ptr() for t in others], device=device)))

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.reduce(x)

    def described(self) -> dict[str, Any]:
        return {"name": "shared memory", "not_chosen": {}}

    def place(self, number: Sum, like: Tensor) -> Tensor | None:
        if like.nbytes > LIMIT:
            return None
        return self._places[number][: like.nbytes].view(like.dtype).view(like.shape)

    def share(self, number: Sum) -> RankParts:
        """A rank that does not come to the barrier within the group's timeout ends this process, as NCCL would."""
        self._handles[number].barrier(channel=0, timeout_ms=self._timeout)
        return self._parts[number]


class GroupSums:
    """The `Reduce` of a group: its all-reduce, and why it is not `SharedSums`."""

    def __init__(self, group: Group, reason: str) -> None:
        self._group, self._reason = group, reason

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.reduce(x)

    def described(self) -> dict[str, Any]:
        name = "nccl" if self._group.rank.kind == "cuda" else "gloo"
        return {"name": name, "not_chosen": {"shared memory": self._reason}}


def sums_of(group: Group) -> SharedSums | GroupSums:
    """How the ranks of `group` add up; all of them call it together."""
    try:
        return share_sums(group)
    except ValueError as error:
        return GroupSums(group, str(error))


def share_sums(group: Group) -> SharedSums:
    """Give all ranks of `group` memory that the others map.

    Raises `ValueError` on all ranks, saying why it cannot be: no GPUs, or GPUs that do not reach each other.
    """
    if group.rank.kind != "cuda":
        raise ValueError("needs CUDA devices")
    from torch.distributed import _symmetric_memory as symmetric

    device, ranks = torch.device(group.rank.device), dist.distributed_c10d._get_default_group()

    def allocated() -> list[Tensor]:
        try:
            return [symmetric.empty(LIMIT, dtype=torch.uint8, device=device) for _ in range(2)]
        except RuntimeError as error:
            raise ValueError(_first_line(error)) from error

    places = group.agree(allocated)  # before any rank waits for the others' memory

    def mapped() -> SharedSums:
        try:
            return SharedSums(group, places, [symmetric.rendezvous(place, ranks) for place in places])
        except RuntimeError as error:
            raise ValueError(_first_line(error)) from error

    return group.agree(mapped)


def load_shard(folder: Path, group: Group, *, dtype: torch.dtype | None = None, fp8: Parts | None = None) -> Decoder:
    """This rank's part of the model in `folder`, on its device, its partial sums going over the group."""
    rank = group.rank
    return load_model(folder, dtype=dtype, device=rank.device, shard=rank.shard, reduce=sums_of(group), fp8=fp8)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
