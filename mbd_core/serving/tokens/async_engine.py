"""The engine for coroutines: one task steps it in a worker thread; requests enter and leave between steps."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.blocks.request import Output, Request, StepOutput, aborted_step
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import AdmittedRequest, RequestRefused
from mbd_core.serving.tokens.fair_queue import FairQueue, has_room
from mbd_core.serving.tokens.served_model import GrammarCompiler
from mbd_core.serving.tokens.stream import Asleep, EngineFailed, TokenStream, TooManyRequests

T = TypeVar("T")

KEPT_ROWS = 2  # every second batch row is reserved for clients below their share
RECENT_SECONDS = 10.0  # a client counts for this long after its last request


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """Submitted requests that have not ended: requests with a batch row, and requests that wait for a row."""

    running: int
    waiting: int


class EngineStream(TokenStream):
    """A request's steps as the engine makes them; the engine puts them, or its failure, into `queue`."""

    def __init__(
        self, admitted_request: AdmittedRequest, client: str, withdraw: Callable[["EngineStream"], None]
    ) -> None:
        super().__init__(self._read(), lambda: withdraw(self))
        self.admitted_request, self.client = admitted_request, client
        self.queue: asyncio.Queue[StepOutput | EngineFailed | RequestRefused] = asyncio.Queue()
        self.waits = True  # the engine does not know the request yet

    @property
    def request_id(self) -> str:
        return self.admitted_request.request.request_id

    @property
    def key(self) -> tuple[str, str]:
        """The key in the queue of waiting requests: its client, and the group of choices of one body."""
        return self.client, self.admitted_request.request.group

    async def _read(self) -> AsyncIterator[StepOutput]:
        while True:
            step = await self.queue.get()
            if isinstance(step, EngineFailed | RequestRefused):
                raise step
            yield step


@dataclass(frozen=True, eq=False)
class _Call:
    """A function to run between two steps, and the future of its result."""

    function: Callable[[Engine], Any]
    result: "asyncio.Future[Any]"


@dataclass(frozen=True)
class _Visit:
    """The orders to the worker thread for one step."""

    calls: list[_Call] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    submitted: list[AdmittedRequest] = field(default_factory=list)


@dataclass(frozen=True)
class _Turn:
    """The results of one visit to the worker thread."""

    steps: list[StepOutput]
    results: list[tuple[_Call, Any]]
    refusals: list[tuple[str, RequestRefused]]
    running: int
    known: int
    busy: bool


