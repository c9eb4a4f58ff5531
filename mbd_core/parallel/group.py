"""A tensor-parallel group: the processes that hold one model's shards, and the two ways they talk.

The forward's partial sums go over the first group (NCCL between GPUs, gloo between CPUs). Orders from rank 0 go over a
second one, gloo in any case, so that they cost no device work and a dead process is noticed by its closed connection.

The timeout bounds every wait. With gloo, on CPUs and for orders, it raises `RankLost` in the waiting rank; a process
that ended is noticed at once. A collective between GPUs runs behind the host's back: there NCCL's watchdog ends the
waiting process after the timeout, which whoever placed it must notice.

Every rank must hold the same residual stream bit for bit, for it decides alike only on equal numbers. All-reduce gives
that: each element is summed in one order and handed to all (or, between two, in either order, which is the same sum).
"""

import pickle
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.models.decoder import Decoder
from mbd_core.models.shard import Shard

_LENGTH = 8  # bytes that say how long a message is
_ARRIVED = "arrived"  # the store's count of ranks that are ready to join
_FRAME = 512  # bytes sent at once: an ordinary step's orders fit


class RankLost(RuntimeError):
    """Another rank died, hangs or fell out of step; the group is of no use any more, and has to be started anew."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a process needs to take its place: which of how many, where rank 0 is met, on which device it computes.

    timeout  seconds that any rank waits for another; more than loading the model may take one longer than another
    """

    rank: int
    size: int
    address: str
    port: int
    device: str = "cpu"
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be a positive number of seconds")
        if self.kind not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} cannot be used for tensor parallelism; use cpu or cuda:N")

    @property
    def shard(self) -> Shard:
        """The part of the model it holds; `ValueError` for a rank that does not exist."""
        return Shard(rank=self.rank, size=self.size)

    @property
    def kind(self) -> str:
        """The type of its device."""
        return torch.device(self.device).type

    @property
    def wait(self) -> timedelta:
        return timedelta(seconds=self.timeout)


class Group:
    """One process's membership, from `init_group`; `close()` ends it. All ranks must make the same calls."""

    def __init__(self, rank: Rank, orders: dist.ProcessGroup) -> None:
        self.rank = rank
        self._orders = orders

    def reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place: every rank then holds the same bits."""
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise self._lost("sum with the others") from error
        return x

    def tell(self, message: Any) -> None:
        """Rank 0 only: hand `message` (small, picklable) to every other rank's `hear`, and wait until it is taken."""
        payload = pickle.dumps(message)
        data = bytearray(len(payload).to_bytes(_LENGTH, "little") + payload)
        data += bytes(max(0, _FRAME - len(data)))
        frame, rest = torch.frombuffer(data, dtype=torch.uint8).split([_FRAME, len(data) - _FRAME])
        try:
            self._broadcast(frame, rest)
        except RuntimeError as error:
            raise self._lost("reach the others") from error

    def hear(self) -> Any:
        """The next message of rank 0."""
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        try:
            self._broadcast(frame)
            size = int.from_bytes(frame[:_LENGTH].numpy().tobytes(), "little")
            rest = torch.empty(max(0, _LENGTH + size - _FRAME), dtype=torch.uint8)
            self._broadcast(rest)
        except RuntimeError as error:
            raise self._lost("hear rank 0") from error
        return pickle.loads(torch.cat((frame, rest))[_LENGTH : _LENGTH + size].numpy().tobytes())

    def meet(self) -> None:
        """Wait until every rank has come to this call."""
        try:
            dist.barrier(group=self._orders)
        except RuntimeError as error:
            raise self._lost("meet the others") from error

    def _broadcast(self, *parts: Tensor) -> None:
        for part in parts:
            if len(part):
                dist.broadcast(part, src=0, group=self._orders)

    def close(self) -> None:
        """Leave the group; the others' next call fails, so whoever leads tells them to stop first."""
        dist.destroy_process_group()

    def _lost(self, what: str) -> RankLost:
        r = self.rank
        return RankLost(
            f"rank {r.rank} of {r.size} could not {what}: a rank ended, or did not answer within {r.timeout:g} s; "
            "start the group anew"
        )


def open_store(address: str, *, size: int, timeout: float, port: int = 0) -> dist.TCPStore:
    """Where the ranks meet, in rank 0's process; its `port` (0: a free one) goes into every `Rank`."""
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(address, port, size, is_master=True, timeout=wait, wait_for_workers=False)


def num_arrived(store: dist.TCPStore) -> int:
    """How many ranks have a device and are about to join; joining itself waits for all, whatever becomes of them."""
    return store.add(_ARRIVED, 0)


def init_group(rank: Rank, *, store: dist.TCPStore | None = None) -> Group:
    """Join; returns when all ranks have. `store` is rank 0's, if it has opened it already.

    Raises `RankLost` if not all arrive within the timeout, `ValueError` in a process that is in a group already.
    """
    shard = rank.shard
    if dist.is_initialized():
        raise ValueError("this process belongs to a group already; give every rank a process of its own")
    device = torch.device(rank.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if store is None:
            store = dist.TCPStore(
                rank.address, rank.port, rank.size, is_master=rank.rank == 0, timeout=rank.wait, wait_for_workers=False
            )
        store.add(_ARRIVED, 1)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=rank.wait,
            device_id=device if device.type == "cuda" else None,
        )
        return Group(rank, dist.new_group(backend="gloo", timeout=rank.wait))
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RankLost(
            f"rank {rank.rank} on {socket.gethostname()} did not meet all {rank.size} ranks at "
            f"{rank.address}:{rank.port} within {rank.timeout:g} s: {error}"
        ) from error


def load_shard(folder: Path, group: Group, *, dtype: torch.dtype | None = None) -> Decoder:
    """This rank's part of the model in `folder`, on its device, its partial sums going over the group."""
    rank = group.rank
    return load_model(folder, dtype=dtype, device=rank.device, shard=rank.shard, reduce=group.reduce)
