"""The reward of a user's function, which runs in processes of its own: it may hang, print, or end its process.

A plain function is asked one answer at a time in a process, since it may not be safe under threads. A function that
mainly waits (for a service or a program) gets more processes. Each imports the module anew. An `async def` function
has one process, and many answers under way in it.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from mbd_core.rl.function_process import LINE_BYTES, CallStyle, FunctionReply
from mbd_core.rl.parts import Failure, RewardFailed, RewardOutcome, failed, first_error, outcome_of, question
from mbd_core.rl.rows import JudgedRow

START_SECONDS = 120.0  # for a function's process to import its libraries
GRACE = 5.0  # seconds for an `async def` function's process to report that an answer's time is over
SLOW = 0.1  # seconds of an answer from which more processes are worth their start
WAITING_SHARE = 0.5  # a function waits if it spends more than this fraction of an answer's time without computing
MEMORY_SHARE = 0.5  # the fraction of free memory for a function's processes


class ProcessLost(Exception):
    """A function's process gave no reply. The message says why, as the end of a sentence about the function."""


class FunctionProcess:
    """A process that has imported the function."""

    def __init__(self, name: str, seconds: float) -> None:
        ours, theirs = socket.socketpair()
        code = "import sys; from mbd_core.rl.function_process import main; "
        code += "main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))"
        command = [sys.executable, "-P", "-c", code, name, str(theirs.fileno()), str(seconds)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # it and its children end together
            )
        self._socket, self._numbers = ours, count()
        self._waiting: dict[int, asyncio.Future[FunctionReply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._lost = ""  # the reason why the process is lost
        self.is_async = False
        self.form: CallStyle = "answer"

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    async def start(self) -> None:
        """Wait until the process is ready. Raises `ProcessLost` if the function cannot be asked."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=LINE_BYTES)
        try:
            line = await asyncio.wait_for(reader.readline(), START_SECONDS)
        except TimeoutError:
            raise ProcessLost(f"did not import its module within {START_SECONDS:g} s") from None
        if not line:
            raise ProcessLost("ended its process while its module was imported")
        said = json.loads(line)
        if "error" in said:
            raise ProcessLost(said["error"])
        self.is_async, self.form = said["is_async"], said["form"]
        self._listening = asyncio.create_task(self._listen(reader))

    async def ask(self, rows: Sequence[JudgedRow], seconds: float) -> FunctionReply:
        """The reply about these answers. Raises `ProcessLost`, after which the process has ended."""
        assert self._writer is not None
        if self._lost:
            raise ProcessLost(self._lost)
        number = next(self._numbers)
        questions = [question(row) | {"task": row["task"]} for row in rows]
        self._waiting[number] = reply = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": number, "rows": questions}).encode() + b"\n")
        try:
            return await asyncio.wait_for(reply, seconds + (GRACE if self.is_async else 0.0))
        except TimeoutError:
            self.end("ended: an answer beside this one blocked its event loop")
            raise ProcessLost(f"did not answer within {seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                reply = json.loads(line)
                if (waiting := self._waiting.get(reply["id"])) is not None and not waiting.done():
                    waiting.set_result(reply)
        self.end("ended its process")

    def end(self, why: str) -> None:
        """Kill the process and its children; pending calls of `ask` raise `ProcessLost` with the reason."""
        self._lost = self._lost or why
        if self._process.returncode is None:  # until it is waited for, its number is nobody else's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        if self._listening is not None and self._listening is not asyncio.current_task():
            self._listening.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProcessLost(self._lost))


class FunctionReward:
    """The reward of MODULE:NAME. `close()` it: until then its processes stay for the next table."""

    def __init__(self, name: str, *, seconds: float, concurrency: int, stops: bool = False) -> None:
        self._name, self._seconds, self._concurrency, self._stops = name, seconds, concurrency, stops
        self._processes: set[FunctionProcess] = set()
        self._idle: list[FunctionProcess] = []  # of a plain function
        self._shared: FunctionProcess | None = None  # of an `async def` function
        self._starting = asyncio.Lock()

    async def resolve(self) -> None:
        """Import the function. Raises `RewardFailed` if it cannot be imported or asked."""
        self._give_back(await self._take())

    async def judge(self, rows: Sequence[JudgedRow]) -> list[RewardOutcome]:
        """An outcome for each row. Raises `RewardFailed` if the function cannot be asked at all, and with `stops`
        if it fails on a row."""
        outcomes: list[RewardOutcome] = [None] * len(rows)
        first = await self._take()
        self._give_back(first)
        units = deque(_units(rows, first.form))
        num_lanes = 0

        def open_lanes(most: int) -> None:
            nonlocal num_lanes
            for _ in range(min(most - num_lanes, len(units))):
                num_lanes += 1
                lanes.create_task(lane())

        async def lane() -> None:
            while units:
                places = units.popleft()
                of_unit, most = await self._ask([rows[place] for place in places])
                for place, outcome in zip(places, of_unit, strict=True):
                    outcomes[place] = outcome
                    if self._stops and isinstance(outcome, Failure):
                        raise failed(self._name, outcome, rows[place])
                open_lanes(most)

        try:
            async with asyncio.TaskGroup() as lanes:
                open_lanes(self._concurrency if first.is_async else max(1, len(self._idle)))
        except BaseExceptionGroup as group:
            await self.close()  # some processes are in the middle of an answer
            raise first_error(group) from None
        return outcomes

    async def close(self) -> None:
        for process in self._processes:
            process.end("ended: the run ends")
        self._processes.clear()
        self._idle.clear()
        self._shared = None

    async def _ask(self, rows: Sequence[JudgedRow]) -> tuple[Sequence[RewardOutcome], int]:
        """The outcomes for answers that are asked together, and how many answers may be under way from now on."""
        process = await self._take()
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            reply = await process.ask(rows, self._seconds)
        except ProcessLost as error:
            self._processes.discard(process)
            return [Failure(str(error))] * len(rows), self._concurrency
        self._give_back(process)
        most = self._concurrency if process.is_async else self._most_processes(reply, clock.time() - began)
        if "error" in reply:
            return [Failure(reply["error"])] * len(rows), most
        return [outcome_of(value) for value in reply["rewards"]], most

    def _most_processes(self, reply: FunctionReply, seconds: float) -> int:
        """How many processes are worth their start, by a plain function's reply: one, unless the function waits and
        there is memory."""
        is_waiting = seconds - reply["computing_seconds"] > WAITING_SHARE * seconds
        if seconds < SLOW or not is_waiting or reply["is_on_gpu"]:
            return 1
        from mbd_core.ops.machine import free_host_memory  # this imports torch, which takes a second

        return min(self._concurrency, 1 + int(MEMORY_SHARE * free_host_memory() / reply["bytes"]))

    async def _take(self) -> FunctionProcess:
        """An idle process of a plain function, the shared process of an `async def` function, or a new process."""
        while self._idle:
            if not (idle := self._idle.pop()).is_lost:
                return idle
            self._processes.discard(idle)
        if self._processes and self._shared is None:
            return await self._start()
        async with self._starting:
            if self._shared is not None and not self._shared.is_lost:
                return self._shared
            process = await self._start()
            if process.is_async:
                self._shared = process
            return process

    async def _start(self) -> FunctionProcess:
        process = FunctionProcess(self._name, self._seconds)
        self._processes.add(process)
        try:
            await process.start()
        except ProcessLost as error:
            process.end(str(error))
            raise RewardFailed(f"reward '{self._name}' {error}") from None
        return process

    def _give_back(self, process: FunctionProcess) -> None:
        if not process.is_async:
            self._idle.append(process)


def _units(rows: Sequence[JudgedRow], form: CallStyle) -> list[list[int]]:
    """The answers that are asked together, by their places: all answers to a prompt if the function takes lists, else
    single answers."""
    if form != "lists":
        return [[place] for place in range(len(rows))]
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row["group"], row["problem_id"]), []).append(place)
    return list(groups.values())
