"""The engine behind asyncio: one task steps it in one worker thread, requests come and go between steps."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from mbd_core.decoding.request import Output, Request, StepOutput
from mbd_core.engine.engine import Engine
from mbd_core.serving.committed_text import CommittedText, Decode


class EngineFailed(RuntimeError):
    """A step raised, or the engine was stopped: nothing more will come from it."""


class TooManyRequests(RuntimeError):
    """As many requests wait as may wait; try again later."""


@dataclass(frozen=True, kw_only=True)
class TextStep:
    """What one step committed for one request; `output` is set with the last. Texts join to the whole answer.

    A request that met a stop string ends with finish_reason "stop"; its tokens, log-probabilities and counts then
    include the token that completed the stop string and none after it. `logprobs` goes with `new_tokens`, where the
    request asked for it.
    """

    request_id: str
    text: str
    new_tokens: tuple[int, ...]
    output: Output | None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests handed in and not done: those that hold a row of the engine, and those that wait for one."""

    running: int
    waiting: int


class TextStream:
    """The steps of one or several requests in the order they were made; iterate to the end, or `close()`."""

    def __init__(self, owner: "AsyncEngine", requests: Sequence[Request], stop: Sequence[str]) -> None:
        self.requests = tuple(requests)
        self.stop = tuple(stop)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue: asyncio.Queue[TextStep | EngineFailed] = asyncio.Queue()
        self.unfinished = {r.request_id for r in requests}
        self._owner = owner

    def __aiter__(self) -> AsyncIterator[TextStep]:
        return self

    async def __anext__(self) -> TextStep:
        if not self.unfinished:
            raise StopAsyncIteration
        step = await self.queue.get()
        if isinstance(step, EngineFailed):
            self.unfinished.clear()
            raise step
        if step.output is not None:
            self.unfinished.discard(step.request_id)
        return step

    def close(self) -> None:
        """Abort what has not finished; the engine frees it before its next step. Does nothing after the end."""
        self._owner._withdraw(self)
        self.unfinished.clear()


@dataclass(frozen=True)
class _Turn:
    """What one visit to the worker thread brought back."""

    rejected: dict[int, ValueError]
    steps: list[TextStep]
    running: int
    busy: bool