class AsyncEngine:
    """Continuous batching for coroutines. All methods belong to one event loop; only `_turn` touches the engine.

    At most `max_waiting` requests wait in addition to the running requests. Above this number only clients below their
    share may add requests (`has_room`). Waiting clients take turns, and so do the groups of each client (`FairQueue`).
    The engine itself gets at most one request more than it has rows. If several clients have asked recently, half of
    the rows is reserved for clients below an equal share, so that one client's many long answers do not delay another
    client.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256) -> None:
        self._engine = engine
        self._capacity = engine.config.max_rows + max_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._compile = GrammarCompiler(engine.compile)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineFailed | None = None
        self._running = self._num_known = 0
        self._waiting: FairQueue[EngineStream] = FairQueue()
        self._last_asked: OrderedDict[str, float] = (
            OrderedDict()
        )  # time of each client's last request, the latest at the end
        self._withdrawn: list[str] = []
        self._calls: list[_Call] = []
        self._streams: dict[str, EngineStream] = {}
        self.closed = False
        """Whether requests are refused, because the engine sleeps or is about to."""

    @property
    def capacity(self) -> int:
        """Requests that may run and wait together."""
        return self._capacity

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is, as of its last step."""
        return EngineLoad(running=self._running, waiting=max(0, len(self._streams) - self._running))

    @property
    def waiting_tokens(self) -> int:
        """Prompt and committed tokens of the requests that the engine does not know yet."""
        waiting = [stream.admitted_request.request for stream in self._streams.values() if stream.waits]
        return sum(len(request.prompt) + len(request.committed) for request in waiting)

    def check_health(self) -> None:
        """Raises `EngineFailed` once a step has raised."""
        if self._failure is not None:
            raise self._failure

    async def open(self, request: Request, *, key: str = "") -> EngineStream:
        """`submit` a request after the engine's check. Also raises `RequestRefused`."""
        self._check_open()
        admitted_request = self._engine.admission.check(request)
        if request.grammar is not None:
            admitted_request = replace(admitted_request, guide=await self._compile(request))
        return self.submit(admitted_request, key=key)

    def submit(self, admitted_request: AdmittedRequest, *, key: str = "") -> EngineStream:
        """Queue a request that the engine's admission has checked; iterate over the stream or close it.

        Raises `ValueError` for an id that is being served, `TooManyRequests`, `Asleep` and `EngineFailed`.
        """
        self.check_health()
        self._check_open()
        stream = EngineStream(admitted_request, key, self._withdraw)
        if stream.request_id in self._streams:
            raise ValueError(f"request_id '{stream.request_id}' is used twice")
        if not self._has_room(key):
            raise TooManyRequests(f"{len(self._streams)} requests are running or waiting; try again later")
        self._streams[stream.request_id] = stream
        self._waiting.push(stream.key, stream)
        self._last_asked[key] = time.monotonic()
        self._last_asked.move_to_end(key)
        self._start()
        return stream

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs `function` on the engine, in its thread, between two steps; returns its result or raises its error."""
        self.check_health()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(function, result))
        self._start()
        return await result

    async def abort_all(self) -> int:
        """Ends every request that runs or waits, with its committed tokens and "abort"; returns their number."""
        waiting = [stream for stream in self._streams.values() if stream.waits]
        for stream in waiting:
            self._withdraw(stream)
            stream.queue.put_nowait(aborted_step(_nothing_of(stream.admitted_request.request)))
        steps = await self.call(Engine.abort_all)
        self._deliver_steps(steps)
        return len(waiting) + sum(s.output is not None and s.output.finish_reason == "abort" for s in steps)

    def _has_room(self, client: str) -> bool:
        if len(self._streams) < self._capacity:
            return True
        counts = Counter(stream.client for stream in self._streams.values())
        return has_room(counts, client, 1, capacity=self._capacity)

    def _check_open(self) -> None:
        if self.closed:
            raise Asleep("the server sleeps; ask again when it was woken up")

    async def stop(self) -> None:
        """End the task and the thread; streams that have not ended raise `EngineFailed`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(EngineFailed("the engine was stopped"))
        self._compile.stop()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _start(self) -> None:
        """Wake the task that steps the engine; the first call starts it."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")
        self._wake.set()

    def _withdraw(self, stream: EngineStream) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return
        del self._streams[stream.request_id]
        if stream.waits:
            self._waiting.remove(stream.key, stream)
        else:
            self._withdrawn.append(stream.request_id)
            self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        busy = False
        try:
            while True:
                if not (busy or self._waiting or self._withdrawn or self._calls):
                    self._wake.clear()
                    await self._wake.wait()
                turn = await loop.run_in_executor(self._thread, self._turn, self._next_visit())
                self._deliver(turn)
                busy, self._running, self._num_known = turn.busy, turn.running, turn.known
        except Exception as error:
            failure = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _next_visit(self) -> _Visit:
        """All calls and withdrawals, and the waiting requests that may enter the engine now."""
        max_rows, num_known = self._engine.config.max_rows, self._num_known - len(self._withdrawn)
        counts = Counter(stream.client for stream in self._streams.values() if not stream.waits)
        while self._last_asked and next(iter(self._last_asked.values())) < time.monotonic() - RECENT_SECONDS:
            self._last_asked.popitem(last=False)
        clients = counts.keys() | self._last_asked.keys()
        submitted: list[EngineStream] = []

        def may_enter(client: str) -> bool:
            several = clients | {client}
            if len(several) == 1 or num_known + len(submitted) < max_rows - max_rows // KEPT_ROWS:
                return True
            return counts[client] < max(1, max_rows // len(several))

        while num_known + len(submitted) <= max_rows and (stream := self._waiting.pop_of(may_enter)) is not None:
            stream.waits = False
            submitted.append(stream)
            counts[stream.client] += 1
        visit = _Visit(self._calls, self._withdrawn, [stream.admitted_request for stream in submitted])
        self._calls, self._withdrawn = [], []
        return visit

    def _turn(self, visit: _Visit) -> _Turn:
        """In the worker thread: abort the withdrawn requests, add the submitted requests, make the calls, and run one
        step."""
        engine = self._engine
        for request_id in visit.withdrawn:
            engine.abort(request_id)
        refusals: list[tuple[str, RequestRefused]] = []
        for admitted_request in visit.submitted:
            try:
                engine.add_admitted(admitted_request)
            except RequestRefused as refusal:  # its adapter was unloaded while it waited
                refusals.append((admitted_request.request.request_id, refusal))
        results: list[tuple[_Call, Any]] = []
        for call in visit.calls:
            try:
                results.append((call, call.function(engine)))
            except Exception as error:  # goes to the caller
                results.append((call, error))
        steps = engine.step() if engine.has_work else []
        return _Turn(steps, results, refusals, engine.num_running, engine.num_known, engine.has_work)

    def _deliver(self, turn: _Turn) -> None:
        for call, result in turn.results:
            if call.result.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                call.result.set_exception(result)
            else:
                call.result.set_result(result)
        for request_id, refusal in turn.refusals:
            refused = self._streams.get(request_id)
            if refused is not None and not refused.waits:
                refused.queue.put_nowait(refusal)
                del self._streams[request_id]
        self._deliver_steps(turn.steps)

    def _deliver_steps(self, steps: Sequence[StepOutput]) -> None:
        for step in steps:
            stream = self._streams.get(step.request_id)
            if stream is None or stream.waits:
                continue  # the request was withdrawn during the step, and its id may be in use again
            stream.queue.put_nowait(step)
            if step.output is not None:
                del self._streams[step.request_id]

    def _fail(self, failure: EngineFailed) -> None:
        if self._failure is None:
            self._failure = failure
        for stream in self._streams.values():
            stream.queue.put_nowait(failure)
        for call in self._calls:
            if not call.result.done():
                call.result.set_exception(failure)
        self._streams.clear()
        self._waiting.clear()
        self._calls.clear()


def _nothing_of(request: Request) -> Output:
    """The output of a request that the engine never knew."""
    num_tokens = request.num_generated(len(request.committed))
    return Output(
        request_id=request.request_id,
        finish_reason="abort",
        counts=Counts(num_prompt_tokens=len(request.prompt), num_tokens=num_tokens),
        piece=request.nothing,
        committed=request.committed,
    )
