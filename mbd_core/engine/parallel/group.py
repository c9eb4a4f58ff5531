"""A tensor-parallel group: the processes that hold one model's shards, their messages and their agreements.

The forward's partial sums go over the first process group (NCCL between GPUs, gloo between CPUs), or through memory
that the GPUs share (`shared_sums.py`). Messages from rank 0 go over a second group, always gloo: they cost no device
work, and a dead process is noticed by its closed connection.

The timeout bounds every wait. With gloo, on CPUs and for messages, it raises `RankLost` in the waiting rank; a process
that ended is noticed at once. A sum between GPUs is asynchronous. Outside a CUDA graph NCCL's watchdog ends the
waiting process a minute after the timeout, or the device's next call fails, and the owner of that process (Ray, a
launcher) must notice it. Within a graph NCCL waits for ever: rank 0's heartbeat notices a lost rank and interrupts it.

Every rank must hold the same residual stream bit for bit: only on equal numbers do all ranks decide alike. All-reduce
guarantees it: each element is summed in one order and sent to all (two ranks sum in either order, with equal results).
So does shared memory, which all ranks read in one order.
"""

import math
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mbd_core.engine.build import fitting_pages
from mbd_core.engine.config import EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.shard import Shard

T = TypeVar("T")

_LENGTH = 8  # bytes of a message's length
_ARRIVALS = "arrived"  # the key in the store that counts the ranks that are ready to join
_FRAME = 512  # bytes of the first broadcast of a message: most messages fit


