"""Sums in shared memory: ranks as threads, and torch's symmetric memory played by theirs."""

import ctypes
import inspect
import random
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_groups import rank_of
from thread_ranks import ThreadRanks
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from mbd_core.engine.parallel import shared_sums
from mbd_core.engine.parallel.group import Group
from mbd_core.engine.parallel.shared_sums import GroupSums, SharedSums, most_bytes, share_sums, sums_of
from mbd_core.models.kernel_layer import SharedReduce, Sum

SIZE = 3
SUMS: tuple[Sum, Sum] = (0, 1)


class Handle:
    """One place of every rank."""

    def __init__(self) -> None:
        self.places: dict[int, Tensor] = {}
        self.meeting = threading.Barrier(SIZE, timeout=20)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.places[rank].view(dtype).view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms == 20_000
        self.meeting.wait()


class Memory:
    """What all ranks map; `apart` are two GPUs that NVLink does not join."""

    def __init__(self, *, apart: tuple[int, int] | None = None, kind: str = "CUDA", fails: int | None = None) -> None:
        self.apart, self.kind, self.fails = apart, kind, fails
        self.here = threading.local()
        self.meeting = threading.Barrier(SIZE, timeout=20)
        self.handles = [Handle(), Handle()]

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device == torch.device("cuda", self.here.rank)
        return torch.zeros(size, dtype=dtype)

    def backend(self, device: torch.device) -> str:
        return self.kind

    def rendezvous(self, place: Tensor, group: object) -> Handle:
        assert group == "all ranks" and self.here.waits == 5.0, "a quarter of the group's timeout"
        if self.fails == self.here.rank:
            raise RuntimeError("no handle of its memory\nat a line of C++")
        assert self.apart is None, "a rank would wait for one that does not come"
        handle, self.here.mapped = self.handles[self.here.mapped], self.here.mapped + 1
        handle.places[self.here.rank] = place
        try:
            self.meeting.wait(self.here.waits if self.fails is None else 0.5)
        except threading.BrokenBarrierError:
            raise RuntimeError("wait timeout after 5000ms") from None
        return handle

    def set_timeout(self, wait: timedelta) -> None:
        """The store's, of the rank that calls it."""
        self.here.waits = wait.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=20)

    def links(self, device: object, link: str) -> SimpleNamespace:
        assert str(device) == "DeviceType.CUDA" and link == "nvlink"
        found = [[int(one != other) for other in range(SIZE)] for one in range(SIZE)]
        if self.apart is not None:
            found[self.apart[0]][self.apart[1]] = 0
        return SimpleNamespace(matrix=found)


class ThreadGroup:
    """A rank's membership, as far as sums need it."""

    def __init__(self, rank: int, ranks: ThreadRanks, reasons: dict[int, str], meeting: threading.Barrier) -> None:
        self.rank = rank_of(rank, SIZE, 0, device=f"cuda:{rank}")
        self.reduce = ranks.reduce(rank)
        self._reasons, self._meeting = reasons, meeting

    def least(self, value: int) -> int:
        return value

    def agree(self, prepare: Callable[[], Any]) -> Any:
        value = None
        try:
            value = prepare()
        except ValueError as error:
            self._reasons[self.rank.rank] = str(error)
        self._meeting.wait()
        reasons = list(self._reasons.values())
        self._meeting.wait()  # all have read them, before anybody agrees on something else
        if reasons:
            raise ValueError(reasons[0])
        return value


def together(monkeypatch: pytest.MonkeyPatch, memory: Memory, work: Callable[[int, Group], Any]) -> list[Any]:
    """What `work` returns on each rank."""
    ranks, reasons, meeting = ThreadRanks(SIZE), dict[int, str](), threading.Barrier(SIZE, timeout=20)
    on_device = torch.tensor
    monkeypatch.setattr(symmetric, "empty", memory.empty)
    monkeypatch.setattr(symmetric, "rendezvous", memory.rendezvous)
    monkeypatch.setattr(symmetric, "get_backend", memory.backend)
    monkeypatch.setattr(shared_sums, "_num_mapped", 0)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # so that it is as before afterwards
    monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", memory.links)
    c10d = SimpleNamespace(_get_process_group_store=lambda ranks: memory)
    monkeypatch.setattr(
        shared_sums, "dist", SimpleNamespace(group=SimpleNamespace(WORLD="all ranks"), distributed_c10d=c10d)
    )
    monkeypatch.setattr(torch, "tensor", lambda data, **_: on_device(data))

    def on(rank: int) -> Any:
        memory.here.rank, memory.here.mapped = rank, 0
        return work(rank, cast(Group, ThreadGroup(rank, ranks, reasons, meeting)))

    return ranks.run(on)


