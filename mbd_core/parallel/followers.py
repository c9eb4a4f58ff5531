"""The other ranks of a tensor-parallel engine, as child processes of rank 0's.

Each is a new interpreter, not a copy of rank 0's: so they start alike from any script, notebook or Ray worker, and
from any thread. One connection leads to each. What it is to do comes over it, why it failed goes back over it, and
when rank 0's process ends, however it ends, the connection does too and the follower with it, whatever it waits for.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as connection_wait
from typing import Any


class Followers:
    """Child processes, one for each of ranks 1, 2, ...; `end()` them."""

    def __init__(self, run: Callable[..., None], args: Sequence[tuple[Any, ...]]) -> None:
        """Start a process for each tuple; it calls `run(*args)`. `run` must stand in a module, by its name."""
        command = [sys.executable, "-P", "-c", "from mbd_core.parallel.followers import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reasons: dict[int, str] = {}  # by rank; a reason can be heard only once
        for each in args:
            ours, theirs = multiprocessing.Pipe()
            ours.send((run, each))
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
        """Whether all are; asks the operating system, never waits."""
        return all(process.poll() is None for process in self._processes)

    def failure(self, wait: float = 1.0) -> str | None:
        """Which rank failed and why, after at most `wait` seconds in which all can say so; `None` if none has.

        Where several did, one that did not merely lose the others. What was heard once stays, also after `end()`.
        """
        deadline = time.monotonic() + wait
        open_ones = [(rank, c) for rank, c in enumerate(self._connections, 1) if not c.closed]
        silent = {c: rank for rank, c in open_ones if rank not in self._reasons}
        while silent and (left := deadline - time.monotonic()) > 0:
            for connection in [c for c in connection_wait(list(silent), left) if isinstance(c, Connection)]:
                rank = silent.pop(connection)
                self._reasons[rank] = f"rank {rank}: {self._reason(rank)}"
        return min(self._reasons.values(), key=lambda reason: "RankLost" in reason, default=None)

    def _reason(self, rank: int) -> str:
        """What it sent, or, where its end of the connection just closed, how its process ended."""
        try:
            return str(self._connections[rank - 1].recv())
        except (EOFError, OSError):
            code = self._processes[rank - 1].wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self, wait: float = 0.0) -> None:
        """Let them end by themselves for `wait` seconds, all together, then kill; none is left."""
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
        with suppress(OSError):
            connection.send(" ".join(f"{type(error).__name__}: {error}".split()))
        raise


def _end_with(connection: Connection) -> None:
    """Wait for the other end to close, which says that rank 0's process has ended; nothing else is sent."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
