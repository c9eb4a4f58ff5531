"""Times and ends of requests as an API's clients see them, with a clock that the test moves."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import FinishReason, Output, Request
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.server.measures import NO_MODEL, RequestMeasures, RequestWatch, ServerMeasures
from mbd_core.serving.server.text_stream import TextStep
from mbd_core.serving.tokens.stream import EngineFailed, RequestTimedOut, TooManyRequests


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def measures(time: Time) -> ServerMeasures:
    return ServerMeasures(["tiny"], clock=time)


def choice(name: str, prompt: int = 3) -> Request:
    return Request(
        request_id=name, prompt=(5,) * prompt, max_tokens=9, decoding=DecodingConfig(block_size=4, buffer_size=1)
    )


def accepted(measures: ServerMeasures, *names: str) -> tuple[RequestWatch, RequestMeasures]:
    watch = measures.on_arrival()
    watch.on_model("tiny")
    watch.on_accepted([choice(name) for name in names])
    return watch, measures.by_model["tiny"]


def test_a_body_s_way_is_no_latency(measures: ServerMeasures, time: Time) -> None:
    watch = measures.on_arrival()
    time.now += 30
    watch.on_body()
    watch.on_model("tiny")
    watch.on_accepted([choice("a")])
    time.now += 2
    watch.on_tokens("a", 4)
    assert measures.by_model["tiny"].time_to_first_token.take() == [2.0]


def test_the_tokens_of_a_commit_share_their_arrival(measures: ServerMeasures, time: Time) -> None:
    watch, tiny = accepted(measures, "a")
    time.now += 2
    watch.on_tokens("a", 0)  # a step without tokens is no arrival
    time.now += 1
    watch.on_tokens("a", 4)
    time.now += 0.5
    watch.on_tokens("a", 4)
    time.now += 1.5
    watch.on_tokens("a", 1)
    watch.on_end("a", "length")
    watch.on_close()
    assert tiny.time_to_first_token.take() == [3.0]
    assert tiny.inter_token_latency.take() == [0.5, 1.5]
    assert tiny.time_per_output_token.take() == [2.0 / 8]
    assert tiny.end_to_end.take() == [5.0]
    assert (tiny.prompt_tokens, tiny.generation_tokens) == (3, 9)
    assert (tiny.finished, tiny.aborted, tiny.errors) == (Counter(length=1), 0, Counter())


def test_one_commit_has_no_gap_and_one_token_has_no_time_per_token(measures: ServerMeasures) -> None:
    watch, tiny = accepted(measures, "block", "token", "nothing")
    watch.on_tokens("block", 4)
    watch.on_tokens("token", 1)
    for name in ("block", "token", "nothing"):
        watch.on_end(name, "stop")
    assert tiny.time_per_output_token.take() == [0.0]
    assert tiny.inter_token_latency.take() == []
    assert len(tiny.time_to_first_token.take()) == 2  # the first token of a choice that had none never came
    assert len(tiny.end_to_end.take()) == 3
    assert tiny.finished == Counter(stop=3)


def test_who_leaves_aborts_the_choices_that_have_not_ended(measures: ServerMeasures) -> None:
    watch, tiny = accepted(measures, "a", "b", "c")
    watch.on_end("a", "stop")
    watch.on_close()
    watch.on_close()
    assert (tiny.aborted, tiny.finished) == (2, Counter(stop=1))
    early = measures.on_arrival()  # it leaves while its prompt is being tokenised
    early.on_model("tiny")
    early.on_error(asyncio.CancelledError())
    assert tiny.aborted == 3
    assert not tiny.errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError(404, "unknown model"), 404),
        (TooManyRequests("full"), 429),
        (RequestTimedOut("late"), 504),
        (EngineFailed("gone"), 500),
        (KeyError("ours"), 500),
    ],
)
def test_an_error_counts_once_with_its_status(measures: ServerMeasures, error: Exception, status: int) -> None:
    unknown = measures.on_arrival()
    unknown.on_error(error)
    assert measures.by_model[NO_MODEL].errors == Counter({status: 1})
    watch, tiny = accepted(measures, "a", "b")
    watch.on_error(error)
    watch.on_error(error)
    watch.on_close()
    assert (tiny.errors, tiny.aborted, tiny.finished) == (Counter({status: 1}), 0, Counter())


class Steps:
    """Stands for a `TextStream`: gives out steps or raises an error, and is closed once."""

    def __init__(self, *steps: TextStep | Exception) -> None:
        self.requests, self.closed = (choice("a", prompt=7),), False
        self._steps = iter(steps)

    def __aiter__(self) -> "Steps":
        return self

    async def __anext__(self) -> TextStep:
        step = next(self._steps, None)
        if step is None:
            raise StopAsyncIteration
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.closed = True


def step(tokens: int, reason: FinishReason | None = None) -> TextStep:
    counts = Counts(
        num_prompt_tokens=7,
        num_tokens=8,
        num_forwards=3,
        num_store_forwards=0,
        num_prefill_forwards=0,
        decode_seconds=1.0,
    )
    output = None
    if reason is not None:
        output = Output(request_id="a", finish_reason=reason, counts=counts, piece=Piece(tokens=(5,) * 8))
    return TextStep(request_id="a", text="x", piece=Piece(tokens=(5,) * tokens), output=output)


def read(measures: ServerMeasures, steps: Steps) -> list[Any]:
    watch = measures.on_arrival()
    watch.on_model("tiny")

    async def all_steps() -> list[Any]:
        watch.on_accepted(steps.requests)
        try:
            return [step async for step in watch.steps(steps)]  # type: ignore[arg-type]
        finally:
            watch.on_close()
            steps.close()

    return asyncio.run(all_steps())


def test_a_measured_stream_is_the_stream(measures: ServerMeasures) -> None:
    steps = [step(4), step(4, "stop")]
    source = Steps(*steps)
    assert read(measures, source) == steps
    tiny = measures.by_model["tiny"]
    assert source.closed
    assert (tiny.prompt_tokens, tiny.generation_tokens) == (7, 8)
    assert (tiny.finished, tiny.aborted, tiny.errors) == (Counter(stop=1), 0, Counter())


def test_a_stream_that_fails_is_an_error_and_no_abort(measures: ServerMeasures) -> None:
    with pytest.raises(EngineFailed):
        read(measures, source := Steps(step(4), EngineFailed("gone")))
    tiny = measures.by_model["tiny"]
    assert source.closed
    assert (tiny.errors, tiny.aborted, tiny.generation_tokens) == (Counter({500: 1}), 0, 4)
