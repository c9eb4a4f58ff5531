"""Timed runs of a single configuration, without other requests."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from mbd_core.batch.answer_ends import Stops, output_at
from mbd_core.batch.decoding import DecodingModel, ModelRefused, sample_requests, sample_stops
from mbd_core.batch.rows import TIMED_COLUMNS, TimedRow
from mbd_core.batch.timed_cases import TimedCase
from mbd_core.checkpoint.chat import decode_text
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused

ALONE, TOGETHER = "alone", "together"


@dataclass(frozen=True)
class TimedOutput:
    """An output, with the times at which the engine got the request and gave the answer."""

    output: Output
    begun: float
    ended: float


def run_timed(
    model: DecodingModel,
    requests: Sequence[Request],
    *,
    stops: Stops,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[TimedOutput]:
    """Serves requests, `concurrency` at a time: when a request ends, by itself or at a stop string, the engine gets
    the next request. Yields the outputs in the order in which the requests end."""
    engine, decode = model.engine, partial(decode_text, model.tokenizer)
    waiting, starts, answers = deque(requests), dict[str, float](), dict[str, Piece]()
    while waiting or starts:
        while waiting and len(starts) < concurrency:
            request = waiting.popleft()
            starts[request.request_id], answers[request.request_id] = clock(), request.nothing
            engine.add(request)
        for step in engine.step():
            if step.request_id not in starts:
                continue  # the step after an abort
            answers[step.request_id] += step.piece
            output = output_at(step, answers[step.request_id], stops.get(step.request_id, ()), decode)
            if output is not None:
                if step.output is None:
                    engine.abort(step.request_id)
                yield TimedOutput(output, starts.pop(step.request_id), clock())
    while engine.has_work:
        engine.step()  # ends the step of aborted requests


def timing_engine(engine: EngineConfig, buffer_size: int, *, concurrency: int) -> EngineConfig:
    """The configuration of the engine that times cases of one buffer size: the sweep's, with a batch row for each
    request under way and no prefix cache."""
    return replace(engine, buffer_size=buffer_size, max_rows=concurrency, prefix_caching=False)


class TimedStage:
    """Times cases, with an engine of the case's own buffer size, `concurrency` batch rows and no prefix cache.

    `load` loads a model by its name for a buffer size; its `ValueError` becomes a `ModelRefused`. An engine is kept
    while the next case has the same model and buffer size.
    """

    def __init__(
        self,
        load: Callable[[str, int], DecodingModel],
        *,
        concurrency: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._load, self._concurrency, self._clock = load, concurrency, clock
        self._model_in_use: tuple[tuple[str, int], DecodingModel] | None = None

    def __call__(self, case: TimedCase, *, left_out: Collection[int] = ()) -> pa.Table:
        """A row (`TIMED_COLUMNS`) for every request of both runs. Requests that the model cannot serve are left out,
        and so are the samples `left_out`.

        If the engine fails, the result is one row with the error, and the engine is closed: its state is unknown.
        """
        model = self._model(case.model, case.buffer_size)
        try:
            return pa.Table.from_pylist(self._rows(model, case, left_out), schema=TIMED_COLUMNS)
        except Exception as error:
            planned = {name: case.rows[0].get(name) for name in TIMED_COLUMNS.names}
            row = {**planned, "error": f"{type(error).__name__}: {error}"}
        del model
        self.close()
        return pa.Table.from_pylist([row], schema=TIMED_COLUMNS)

    def _rows(self, model: DecodingModel, case: TimedCase, left_out: Collection[int]) -> list[TimedRow]:
        """Both runs, after a warm-up with the first request alone and with `concurrency` requests together."""
        requests, stops = sample_requests(model, case.rows), sample_stops(case.rows)
        served = {
            number: request
            for number, request in enumerate(requests)
            if isinstance(request, Request)
            and case.rows[number]["sample"] not in left_out
            and _is_served(model.engine, request)
        }
        lone_requests = [request for number, request in served.items() if number < case.num_alone]
        at_once = list(served.values())
        if at_once and not at_once[0].decoding.in_buffer:  # the model's own graphs may be of another method
            model.engine.prepare(at_once[0].decoding)
        for warm_up, concurrency in ((lone_requests[:1], 1), (at_once[: self._concurrency], self._concurrency)):
            list(run_timed(model, warm_up, stops=stops, concurrency=concurrency))
        rows: list[TimedRow] = []
        problems = {str(row["sample"]): row for row in case.rows}
        for run, run_requests, concurrency in (
            (ALONE, lone_requests, 1),
            (TOGETHER, at_once, min(self._concurrency, len(at_once))),
        ):
            for timed_output in run_timed(
                model, run_requests, stops=stops, concurrency=concurrency, clock=self._clock
            ):
                row, counts = problems[timed_output.output.request_id], timed_output.output.counts
                rows.append(
                    {
                        "model": row["model"],
                        "method": row["method"],
                        "task": row["task"],
                        "config": row["config"],
                        "problem_id": row["problem_id"],
                        "run": run,
                        "concurrency": concurrency,
                        "num_tokens": counts.num_tokens,
                        "num_forwards": counts.num_forwards,
                        "decode_seconds": counts.decode_seconds,
                        "begun": timed_output.begun,
                        "ended": timed_output.ended,
                        "error": None,
                    }
                )
        return rows

    def close(self) -> None:
        """Close and drop the engine."""
        if self._model_in_use is not None:
            (_, model), self._model_in_use = self._model_in_use, None
            model.engine.close()

    def _model(self, name: str, buffer_size: int) -> DecodingModel:
        if self._model_in_use is None or self._model_in_use[0] != (name, buffer_size):
            self.close()
            try:
                self._model_in_use = ((name, buffer_size), self._load(name, buffer_size))
            except ValueError as error:
                raise ModelRefused(f"model '{name}': {error}") from error
        return self._model_in_use[1]


def _is_served(engine: Engine, request: Request) -> bool:
    try:
        engine.admission.check(request)
    except RequestRefused:
        return False
    return True