class AsyncEngine:
    """Continuous batching for coroutines. All methods belong to one event loop; only `_turn` touches the engine.

    `decode` turns token ids into text (special tokens left out). At most `max_waiting` requests wait beside the
    engine's rows.
    """

    def __init__(self, engine: Engine, decode: Decode, *, max_waiting: int = 256) -> None:
        self._engine = engine
        self._decode = decode
        self._capacity = engine.config.max_rows + max_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineFailed | None = None
        self._running = 0
        self._submitted: list[TextStream] = []
        self._withdrawn: list[str] = []
        self._streams: dict[str, TextStream] = {}
        self._texts: dict[str, CommittedText] = {}  # worker thread only

    @property
    def capacity(self) -> int:
        """Requests that may run and wait together."""
        return self._capacity

    @property
    def load(self) -> Load:
        """How busy the engine is, as of its last step."""
        return Load(running=self._running, waiting=max(0, len(self._streams) - self._running))

    def check_health(self) -> None:
        """Raises `EngineFailed` once a step has raised."""
        if self._failure is not None:
            raise self._failure

    async def submit(self, requests: Sequence[Request], *, stop: Sequence[str] = ()) -> TextStream:
        """Hand in requests, all or none; returns when the engine has accepted them.

        Raises `ValueError` for what the engine refuses, `TooManyRequests` and `EngineFailed`.
        """
        self.check_health()
        if not requests:
            raise ValueError("no request was given")
        ids = {r.request_id for r in requests}
        if len(ids) < len(requests) or ids & self._streams.keys():
            raise ValueError("a request_id is used twice")
        if "" in stop:
            raise ValueError("stop holds an empty string; leave it out")
        if len(requests) > self._capacity:
            raise ValueError(f"{len(requests)} requests at once; at most {self._capacity} are taken")
        if len(self._streams) + len(requests) > self._capacity:
            raise TooManyRequests(f"{len(self._streams)} requests are running or waiting; try again later")
        stream = TextStream(self, requests, stop)
        self._streams.update(dict.fromkeys(ids, stream))
        self._submitted.append(stream)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")
        self._wake.set()
        try:
            await stream.admitted
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    async def generate(self, request: Request, *, stop: Sequence[str] = ()) -> AsyncIterator[TextStep]:
        """One request's steps; leaving the iteration early, or being cancelled in it, aborts the request."""
        stream = await self.submit([request], stop=stop)
        try:
            async for step in stream:
                yield step
        finally:
            stream.close()

    async def stop(self) -> None:
        """End the task and the thread; whoever still waits gets `EngineFailed`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(EngineFailed("the engine was stopped"))
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _withdraw(self, stream: TextStream) -> None:
        ids = [i for i in stream.unfinished if self._streams.get(i) is stream]
        for request_id in ids:
            del self._streams[request_id]
        if stream in self._submitted:
            self._submitted.remove(stream)
        elif ids:
            self._withdrawn += ids
            self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        busy = False
        try:
            while True:
                if not (busy or self._submitted or self._withdrawn):
                    self._wake.clear()
                    await self._wake.wait()
                submitted, self._submitted = self._submitted, []
                withdrawn, self._withdrawn = self._withdrawn, []
                turn = await loop.run_in_executor(self._thread, self._turn, submitted, withdrawn)
                self._deliver(submitted, turn)
                busy, self._running = turn.busy, turn.running
        except Exception as error:
            failure = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _turn(self, submitted: list[TextStream], withdrawn: list[str]) -> _Turn:
        """In the worker thread: let requests leave and join, then one step."""
        for request_id in withdrawn:
            self._engine.abort(request_id)
            self._texts.pop(request_id, None)
        rejected: dict[int, ValueError] = {}
        for index, stream in enumerate(submitted):
            try:
                for request in stream.requests:
                    self._engine.validate(request)
            except ValueError as error:
                rejected[index] = error
                continue
            for request in stream.requests:
                self._engine.add(request)
                self._texts[request.request_id] = CommittedText(self._decode, stream.stop)
        steps = [self._text_step(out) for out in self._engine.step()] if self._engine.has_work else []
        return _Turn(rejected, steps, self._engine.num_running, self._engine.has_work)

    def _text_step(self, out: StepOutput) -> TextStep:
        text = self._texts[out.request_id]
        pieces: list[str] = []
        before = text.num_tokens
        for token in out.new_tokens:
            pieces.append(text.push(token))
            if text.stopped:
                break
        output = out.output
        if output is not None:
            pieces.append(text.finish())
        if text.stopped:
            ended = output if output is not None else self._engine.abort(out.request_id)
            assert ended is not None, "a request that made a step is known to the engine"
            output = replace(
                ended,
                tokens=ended.tokens[: text.num_tokens],
                finish_reason="stop",
                counts=replace(ended.counts, num_tokens=text.num_tokens),
                logprobs=None if ended.logprobs is None else ended.logprobs[: text.num_tokens],
            )
        if output is not None:
            del self._texts[out.request_id]
        told = text.num_tokens - before
        return TextStep(
            request_id=out.request_id,
            text="".join(pieces),
            new_tokens=out.new_tokens[:told],
            output=output,
            logprobs=None if out.logprobs is None else out.logprobs[:told],
        )

    def _deliver(self, submitted: list[TextStream], turn: _Turn) -> None:
        for index, stream in enumerate(submitted):
            if index in turn.rejected:
                for request_id in stream.unfinished:
                    del self._streams[request_id]
                stream.unfinished.clear()
            if stream.admitted.done():
                continue  # cancelled meanwhile
            if index in turn.rejected:
                stream.admitted.set_exception(turn.rejected[index])
            else:
                stream.admitted.set_result(None)
        for step in turn.steps:
            stream_or_none = self._streams.get(step.request_id)
            if stream_or_none is None or stream_or_none in self._submitted:
                continue  # closed meanwhile, and its id perhaps handed in anew
            stream_or_none.queue.put_nowait(step)
            if step.output is not None:
                del self._streams[step.request_id]

    def _fail(self, failure: EngineFailed) -> None:
        if self._failure is None:
            self._failure = failure
        for stream in {id(s): s for s in self._streams.values()}.values():
            if not stream.admitted.done():
                stream.admitted.set_exception(failure)
            stream.queue.put_nowait(failure)
        self._streams.clear()
        self._submitted.clear()
