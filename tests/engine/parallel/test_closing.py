"""A group between GPUs closes in NCCL's order, which gloo does not ask for and so no other test would show.

NCCL's communicators are destroyed by all ranks at once, and only when no CUDA graph of any of them holds one: a rank
that destroys its own earlier waits, and so does everybody who waits for that rank's process.
"""

import queue
import threading
import time
from typing import Any, cast

import pytest
import torch
from small_groups import DENSE, SIZES

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.decoding.blocks.work import StepWork
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel import leader
from mbd_core.engine.parallel.follow import follow
from mbd_core.engine.parallel.followers import Followers
from mbd_core.engine.parallel.group import Group, Rank, RankLost
from mbd_core.engine.parallel.leader import ParallelEngine
from mbd_core.engine.step import graphs
from mbd_core.engine.step.graphs import CapturedStep, StepGraphs
from mbd_core.engine.step.kinds import StepKind
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.shard import Shard

PATIENCE = 20.0


class Communicator:
    """What NCCL shares between two ranks: destroying it waits for both, and finds no graphs."""

    def __init__(self) -> None:
        self.meeting, self.destroying = threading.Barrier(2), threading.Barrier(2)
        self.messages: queue.Queue[Any] = queue.Queue()
        self.graphs: set[int] = set()  # the ranks whose graphs hold it
        self.events: list[str] = []
        self.lost = False  # a rank
        self.interrupted = threading.Event()


class FakeGroup:
    """A rank's membership in a `Communicator`, in a thread of this process."""

    def __init__(self, rank: int, shared: Communicator, *, device: str = "cpu", timeout: float = PATIENCE) -> None:
        self.rank = Rank(rank=rank, size=2, address="127.0.0.1", port=0, timeout=timeout, device=device)
        self.shared = shared

    def broadcast(self, message: Any) -> None:
        self.shared.messages.put(message)

    def receive(self) -> Any:
        return self.shared.messages.get(timeout=PATIENCE)

    def share(self, decide: Any) -> Any:
        raise AssertionError("no request of these tests has a guide")

    def barrier(self) -> None:
        self.shared.meeting.wait(PATIENCE)

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        assert not self.shared.graphs, f"the graphs of ranks {self.shared.graphs} still hold the communicator"
        self.shared.destroying.wait(PATIENCE)
        self.shared.events.append("destroyed")

    def interrupt(self) -> None:
        self.shared.interrupted.set()

    def abandon(self) -> None:
        assert self.rank.rank not in self.shared.graphs, "NCCL's abort waits until no graph holds the communicator"
        self.shared.events.append("abandoned")


class Child:
    """The follower's process, here a thread: it ends when it has left the group."""

    def __init__(self, shared: Communicator) -> None:
        self.shared, self.failure_of = shared, cast(BaseException | None, None)
        self.group = FakeGroup(1, shared)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            follow(shard(1), cast(Group, self.group))
            self.group.close()
        except BaseException as error:
            self.failure_of = error

    def end(self, wait: float = 0.0) -> None:
        self.thread.join(min(wait, 2.0))
        self.shared.events.append("killed" if self.thread.is_alive() else "ended")

    def failure(self) -> None: ...

    alive = True


def shard(rank: int) -> Decoder:
    model = Decoder(DENSE, shard=Shard(rank=rank, size=2), reduce=lambda x: x)
    init_weights(model, seed=0)
    return model


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    """Every engine of either rank holds the communicator in a graph."""
    out = Communicator()

    class HeldGraph:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            out.graphs.add(rank)

        def release(self) -> None:
            waited = f"synchronised {threading.get_ident()}" in out.events
            assert waited is not out.lost, "the device has not finished, or, with a lost rank, may never finish"
            out.graphs.remove(self.rank)

    made = StepGraphs.__init__

    def with_graph(self: StepGraphs, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        rank = int(threading.current_thread() is not threading.main_thread())
        kind = StepKind(num_rows=1, num_slots=1, num_asked=None, work=StepWork())
        self._captured_steps[kind] = cast(CapturedStep, HeldGraph(rank))

    monkeypatch.setattr(graphs.StepGraphs, "__init__", with_graph)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device=None: out.events.append(f"synchronised {threading.get_ident()}")
    )
    return out


def test_all_ranks_let_go_of_their_graphs_then_leave_together_then_the_processes_end(shared: Communicator) -> None:
    child = Child(shared)
    engine = ParallelEngine(shard(0), SIZES, group=cast(Group, FakeGroup(0, shared)), followers=cast(Followers, child))
    assert shared.graphs == {0, 1}
    engine.close()
    assert child.failure_of is None and not shared.graphs
    assert [e for e in shared.events if not e.startswith("sync")] == ["destroyed", "destroyed", "ended"]
    assert len({e for e in shared.events if e.startswith("sync")}) == 2


def test_lost_followers_are_killed_first_and_rank_0_leaves_alone(shared: Communicator) -> None:
    """What a dead rank would have to do is not waited for."""
    child, group = Child(shared), FakeGroup(0, shared)
    engine = ParallelEngine(shard(0), SIZES, group=cast(Group, group), followers=cast(Followers, child))

    def lost(message: Any) -> None:
        raise RankLost("gone")

    group.broadcast = lost  # type: ignore[method-assign]
    shared.lost = True
    engine.close()
    assert shared.events == ["killed", "abandoned"]
    shared.messages.put(None)  # lets the thread end


def test_a_sign_of_life_under_way_is_no_lost_rank(shared: Communicator) -> None:
    """`close` comes while the heartbeat sends."""
    child, group = Child(shared), FakeGroup(0, shared, timeout=0.4)
    sending, send = threading.Event(), group.broadcast

    def slowly(message: Any) -> None:
        if getattr(message, "action", "") == "wait":
            sending.set()
            time.sleep(0.2)
        send(message)

    group.broadcast = slowly  # type: ignore[method-assign]
    engine = ParallelEngine(shard(0), SIZES, group=cast(Group, group), followers=cast(Followers, child))
    assert sending.wait(PATIENCE)
    engine.close()
    assert [e for e in shared.events if not e.startswith("sync")] == ["destroyed", "destroyed", "ended"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_sum_that_waits_for_a_lost_rank_is_interrupted(
    shared: Communicator, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Within a graph NCCL has no timeout: rank 0 would wait for ever, be the rank's process gone or only stuck."""
    monkeypatch.setattr(leader, "LONGEST_STEP", 0.5)
    child, group = Child(shared), FakeGroup(0, shared, device="cuda:0", timeout=0.4)
    engine = ParallelEngine(shard(0), SIZES, group=cast(Group, group), followers=cast(Followers, child))
    child.alive, shared.lost = not ended, True

    def endless(self: Engine) -> list[StepOutput]:
        assert shared.interrupted.wait(PATIENCE), "nobody interrupts the step"
        if ended and threading.current_thread() is threading.main_thread():
            raise ValueError("Default process group has not been initialized")  # torch's, after NCCL's abort
        return []

    monkeypatch.setattr(Engine, "step", endless)
    engine.add(Request(request_id="a", prompt=(5, 6, 7), max_tokens=8, decoding=DecodingConfig(block_size=4)))
    with pytest.raises(RankLost, match="process has ended" if ended else r"took longer than 0\.5 s"):
        engine.step()
    with pytest.raises(RankLost):
        engine.step()
    engine.close()
    assert shared.events == ["killed", "abandoned"]
    shared.messages.put(None)  # lets the thread end