class RankLost(RuntimeError):
    """Another rank died, hangs or fell out of step. The group cannot be used any more and must be started anew."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A process's data for joining: its number, the number of ranks, rank 0's address, its own device.

    timeout  seconds that any rank waits for another; must exceed the differences between the ranks' loading times
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
        """The part of the model that this rank holds. Raises `ValueError` unless 0 <= `rank` < `size`."""
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

    def __init__(self, rank: Rank, messages: dist.ProcessGroup) -> None:
        self.rank = rank
        self._messages = messages
        self._interrupted = False

    def reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place: every rank then holds the same bits."""
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise self._loss("sum with the others") from error
        return x

    def broadcast(self, message: Any) -> None:
        """Rank 0 only: sends `message` (small, picklable) to every other rank's `receive`; returns when all
        ranks have it."""
        payload = pickle.dumps(message)
        data = bytearray(len(payload).to_bytes(_LENGTH, "little") + payload)
        data += bytes(max(0, _FRAME - len(data)))
        frame, tail = torch.frombuffer(data, dtype=torch.uint8).split([_FRAME, len(data) - _FRAME])
        try:
            self._send_or_receive(frame, tail)
        except RuntimeError as error:
            raise self._loss("reach the others") from error

    def receive(self) -> Any:
        """The next message of rank 0; waits for it."""
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        try:
            self._send_or_receive(frame)
            size = int.from_bytes(frame[:_LENGTH].numpy().tobytes(), "little")
            tail = torch.empty(max(0, _LENGTH + size - _FRAME), dtype=torch.uint8)
            self._send_or_receive(tail)
        except RuntimeError as error:
            raise self._loss("hear rank 0") from error
        return pickle.loads(torch.cat((frame, tail))[_LENGTH : _LENGTH + size].numpy().tobytes())

    def each(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields rank 0's tensors by name on every rank, on the host; every rank must iterate to the end.

        `tensors` is empty on the other ranks.
        """
        if self.rank.rank == 0:
            for name, tensor in tensors:
                self.broadcast((name, tuple(tensor.shape), tensor.dtype))
                self._pass_on(tensor.detach().to("cpu").contiguous().flatten())
                yield name, tensor
            self.broadcast(None)
        else:
            while (header := self.receive()) is not None:
                name, shape, dtype = header
                flat = torch.empty(math.prod(shape), dtype=dtype)
                self._pass_on(flat)
                yield name, flat.view(shape)

    def _pass_on(self, flat: Tensor) -> None:
        try:
            self._send_or_receive(flat.view(torch.uint8))
        except RuntimeError as error:
            raise self._loss("pass weights on") from error

    def least(self, value: int) -> int:
        """The least of the ranks' values."""
        return self._over_ranks(value, dist.ReduceOp.MIN)

    def total(self, value: int) -> int:
        """The sum of the ranks' values."""
        return self._over_ranks(value, dist.ReduceOp.SUM)

    def _over_ranks(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        values = torch.tensor(value)
        try:
            dist.all_reduce(values, op=operation, group=self._messages)
        except RuntimeError as error:
            raise self._loss("compare a number with the others") from error
        return int(values)

    def agree(self, prepare: Callable[[], T]) -> T:
        """This rank's result of `prepare`, if all ranks succeed; `ValueError` on all ranks if any rank fails."""
        own_reason: str | None = None
        try:
            value = prepare()
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            own_reason = str(error)
        reasons: list[str | None] = [None] * self.rank.size
        try:
            dist.all_gather_object(reasons, own_reason, group=self._messages)
        except RuntimeError as error:
            raise self._loss("agree with the others") from error
        if own_reason is not None:
            raise ValueError(own_reason)
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise ValueError(f"rank {rank}: {reason}")
        return value

    def share(self, decide: Callable[[], list[T]]) -> list[T]:
        """Rank 0's decisions, on every rank; the other ranks decide nothing."""
        if self.rank.rank != 0:
            decisions: list[T] = self.receive()
            return decisions
        decisions = decide()
        self.broadcast(decisions)
        return decisions

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        try:
            dist.barrier(group=self._messages)
        except RuntimeError as error:
            raise self._loss("meet the others") from error

    def _send_or_receive(self, *parts: Tensor) -> None:
        for part in parts:
            if len(part):
                dist.broadcast(part, src=0, group=self._messages)

    def close(self) -> None:
        """Leave the group. Between GPUs all ranks must leave at once, because each rank waits here for the other
        ranks, and for its own CUDA graphs that hold the communicator (`Engine.close`)."""
        dist.destroy_process_group()

    def interrupt(self) -> None:
        """Ends a wait for a lost rank between GPUs, which no timeout ends; call it from another thread than the
        waiting thread. Returns when no CUDA graph holds the communicator. Between CPUs every wait has its timeout."""
        if self.rank.kind == "cuda" and not self._interrupted:
            self._interrupted = True
            dist.distributed_c10d._abort_process_group()

    def abandon(self) -> None:
        """Leaves the group without the other ranks, because they are lost or out of reach, and waits for nobody. No
        CUDA graph may hold the communicator, because NCCL's abort waits for graphs."""
        self.interrupt()
        if self.rank.kind != "cuda":
            dist.destroy_process_group()

    def _loss(self, action: str) -> RankLost:
        r = self.rank
        return RankLost(
            f"rank {r.rank} of {r.size} could not {action}: a rank ended, or did not answer within {r.timeout:g} s; "
            "start the group anew"
        )


def open_store(address: str, *, size: int, timeout: float, port: int = 0) -> dist.TCPStore:
    """The store through which the ranks find each other, in rank 0's process; its port goes into every `Rank`.

    `port` 0 takes a free port.
    """
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(address, port, size, is_master=True, timeout=wait, wait_for_workers=False)


def num_arrived(store: dist.TCPStore) -> int:
    """The number of ranks that have their device and are about to join. Joining waits for all, even for dead ranks."""
    return store.add(_ARRIVALS, 0)


def init_group(rank: Rank, *, store: dist.TCPStore | None = None) -> Group:
    """Joins the group; returns when all ranks have joined. `store` is rank 0's open store, `None` to open it here.

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
        store.add(_ARRIVALS, 1)
        _wait_for_all(store, rank)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=rank.wait,
            device_id=device if device.type == "cuda" else None,
        )
        return Group(rank, dist.new_group(backend="gloo", timeout=rank.wait))
    except (RuntimeError, TimeoutError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RankLost(
            f"rank {rank.rank} on {socket.gethostname()} did not meet all {rank.size} ranks at "
            f"{rank.address}:{rank.port} within {rank.timeout:g} s: {error}"
        ) from error


def _wait_for_all(store: dist.TCPStore, rank: Rank) -> None:
    """Waits until all ranks have arrived; raises `TimeoutError` if they do not.

    `init_process_group` would wait too. But after its failure a process counts one group more than the other ranks,
    and can never meet them again.
    """
    deadline = time.monotonic() + rank.timeout
    while (count := num_arrived(store)) < rank.size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} arrived")
        time.sleep(0.01)


# All ranks of a group have the same number of KV pages: the number that fits on the rank with the least room.


def sized_alike(model: Decoder, config: EngineConfig, group: Group) -> EngineConfig:
    """`config` with the number of pages that all ranks use; every rank calls it with its shard.

    Ranks on CPUs divide one machine's memory. Raises `ValueError` on all ranks if no page fits beside a shard.
    """
    if config.num_pages is not None:
        return config
    if group.rank.kind == "cpu":
        config = replace(config, kv_memory_fraction=config.kv_memory_fraction / group.rank.size)
    num_pages = group.agree(lambda: fitting_pages(model, config))  # else the others would wait for this rank's number
    return replace(config, num_pages=group.least(num_pages))
