"""Followers: rank 0's orders, the engines of ranks 1, 2, ... that carry them out, and their processes.

Each is a new interpreter, not a fork of rank 0's: so they start alike from any script, notebook or Ray worker, and
from any thread. A connection leads to each. The function to run goes over it, and the reason of a failure comes back.
When rank 0's process ends, however it ends, the connection closes and the follower ends too, whatever it waits for.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as connection_wait
from pathlib import Path
from typing import Any, Literal

import torch

from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.pacing import Pace
from mbd_core.engine.parallel.group import Group, Rank, init_group, sized_alike
from mbd_core.engine.parallel.shared_sums import load_shard
from mbd_core.engine.ranks import EngineCall
from mbd_core.engine.weights import NotEnoughMemory
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantized_parts

# The messages of rank 0 to the other ranks: one `Setup`, then `Orders` before each step.


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message: what a follower builds its engine from, so that all ranks are set up alike.

    model        rank 0's configuration
    fp8          which weights of the part it holds are FP8
    num_threads  of the CPU, on which the rounding of a matrix product may depend
    """

    model: ModelConfig
    fp8: Fp8Parts | None
    engine: EngineConfig
    vocab_limit: int | None
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Every later message.

    calls        that rank 0's engine received since the last message, in their order
    action       what follows them: one step, nothing ("wait"), or the end. "wait" without calls is a sign of life
    fingerprint  of rank 0's engine before the step; a follower's own must be equal
    pace         of the step's prompt chunks, which rank 0 has measured
    drafts       whether requests that may draft do, by rank 0's measures
    """

    action: Literal["step", "wait", "stop"]
    calls: tuple[EngineCall, ...] = ()
    fingerprint: int = 0
    pace: Pace | None = None
    drafts: bool = True


REFUSALS = (
    ValueError,
    NotEnoughMemory,
)  # of a call between two steps: all ranks raise them alike, and nothing changed


def fingerprint(engine: Engine) -> int:
    """A checksum of the state of the running requests, as far as the host knows it.

    It covers the last report that was read, the tokens that were emitted and the number of weight swaps; it waits for
    no step that is under way.
    """
    rows = engine.scheduler.running.items()
    states = [(row, s.request.request_id, s.prefilled, s.num_emitted, s.answer.tokens[-4:]) for row, s in rows]
    last_report = zlib.crc32(engine.last_report.packed_X.tobytes())
    return zlib.crc32(repr((engine.weights_version, states)).encode(), last_report)


# A follower: the engine of rank 1, 2, ..., which repeats what rank 0's engine does.


class OutOfStep(RuntimeError):
    """A follower's state is not rank 0's: hardware, libraries or weights differ, or the engine has a defect."""


def follow(model: Decoder, group: Group) -> None:
    """Do what rank 0 does until it says stop; `model` is this rank's shard. The group is to be left then, at once.

    Raises `ValueError` if the shard is part of another model, `RankLost` if rank 0 is gone, and `OutOfStep` if the
    states of the two differ. The process should then end, which the other ranks notice.
    """
    engine = _build(model, group)
    group.barrier()
    while (orders := group.receive()).action != "stop":
        for call in orders.calls:
            with suppress(*(() if call.waits else REFUSALS)):  # rank 0 raises them too
                call.apply(engine)
        if orders.action == "wait":
            continue
        if fingerprint(engine) != orders.fingerprint:
            raise OutOfStep(f"rank {group.rank.rank} is not in rank 0's state; are devices and libraries the same?")
        engine.pacer.follow(orders.pace)
        if engine.drafting is not None:
            engine.drafting.follow(orders.drafts)
        engine.step()
    engine.close()
    group.barrier()


def _build(model: Decoder, group: Group) -> Engine:
    """This rank's engine, set up as rank 0's."""
    setup: Setup = group.receive()
    if setup.model != model.config:
        raise ValueError(f"rank {group.rank.rank} has loaded another model: {model.config}, rank 0 {setup.model}")
    if setup.fp8 != quantized_parts(model):
        raise ValueError(f"rank {group.rank.rank} has FP8 weights ({quantized_parts(model)}), rank 0 ({setup.fp8})")
    if group.rank.kind == "cpu":
        torch.set_num_threads(setup.num_threads)
    config = sized_alike(model, setup.engine, group)
    return Engine(model, config, vocab_limit=setup.vocab_limit, ranks=group)


def run_follower(folder: Path, rank: Rank, dtype: torch.dtype | None = None, fp8: Fp8Parts | None = None) -> None:
    """A follower's whole life, in a process of its own: join, load the shard, follow, leave.

    If it fails it does not leave the group: its process ends, and the other ranks learn the reason from that.
    """
    group = init_group(rank)
    follow(load_shard(folder, group, dtype=dtype, fp8=fp8), group)
    group.close()


# The processes of the followers: ranks 1, 2, ... of a tensor-parallel engine, children of rank 0's process.


class Followers:
    """Child processes, one for each of ranks 1, 2, ...; `end()` them."""

    def __init__(self, run: Callable[..., None], args: Sequence[tuple[Any, ...]]) -> None:
        """Start a process for each tuple; it calls `run(*args)`. `run` must be importable from its module by name."""
        command = [sys.executable, "-P", "-c", "from mbd_core.engine.parallel.followers import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reasons: dict[int, str] = {}  # by rank; a reason can be received only once
        for arguments in args:
            ours, theirs = multiprocessing.Pipe()
            ours.send((run, arguments))
            with theirs:
                number = theirs.fileno()
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(number)], pass_fds=[number], env=environment, stdin=subprocess.DEVNULL
                    )
                )
            self._connections.append(ours)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether all processes run; asks the operating system, never waits."""
        return all(process.poll() is None for process in self._processes)

    def failure(self, wait: float = 1.0) -> str | None:
        """Which rank failed and why, `None` if none did; waits at most `wait` seconds for all ranks' reasons.

        Of several failures it names one that is not the mere loss of another rank. A reason is kept, also after
        `end()`.
        """
        deadline = time.monotonic() + wait
        connections = {c: r for r, c in enumerate(self._connections, 1) if not c.closed and r not in self._reasons}
        while connections and (seconds := deadline - time.monotonic()) > 0:
            for connection in [c for c in connection_wait(list(connections), seconds) if isinstance(c, Connection)]:
                rank = connections.pop(connection)
                self._reasons[rank] = f"rank {rank}: {self._reason(rank)}"
        return min(self._reasons.values(), key=lambda reason: "RankLost" in reason, default=None)

    def _reason(self, rank: int) -> str:
        """What the follower sent; if it only closed its end of the connection, how its process ended."""
        try:
            return str(self._connections[rank - 1].recv())
        except (EOFError, OSError):
            code = self._processes[rank - 1].wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self, wait: float = 0.0) -> None:
        """Wait `wait` seconds in all for the processes to end by themselves, then kill those that run."""
        deadline = time.monotonic() + wait
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()


def main() -> None:
    """A follower's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; rank 0 decides
    connection = Connection(int(sys.argv[1]))
    try:
        run, args = connection.recv()
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        run(*args)
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            connection.send(" ".join(f"{type(error).__name__}: {error}".split()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an interpreter that ends in order could wait for the device, and that for a lost rank


def _end_with(connection: Connection) -> None:
    """Wait until rank 0's end closes, which it does when its process ends, then end this one. Nothing is sent."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