def read(address: int, like: Tensor) -> Tensor:
    """What lies there now."""
    raw = (ctypes.c_uint8 * like.nbytes).from_address(address)
    return torch.frombuffer(bytearray(raw), dtype=like.dtype).view(like.shape)


def test_every_rank_reads_every_part_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sums of each of many layers: no rank may overwrite what a slower one has yet to read."""

    def work(rank: int, group: Group) -> list[float]:
        sums, late, found = share_sums(group), random.Random(rank), []
        for layer in range(60):
            for number in SUMS:
                place = sums.place(number, torch.empty(2, 5))
                assert place is not None
                place.fill_(100.0 * rank + layer + number / 2)
                parts = sums.share(number)
                time.sleep(late.random() / 500)
                total = torch.stack([read(int(address), place) for address in parts.addresses_G]).sum(0)
                assert (total == total[0, 0]).all()
                found.append(float(total[0, 0]))
        return found

    wanted = [sum(100.0 * rank + layer + n / 2 for rank in range(SIZE)) for layer in range(60) for n in SUMS]
    assert together(monkeypatch, Memory(), work) == [wanted] * SIZE


def test_small_parts_have_a_place_and_large_ones_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, group: Group) -> bool:
        sums = sums_of(group)
        assert isinstance(sums, SharedSums) and isinstance(sums, SharedReduce)
        most = most_bytes(SIZE)
        assert sums.description() == {"name": "shared memory", "most_bytes": most, "not_chosen": {}}
        for dtype in (torch.float32, torch.bfloat16):
            fits = torch.empty(most // 64 // dtype.itemsize, 64, dtype=dtype)
            place = sums.place(1, fits)
            assert place is not None and place.shape == fits.shape and place.dtype == dtype
            assert sums.place(1, torch.empty(len(fits) + 1, 64, dtype=dtype)) is None
        return sums(torch.full((2,), float(rank))).tolist() == [3.0, 3.0]

    assert together(monkeypatch, Memory(), work) == [True] * SIZE


def test_gpus_without_nvlink_sum_as_before_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, group: Group) -> bool:
        sums = sums_of(group)
        assert isinstance(sums, GroupSums) and not isinstance(sums, SharedReduce)
        reason = "GPUs 2 and 1 are not joined by NVLink"
        assert sums.description() == {"name": "nccl", "not_chosen": {"shared memory": reason}}
        return sums(torch.full((2,), float(rank))).tolist() == [3.0, 3.0]

    assert together(monkeypatch, Memory(apart=(2, 1)), work) == [True] * SIZE


def test_a_torch_that_cannot_tell_links_sums_as_before_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, group: Group) -> str:
        monkeypatch.delattr(torch._C._distributed_c10d, "_detect_dma_connectivity", raising=False)
        return sums_of(group).description()["not_chosen"]["shared memory"]

    for reason in together(monkeypatch, Memory(), work):
        assert "cannot import name '_detect_dma_connectivity'" in reason


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        ({"kind": "NVSHMEM"}, "is NVSHMEM's; unset TORCH_SYMMMEM"),
        ({"fails": 1}, "no handle|wait time"),
    ],
)
def test_memory_that_cannot_be_mapped_is_said_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], reason: str
) -> None:
    """A rank that fails while the others wait for it costs a part of the group's timeout, and all sum as before."""

    def work(rank: int, group: Group) -> str:
        return sums_of(group).description()["not_chosen"]["shared memory"]

    given = Memory(**memory)
    for said in together(monkeypatch, given, work):
        assert re.search(reason, said) and "\n" not in said


def test_a_second_group_of_a_process_sums_as_before_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 goes on counting where its new followers begin."""

    def work(rank: int, group: Group) -> str:
        group.least = lambda value: 0  # type: ignore[method-assign]  # the new followers'
        shared_sums._num_mapped = 2
        return sums_of(group).description()["not_chosen"]["shared memory"]

    assert all("only in a process's first group" in said for said in together(monkeypatch, Memory(), work))


def test_torch_has_what_is_called() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"nvlink is not available|CUDA driver"):
            torch._C._distributed_c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink")
    assert {"dtype", "device"} < set(inspect.signature(symmetric.empty).parameters)
    assert list(inspect.signature(symmetric.rendezvous).parameters) == ["tensor", "group"]
    handle = torch._C._distributed_c10d._SymmetricMemory
    for name, arguments in (("barrier", ("channel", "timeout_ms")), ("get_buffer", ("rank", "sizes", "dtype"))):
        assert all(argument in getattr(handle, name).__doc__ for argument in arguments)
