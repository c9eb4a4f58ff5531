"""A stream goes on after its replica is lost: every token once, what was not committed decoded again."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from full_attention_folder import make_folder
from small_engines import EXPERTS, build
from step_replay import check_replay

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.serving.tokens.async_engine import AsyncEngine
from mbd_core.serving.tokens.load import load_engine
from mbd_core.serving.tokens.resumable import MAX_LOSSES, ResumingSource
from mbd_core.serving.tokens.stream import EngineFailed, ReplicaLost, TokenStream, TooManyRequests

LIMIT = 300


class DyingReplicas:
    """One engine in the place of many. The n-th call of `open` fails after `lives[n]` steps; later ones live.

    A life of 0 ends before the request is taken; `None` refuses it, as a replica does that is full.
    """

    def __init__(self, engine: AsyncEngine, lives: list[int | None]) -> None:
        self._engine, self._lives = engine, iter(lives)
        self.requests: list[Request] = []

    async def open(self, request: Request, *, key: str = "") -> "DyingStream":
        self.requests.append(request)
        life = next(self._lives, -1)
        if life is None:
            raise TooManyRequests("full")
        if life == 0:
            raise ReplicaLost("died before it took the request")
        return DyingStream(await self._engine.open(request, key=key), life)


class DyingStream:
    def __init__(self, stream: Any, life: int) -> None:
        self._stream, self._life = stream, life

    def __aiter__(self) -> "DyingStream":
        return self

    async def __anext__(self) -> StepOutput:
        if self._life == 0:
            self._stream.close()
            raise ReplicaLost("died")
        self._life -= 1
        return await anext(self._stream)

    def close(self) -> None:
        self._stream.close()


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    return Engine(load_model(tiny_model_dir), EngineConfig(max_rows=3, num_pages=128, batch_invariant=True))


def asked(**fields: Any) -> Request:
    decoding = DecodingConfig(block_size=4, buffer_size=fields.pop("buffer_size", 1), tau_m2t=0.9)
    settings = {"request_id": "r", "prompt": (20, 21, 22, 23, 24, 25), "max_tokens": 40, "ignore_eos": True}
    return Request(**settings | fields, decoding=decoding)


def steps_of(
    engine: Engine, request: Request, lives: list[int | None], *, retry_seconds: float = LIMIT
) -> tuple[list[StepOutput], DyingReplicas, int]:
    """The request's steps over dying replicas, the calls that were made, and how many losses were counted."""
    losses: list[None] = []

    async def scenario() -> tuple[list[StepOutput], DyingReplicas]:
        serving = AsyncEngine(engine)
        replicas = DyingReplicas(serving, lives)
        source = ResumingSource(replicas, retry_seconds=retry_seconds, on_loss=lambda: losses.append(None))
        try:
            async with asyncio.timeout(LIMIT):
                return [step async for step in await source.open(request)], replicas
        finally:
            await serving.stop()
            engine.abort(request.request_id)  # the engine is used again

    steps, replicas = asyncio.run(scenario())
    return steps, replicas, len(losses)


def output_of(steps: list[StepOutput]) -> Output:
    """The output, which agrees with the steps."""
    output = steps[-1].output
    assert output is not None
    assert all(step.output is None for step in steps[:-1])
    assert tuple(t for s in steps for t in s.piece.tokens) == output.tokens
    if output.piece.logprobs is not None:
        assert tuple(p for s in steps for p in s.piece.logprobs or ()) == output.piece.logprobs
    return output


