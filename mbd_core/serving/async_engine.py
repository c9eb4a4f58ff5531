"""The engine behind asyncio: one task steps it in one worker thread, requests come and go between steps."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from mbd_core.decoding.request import StepOutput
from mbd_core.engine.admission import Admitted
from mbd_core.engine.engine import Engine
from mbd_core.serving.committed_text import CommittedText, Decode
from mbd_core.serving.text_stream import EngineFailed, TextStep, TextStream


class TooManyRequests(RuntimeError):
    """As many requests wait as may wait; try again later."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that were submitted and have not ended: those that hold a batch row, and those that wait for one."""

    running: int
    waiting: int


@dataclass(frozen=True)
class _Submission:
    """A stream and its requests, on their way to the engine."""

    stream: TextStream
    admitted: tuple[Admitted, ...]


@dataclass(frozen=True)
class _Turn:
    """What one visit to the worker thread brought back."""

    steps: list[TextStep]
    running: int
    busy: bool


class AsyncEngine:
    """Continuous batching for coroutines. All methods belong to one event loop; only `_turn` touches the engine.

    `decode` turns token ids into text (special tokens left out). At most `max_waiting` requests wait beside the
    engine's batch rows.
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
        self._submitted: list[_Submission] = []
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

    def submit(self, admitted: Sequence[Admitted], *, stop: Sequence[str] = ()) -> TextStream:
        """Queue requests that the engine's admission has checked, all or none; iterate over the stream or close it.

        Raises `ValueError` for ids that are used twice and for more requests than are ever taken at once,
        `TooManyRequests` and `EngineFailed`.
        """
        self.check_health()
        if not admitted:
            raise ValueError("no request was given")
        requests = [a.request for a in admitted]
        ids = {r.request_id for r in requests}
        if len(ids) < len(requests) or ids & self._streams.keys():
            raise ValueError("a request_id is used twice")
        if "" in stop:
            raise ValueError("stop holds an empty string; leave it out")
        if len(requests) > self._capacity:
            raise ValueError(f"{len(requests)} requests at once; at most {self._capacity} are taken")
        if len(self._streams) + len(requests) > self._capacity:
            raise TooManyRequests(f"{len(self._streams)} requests are running or waiting; try again later")
        stream = TextStream(requests, stop, self._withdraw)
        self._streams.update(dict.fromkeys(ids, stream))
        self._submitted.append(_Submission(stream, tuple(admitted)))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")
        self._wake.set()
        return stream

    async def stop(self) -> None:
        """End the task and the thread; streams that have not ended raise `EngineFailed`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(EngineFailed("the engine was stopped"))
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _withdraw(self, stream: TextStream) -> None:
        ids = [i for i in stream.unfinished if self._streams.get(i) is stream]
        for request_id in ids:
            del self._streams[request_id]
        waiting = [s for s in self._submitted if s.stream is not stream]
        if len(waiting) < len(self._submitted):  # the engine does not know it yet
            self._submitted = waiting
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
                self._deliver(turn.steps)
                busy, self._running = turn.busy, turn.running
        except Exception as error:
            failure = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _turn(self, submitted: list[_Submission], withdrawn: list[str]) -> _Turn:
        """In the worker thread: abort the withdrawn requests, add the submitted ones, then one step."""
        for request_id in withdrawn:
            self._engine.abort(request_id)
            self._texts.pop(request_id, None)
        for submission in submitted:
            for admitted in submission.admitted:
                self._engine.add_admitted(admitted)
                self._texts[admitted.request.request_id] = CommittedText(self._decode, submission.stream.stop)
        steps = [self._text_step(out) for out in self._engine.step()] if self._engine.has_work else []
        return _Turn(steps, self._engine.num_running, self._engine.has_work)

    def _text_step(self, out: StepOutput) -> TextStep:
        text = self._texts[out.request_id]
        pieces: list[str] = []
        num_earlier = text.num_tokens
        for token in out.new_tokens:
            pieces.append(text.push(token))
            if text.stopped:
                break
        output = out.output
        if output is not None:
            pieces.append(text.finish())
        if text.stopped:
            ended = output if output is not None else self._engine.abort(out.request_id)
            assert ended is not None, "the engine knows a request that took part in its step"
            output = replace(
                ended,
                tokens=ended.tokens[: text.num_tokens],
                finish_reason="stop",
                counts=replace(ended.counts, num_tokens=text.num_tokens),
                logprobs=None if ended.logprobs is None else ended.logprobs[: text.num_tokens],
            )
        if output is not None:
            del self._texts[out.request_id]
        num_new = text.num_tokens - num_earlier
        return TextStep(
            request_id=out.request_id,
            text="".join(pieces),
            new_tokens=out.new_tokens[:num_new],
            output=output,
            logprobs=None if out.logprobs is None else out.logprobs[:num_new],
        )

    def _deliver(self, steps: list[TextStep]) -> None:
        for step in steps:
            stream = self._streams.get(step.request_id)
            if stream is None or any(s.stream is stream for s in self._submitted):
                continue  # the request was withdrawn during the step, and its id may be in use again
            stream.queue.put_nowait(step)
            if step.output is not None:
                del self._streams[step.request_id]

    def _fail(self, failure: EngineFailed) -> None:
        if self._failure is None:
            self._failure = failure
        for stream in {id(s): s for s in self._streams.values()}.values():
            stream.queue.put_nowait(failure)
        self._streams.clear()
        self._submitted.clear()
