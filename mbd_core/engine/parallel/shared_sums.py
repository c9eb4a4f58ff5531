"""Sums over the GPUs of one machine in one shot: each rank writes its part into memory that the other ranks read.

The partial sums of a decode step are small, and NCCL's all-reduce of them is mostly waiting. Here a rank writes its
part into memory that all ranks map (torch's symmetric memory). All ranks meet at a barrier on the device, and the
kernel that needs the sum reads every part (`residual_norm.py`). All ranks read in rank order, so all get the same
bits. There are two places, one for each sum of a layer. Before a rank writes to a place again, all ranks have met at
the other place's barrier, and so have read the first place.

Parts above `most_bytes` go over NCCL, mostly parts of long prompts; so do the embeddings and joined logits. This has
not been run on GPUs.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.engine.memory.huge_pages import in_huge_pages
from mbd_core.engine.parallel.group import Group
from mbd_core.errors import first_line
from mbd_core.models.decoder import Decoder
from mbd_core.models.kernel_layer import Sum
from mbd_core.models.model_config import Fp8Parts
from mbd_core.ops.layer.residual_norm import RankParts

MEETING_SECONDS = 20.0  # for the other ranks to map a rank's memory, which takes milliseconds
_num_mapped = 0  # places that this process has mapped with other ranks, in any group


def most_bytes(num_ranks: int) -> int:
    """The largest part, in bytes, that is summed in one shot.

    Every rank reads the parts of all other ranks. With 2 ranks no other method moves less. With more ranks other
    methods do, so the limit is 512 KB.
    """
    return 2**23 if num_ranks == 2 else 2**19


class SharedSums:
    """The `SharedReduce` of a group whose ranks can map each other's memory; all ranks make it together."""

    def __init__(self, group: Group, places: Sequence[Tensor], handles: Sequence[Any]) -> None:
        """`places` are the two pieces of memory of this rank; `handles` are torch's handles that map them
        everywhere."""
        self._group, self._places, self._handles = group, places, handles
        self._timeout = int(1000 * group.rank.timeout)
        self._parts = []
        for place, handle in zip(places, handles, strict=True):
            parts = [handle.get_buffer(rank, place.shape, place.dtype).data_ptr() for rank in range(group.rank.size)]
            assert parts[group.rank.rank] == place.data_ptr(), "a handle is of its place"
            self._parts.append(RankParts(torch.tensor(parts, device=place.device)))

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.reduce(x)

    def description(self) -> dict[str, Any]:
        return {"name": "shared memory", "most_bytes": self._places[0].nbytes, "not_chosen": {}}

    def place(self, number: Sum, like: Tensor) -> Tensor | None:
        place = self._places[number]
        return None if like.nbytes > place.nbytes else place[: like.nbytes].view(like.dtype).view(like.shape)

    def share(self, number: Sum) -> RankParts:
        """If a rank misses the barrier for the group's timeout, the barrier's kernel fails: the next call to the
        device raises `RuntimeError`, and the device is lost to this process."""
        self._handles[number].barrier(channel=0, timeout_ms=self._timeout)
        return self._parts[number]


class GroupSums:
    """The `Reduce` of a group: its all-reduce, and why it is not `SharedSums`."""

    def __init__(self, group: Group, reason: str) -> None:
        self._group, self._reason = group, reason

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.reduce(x)

    def description(self) -> dict[str, Any]:
        name = "nccl" if self._group.rank.kind == "cuda" else "gloo"
        return {"name": name, "not_chosen": {"shared memory": self._reason}}


def sums_of(group: Group) -> SharedSums | GroupSums:
    """How the ranks of `group` sum; all ranks call it together."""
    try:
        return share_sums(group)
    except ValueError as error:
        return GroupSums(group, str(error))


def share_sums(group: Group) -> SharedSums:
    """Gives all ranks of `group` memory that the other ranks map.

    Raises `ValueError` on all ranks with the reason:
    - there are no GPUs
    - NVLink does not join the GPUs: the barrier needs atomic operations on another GPU's memory, which PCIe may lack
    - the environment chose another kind of symmetric memory
    - this process was in such a group before: torch counts the mappings of each process, and ranks with different
      counts wait for each other in vain
    """
    if group.rank.kind != "cuda":
        raise ValueError("needs CUDA devices")
    # parts are read by address; torch would also set up multicast, in which a failed rank leaves the other ranks
    # waiting
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    device, size, ranks = torch.device(group.rank.device), group.rank.size, dist.group.WORLD
    assert ranks is not None, "the group's processes have joined"
    num_common = group.least(_num_mapped)

    def allocate() -> list[Tensor]:
        if _num_mapped != num_common:
            raise ValueError("torch shares memory only in a process's first group, and this is a later group")
        try:
            _check_nvlink(size)
            if (backend := symmetric.get_backend(device)) != "CUDA":
                raise ValueError(f"torch's symmetric memory is {backend}'s; unset TORCH_SYMMMEM")
            return [symmetric.empty(most_bytes(size), dtype=torch.uint8, device=device) for _ in range(2)]
        except (RuntimeError, ImportError) as error:
            raise ValueError(first_line(error)) from error

    places = group.agree(allocate)  # before any rank waits for the other ranks' memory

    def map_places() -> SharedSums:
        try:
            with _waits(ranks, min(MEETING_SECONDS, group.rank.timeout / 4)):
                return SharedSums(group, places, [_map(place, ranks) for place in places])
        except RuntimeError as error:
            raise ValueError(first_line(error)) from error

    return group.agree(map_places)


def _map(place: Tensor, ranks: dist.ProcessGroup) -> Any:
    """torch's handle of a place of all ranks."""
    global _num_mapped
    from torch.distributed import _symmetric_memory as symmetric

    _num_mapped += 1
    return symmetric.rendezvous(place, ranks)


@contextmanager
def _waits(ranks: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """Shortens the store's timeout to `seconds`, so that a failed peer is reported before the other ranks give up."""
    store = dist.distributed_c10d._get_process_group_store(ranks)
    old_timeout = store.timeout  # type: ignore[attr-defined]  # no stub
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(old_timeout)


def load_shard(
    folder: Path, group: Group, *, dtype: torch.dtype | None = None, fp8: Fp8Parts | None = None
) -> Decoder:
    """This rank's part of the model in `folder`, on its device; its partial sums go over the group."""
    rank = group.rank
    model = load_model(folder, dtype=dtype, device=rank.device, shard=rank.shard, reduce=sums_of(group), fp8=fp8)
    return in_huge_pages(model)


def _check_nvlink(size: int) -> None:
    """Raises `ValueError` unless NVLink joins each two of the first `size` GPUs. No public call of torch tells it, so
    torch's private call may raise `ImportError`."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]  # no stub

    links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    for gpu in range(size):
        for other_gpu in range(size):
            if gpu != other_gpu and not links[gpu][other_gpu]:
                raise ValueError(f"GPUs {gpu} and {other_gpu} are not joined by NVLink")