@pytest.mark.parametrize(
    ("lives", "expected_losses"), [([1], 1), ([3], 1), ([0, 2, 1], 3), ([2, 2, 2], 3), ([2, None, 0], 1)]
)
def test_no_token_is_lost_or_repeated(engine: Engine, lives: list[int | None], expected_losses: int) -> None:
    request = asked(logprobs=True)
    whole = engine.generate([request])[0]
    steps, replicas, num_losses = steps_of(engine, request, lives)
    output = output_of(steps)
    assert (output.tokens, output.finish_reason) == (whole.tokens, whole.finish_reason)
    assert output.piece.logprobs == pytest.approx(whole.piece.logprobs, abs=1e-5)
    assert len(replicas.requests) == len(lives) + 1
    assert num_losses == expected_losses
    assert output.counts.num_tokens == 40
    assert output.counts.num_prompt_tokens == len(request.prompt)
    assert output.counts.num_forwards == whole.counts.num_forwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_count_what_an_earlier_replica_committed(engine: Engine, temperature: float) -> None:
    changes = {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_p": 0.01}
    drawn = Sampling(temperature=temperature, seed=7, logit_bias=((30, 4.0), (31, 3.5)), **changes)
    request = asked(sampling=drawn, min_tokens=20, logprobs=True, top_logprobs=3)
    whole = engine.generate([request])[0]
    plain = replace(request, sampling=Sampling(temperature=temperature, seed=7, logit_bias=drawn.logit_bias))
    assert whole.tokens != engine.generate([plain])[0].tokens
    steps, replicas, _ = steps_of(engine, request, [2, 3, 1])
    output = output_of(steps)
    assert len(replicas.requests) == 4 and output.tokens == whole.tokens and output.piece.tops is not None
    assert [[token for token, _ in each] for each in output.piece.tops] == [
        [t for t, _ in each] for each in whole.piece.tops or ()
    ]
    assert tuple(t for s in steps for t in s.piece.tops or ()) == output.piece.tops


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_a_drawn_answer_goes_on_with_its_seed_and_its_limits(engine: Engine, buffer_size: int) -> None:
    request = asked(sampling=Sampling(temperature=1.0, seed=7), buffer_size=buffer_size)
    steps, replicas, _ = steps_of(engine, request, [2, 1])
    output = output_of(steps)
    assert len(output.tokens) == 40
    for again in replicas.requests[1:]:
        assert again == replace(request, committed=again.committed, first_forward=again.first_forward)
        assert output.tokens[: len(again.committed)] == again.committed != ()
        assert again.first_forward > 0
    if buffer_size == 1:
        assert output.tokens == engine.generate([request])[0].tokens, "the noise goes on too"


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_frames_repeat_and_lose_no_committed_token(engine: Engine, buffer_size: int) -> None:
    """A frame shows what is not committed yet; another replica decodes that anew, with the same noise."""
    request = asked(sampling=Sampling(temperature=1.0, seed=7), buffer_size=buffer_size, frames=True, rollout=True)
    whole = engine.generate([request])[0]
    steps, replicas, num_losses = steps_of(engine, request, [1, 5, 4])
    output = output_of(steps)
    assert num_losses == 3 and len(output.tokens) == 40
    assert any(not step.commits for step in steps) and all(step.frame is not None for step in steps)
    handed_out = 0
    for step in steps:
        assert step.frame is not None
        ends = [step.frame.position + 4 * i + len(slot.tokens) for i, slot in enumerate(step.frame.slots)]
        assert step.frame.position <= handed_out <= ends[-1], "a frame begins where the committed text ends"
        handed_out += len(step.piece.tokens)
    if buffer_size == 1:
        assert (output.piece, output.tail) == (whole.piece, whole.tail), "the noise goes on too"
    assert all(again.frames for again in replicas.requests)


def test_an_answer_under_a_grammar_goes_on_inside_it(tiny_model_dir: Path) -> None:
    with load_engine(tiny_model_dir, EngineConfig(max_rows=3, num_pages=128)) as loaded:
        grammar = Grammar(syntax="json_schema", text='{"type": "array", "items": {"type": "string"}, "minItems": 2}')
        hot = Sampling(temperature=1.5, seed=3)
        request = asked(grammar=grammar, ignore_eos=False, sampling=hot, buffer_size=2)
        output = output_of(steps_of(loaded.engine, request, [3, 2, 4])[0])
        assert output.finish_reason == "stop" and len(output.tokens) < 40
        answer = json.loads(loaded.tokenizer.decode(list(output.tokens)))
        assert len(answer) >= 2 and all(isinstance(item, str) for item in answer)


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_a_step_map_over_lost_replicas_replays(engine: Engine, buffer_size: int) -> None:
    request = asked(sampling=Sampling(temperature=1.0, seed=7), buffer_size=buffer_size, rollout=True)
    output = output_of(steps_of(engine, request, [2, 1])[0])
    assert output.piece.steps is not None and len(output.piece.steps) == 40
    check_replay(engine.model, request, output)


def test_a_request_that_breaks_every_replica_ends(engine: Engine) -> None:
    with pytest.raises(EngineFailed, match=f"{MAX_LOSSES + 1}"):
        steps_of(engine, asked(), [1] * 10)


def test_where_no_replica_comes_back_the_request_ends_in_time(engine: Engine) -> None:
    with pytest.raises(EngineFailed):
        steps_of(engine, asked(), [1, *[None] * 1000], retry_seconds=0.3)


def test_a_refusal_at_first_is_the_client_s(engine: Engine) -> None:
    with pytest.raises(TooManyRequests):
        steps_of(engine, asked(), [None])


@pytest.fixture(scope="module")
def canvas_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_folder("llada", tmp_path_factory.mktemp("models") / "llada")
    return Engine(load_model(folder), EngineConfig(max_rows=2, num_pages=64, block_size=4))


def test_a_canvas_begins_anew_and_repeats_nothing(canvas_engine: Engine) -> None:
    decoding = DecodingConfig(block_size=4, canvas=Canvas(block_length=4, steps=24))
    request = replace(asked(), decoding=decoding, max_tokens=24)
    whole = canvas_engine.generate([request])[0]
    steps, replicas, _ = steps_of(canvas_engine, request, [3, 2])
    assert output_of(steps).tokens == whole.tokens
    assert replicas.requests == [request] * 3
    assert sum(bool(step.piece.tokens) for step in steps) > 3, "it hands out its tokens little by little"


def test_a_text_that_is_scored_begins_anew_and_has_all_its_scores(engine: Engine) -> None:
    template = (*range(30, 49), None)
    request = asked(template=template, max_tokens=len(template), scored=True)
    whole = engine.generate([request])[0]
    steps, replicas, _ = steps_of(engine, request, [3, 2])
    assert len(replicas.requests) == 3
    output = output_of(steps)
    assert (output.tokens, output.scores) == (whole.tokens, whole.scores)
    assert len(output.scores) == len(template)


def test_an_answer_whose_experts_are_recorded_begins_anew_and_has_one_record() -> None:
    engine = Engine(build(moe=EXPERTS), EngineConfig(max_rows=3, num_pages=128, batch_invariant=True))
    request = asked(rollout=True, experts=True, logprobs=True, top_logprobs=2)
    whole = engine.generate([request])[0]
    steps, replicas, _ = steps_of(engine, request, [3, 2])
    assert replicas.requests == [request] * 3
    output = output_of(steps)
    assert output.piece.steps is not None and whole.piece.steps is not None
    assert (output.piece, output.tail) == (whole.piece, whole.tail)
    assert sum((step.piece.steps or () for step in steps), ()) == output.piece.steps
    found, wanted = ([r.columns() for r in each.experts] for each in (output, whole))
    assert found == wanted and found


class OtherAnswers(DyingReplicas):
    """The second replica's answer differs from the first one's."""

    async def open(self, request: Request, *, key: str = "") -> Any:
        stream = await super().open(request, key=key)

        async def others() -> AsyncIterator[StepOutput]:
            async for step in stream:
                yield replace(step, piece=Piece(tokens=tuple(token + 1 for token in step.piece.tokens)))

        return stream if len(self.requests) == 1 else TokenStream(others(), stream.close)


def test_a_canvas_that_comes_out_otherwise_ends(canvas_engine: Engine) -> None:
    decoding = DecodingConfig(block_size=4, canvas=Canvas(block_length=4, steps=24))
    request = replace(asked(), decoding=decoding, max_tokens=24)

    async def scenario() -> None:
        serving = AsyncEngine(canvas_engine)
        replicas = OtherAnswers(serving, [3])
        try:
            async for _ in await ResumingSource(replicas, retry_seconds=LIMIT).open(request):
                pass
        finally:
            await serving.stop()
            canvas_engine.abort(request.request_id)

    with pytest.raises(EngineFailed):
        asyncio.run(scenario())


def test_a_request_that_its_client_leaves_is_no_loss() -> None:
    losses: list[None] = []
    looking = asyncio.Event()

    class Leaving:
        """Serve tells a client's leaving as a loss, before the task that reads the stream is cancelled."""

        calls = 0

        async def open(self, request: Request, *, key: str = "") -> Any:
            self.calls += 1
            if self.calls == 1:
                raise ReplicaLost("the request was cancelled")
            looking.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        source = ResumingSource(Leaving(), retry_seconds=LIMIT, on_loss=lambda: losses.append(None))
        reading = asyncio.create_task(source.open(asked()))
        await asyncio.wait_for(looking.wait(), LIMIT)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(scenario())
    assert losses == []
