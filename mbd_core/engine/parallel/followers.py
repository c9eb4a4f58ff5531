"""The processes of the followers: ranks 1, 2, ... of a tensor-parallel engine, children of rank 0's process.

Each is a new interpreter, not a fork of rank 0's, so it starts alike from any script, notebook, Ray worker and thread.
Rank 0 has a connection to each: it sends the function to run, and receives the reason of a failure. When rank 0's
process ends, however it ends, the connection closes and the follower ends too, whatever it waits for.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as connection_wait
from typing import Any


class Followers:
    """Child processes, one for each of ranks 1, 2, ...; `end()` them."""

    def __init__(self, run: Callable[..., None], args: Sequence[tuple[Any, ...]]) -> None:
        """Starts a process for each tuple of `args`, which calls `run` with it. `run` must be importable by name."""
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
        """Which rank failed and why, `None` without a failure; waits at most `wait` seconds for all ranks' reasons.

        Of several failures it prefers a cause over the mere loss of another rank. Reasons stay after `end()`.
        """
        deadline = time.monotonic() + wait
        connections = {c: r for r, c in enumerate(self._connections, 1) if not c.closed and r not in self._reasons}
        while connections and (seconds := deadline - time.monotonic()) > 0:
            for connection in [c for c in connection_wait(list(connections), seconds) if isinstance(c, Connection)]:
                rank = connections.pop(connection)
                self._reasons[rank] = f"rank {rank}: {self._reason(rank)}"
        return min(self._reasons.values(), key=lambda reason: "RankLost" in reason, default=None)

    def _reason(self, rank: int) -> str:
        """The reason that the follower sent; if it only closed its end of the connection, how its process ended."""
        try:
            return str(self._connections[rank - 1].recv())
        except (EOFError, OSError):
            code = self._processes[rank - 1].wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self, wait: float = 0.0) -> None:
        """Waits `wait` seconds in all for the processes to end by themselves, then kills the rest."""
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
        os._exit(1)  # an orderly end could wait for the device, and the device for a lost rank


def _end_with(connection: Connection) -> None:
    """Ends this process when rank 0's end of the connection closes, which happens when rank 0's process ends."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
