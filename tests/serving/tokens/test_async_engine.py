"""The engine behind asyncio: the same tokens as without it, exact stop strings, no request left behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_adapter

from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.config import load_config
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.api.engine_requests import committed_texts
from mbd_core.serving.server import text_stream
from mbd_core.serving.server.text_stream import ClientPlaces, TextStep, TextStream
from mbd_core.serving.text.committed import BROKEN
from mbd_core.serving.tokens.async_engine import AsyncEngine
from mbd_core.serving.tokens.load import LoadedModel, load_engine
from mbd_core.serving.tokens.stream import EngineFailed, RequestTimedOut, TimeLimit, TooManyRequests

LIMIT = 300  # seconds for what ends by itself, however busy the machine is
PROMPTS = ["Tom has 3 apples.", "def add(a, b):", "漢字 é <|mask|> 7", "a", "How many are left if 12 go and 5 stay?"]


@pytest.fixture
def loaded(tiny_model_dir: Path) -> LoadedModel:
    return load_engine(tiny_model_dir, EngineConfig(max_rows=3, num_pages=128))


def request(loaded: LoadedModel, name: str, prompt: str = "Tom has 3", **fields: Any) -> Request:
    """A request that runs to its budget (`ignore_eos`); `decoding` fields go by their names."""
    max_tokens, sampling = fields.pop("max_tokens", 24), fields.pop("sampling", Sampling())
    logprobs = fields.pop("logprobs", False)
    return Request(
        request_id=name,
        prompt=tuple(loaded.tokenizer.encode(prompt)),
        max_tokens=max_tokens,
        decoding=loaded.decoding(fields),
        sampling=sampling,
        ignore_eos=True,
        logprobs=logprobs,
    )


def decode(loaded: LoadedModel) -> Callable[[list[int]], str]:
    return partial(decode_text, loaded.tokenizer)


@asynccontextmanager
async def running(loaded: LoadedModel, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(loaded.engine, **options)
    try:
        yield engine
    finally:
        await engine.stop()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT))


async def submit(
    loaded: LoadedModel, engine: AsyncEngine, *requests: Request, stop: tuple[str, ...] = (), **options: Any
) -> TextStream:
    texts = committed_texts(requests, decode(loaded), stop)
    return await TextStream.open(engine, requests, texts=texts, **options)


async def generate(
    loaded: LoadedModel, engine: AsyncEngine, asked: Request, *, stop: tuple[str, ...] = ()
) -> AsyncIterator[TextStep]:
    """One request's steps; leaving the iteration early, or being cancelled in it, closes its stream."""
    stream = await submit(loaded, engine, asked, stop=stop)
    try:
        async for step in stream:
            yield step
    finally:
        stream.close()


async def collect(
    loaded: LoadedModel, engine: AsyncEngine, made: Request, *, stop: tuple[str, ...] = ()
) -> tuple[str, Output]:
    steps: list[TextStep] = [s async for s in generate(loaded, engine, made, stop=stop)]
    output = steps[-1].output
    assert output is not None
    assert tuple(t for s in steps for t in s.piece.tokens) == output.tokens
    if made.logprobs:
        assert tuple(p for s in steps for p in s.piece.logprobs or ()) == output.piece.logprobs
        assert all(len(s.piece.tokens) == len(s.piece.logprobs or ()) for s in steps)
    else:
        assert {s.piece.logprobs for s in steps} == {output.piece.logprobs} == {None}
    return "".join(s.text for s in steps), output


async def idle(loaded: LoadedModel, engine: AsyncEngine) -> None:
    """Wait until the engine has nothing left, then check that nothing is lost."""
    while loaded.engine.has_work or engine.load.running:
        await asyncio.sleep(0.01)
    assert not loaded.engine.has_work
    loaded.engine.check_integrity()
    assert loaded.engine.scheduler.pool.num_free == loaded.engine.scheduler.pool.capacity


def test_concurrent_requests_equal_each_alone(loaded: LoadedModel) -> None:
    made = [request(loaded, f"r{i}", p, max_tokens=9 + 5 * i, buffer_size=1 + i % 4) for i, p in enumerate(PROMPTS)]
    alone = [loaded.engine.generate([r])[0] for r in made]

    async def scenario() -> list[tuple[str, Output]]:
        async with running(loaded) as engine:
            answers = await asyncio.gather(*(collect(loaded, engine, r) for r in made))
            await idle(loaded, engine)
            return answers

    for (text, output), wanted in zip(run(scenario()), alone, strict=True):
        assert (output.tokens, output.finish_reason) == (wanted.tokens, wanted.finish_reason)
        assert output.counts.num_forwards == wanted.counts.num_forwards
        assert text == decode(loaded)(list(wanted.tokens)).rstrip(BROKEN)


def test_a_stop_string_ends_the_request_in_the_engine(loaded: LoadedModel) -> None:
    long = request(loaded, "r", max_tokens=200)
    whole = loaded.engine.generate([long])[0]
    text = decode(loaded)(list(whole.tokens))
    stop = text[len(text) // 2 :][:3]

    async def scenario() -> tuple[str, Output]:
        async with running(loaded) as engine:
            answer = await collect(loaded, engine, long, stop=(stop,))
            await idle(loaded, engine)
            return answer

    got, output = run(scenario())
    assert got == text[: text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.tokens == whole.tokens[: len(output.tokens)]
    assert output.counts.num_tokens == len(output.tokens) < 200
    assert output.counts.num_forwards < whole.counts.num_forwards
    assert stop in decode(loaded)(list(output.tokens))
    assert stop not in decode(loaded)(list(output.tokens[:-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_come_with_their_tokens_up_to_the_stop(loaded: LoadedModel, temperature: float) -> None:
    long = request(
        loaded, "r", max_tokens=80, logprobs=True, sampling=Sampling(temperature=temperature, top_k=40, seed=5)
    )
    whole = loaded.engine.generate([long])[0]
    text = decode(loaded)(list(whole.tokens))
    stop = text[len(text) // 2 :][:3]

    async def scenario() -> tuple[Output, Output]:
        async with running(loaded) as engine:
            (_, free), (_, stopped) = [await collect(loaded, engine, long, stop=s) for s in ((), (stop,))]
            return free, stopped

    free, stopped = run(scenario())
    assert whole.piece.logprobs is not None
    assert len(whole.piece.logprobs) == len(whole.tokens) == 80
    assert free.piece.logprobs == pytest.approx(whole.piece.logprobs, abs=1e-5)
    assert stopped.piece.logprobs == pytest.approx(whole.piece.logprobs[: len(stopped.tokens)], abs=1e-5)
    assert 0 < len(stopped.tokens) < 80


def test_leaving_frees_the_request(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded) as engine:
            long = [request(loaded, f"r{i}", max_tokens=400, tau_m2t=1.0, buffer_size=1) for i in range(5)]
            tasks = [asyncio.create_task(collect(loaded, engine, r)) for r in long]
            leaver = generate(loaded, engine, request(loaded, "leaver", max_tokens=400))
            while engine.load.running < 3:
                await asyncio.sleep(0.01)
            assert engine.load.waiting > 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await anext(leaver)
            await leaver.aclose()
            await idle(loaded, engine)
            _, output = await collect(loaded, engine, request(loaded, "after"))
            assert output.finish_reason == "length"

    run(scenario())


def test_the_loop_goes_on_during_a_step_and_one_thread_touches_the_engine(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    turned = threading.Event()
    for name in ("add_admitted", "abort", "step"):
        method = getattr(loaded.engine, name)

        def watched(*args: Any, method: Callable[..., Any] = method, name: str = name) -> Any:
            threads.add(threading.get_ident())
            if name == "step":
                assert turned.wait(LIMIT), "the event loop stood still during a step"
            return method(*args)

        monkeypatch.setattr(loaded.engine, name, watched)

    async def scenario() -> None:
        async with running(loaded) as engine:
            answers = [asyncio.create_task(collect(loaded, engine, request(loaded, f"r{i}"))) for i in range(4)]
            await asyncio.sleep(0.1)
            turned.set()
            answers.pop().cancel()
            await asyncio.gather(*answers)
            await idle(loaded, engine)

    run(scenario())
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_failing_step_reaches_every_caller(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps_left = loaded.engine.step, [3]

    def failing() -> Any:
        steps_left[0] -= 1
        if steps_left[0] < 0:
            raise MemoryError("no memory left")
        return step()

    monkeypatch.setattr(loaded.engine, "step", failing)

    async def scenario() -> None:
        async with running(loaded) as engine:
            engine.check_health()
            made = [request(loaded, f"r{i}", max_tokens=300, tau_m2t=1.0) for i in range(5)]
            failures = await asyncio.gather(*(collect(loaded, engine, r) for r in made), return_exceptions=True)
            assert [type(f) for f in failures] == [EngineFailed] * 5
            assert "no memory left" in str(failures[0])
            with pytest.raises(EngineFailed):
                engine.check_health()
            with pytest.raises(EngineFailed):
                await submit(loaded, engine, request(loaded, "late"))

    run(scenario())


def test_stopping_releases_who_waits(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(loaded.engine)
        long = request(loaded, "r", max_tokens=400, tau_m2t=1.0, buffer_size=1)
        waiting = asyncio.create_task(collect(loaded, engine, long))
        await asyncio.sleep(0.05)
        await engine.stop()
        with pytest.raises(EngineFailed):
            await waiting

    run(scenario())


def test_a_group_is_taken_whole_or_not_at_all(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded, max_waiting=1) as engine:
            good, bad = request(loaded, "good"), request(loaded, "bad", max_tokens=5000)
            with pytest.raises(ValueError, match="5000"):
                await submit(loaded, engine, good, bad)
            await idle(loaded, engine)
            with pytest.raises(ValueError, match="twice"):
                await submit(loaded, engine, good, good)
            await idle(loaded, engine)
            full = await submit(
                loaded, engine, *[request(loaded, f"r{i}", max_tokens=300, tau_m2t=1.0) for i in range(4)]
            )
            with pytest.raises(TooManyRequests):
                await submit(loaded, engine, good)
            full.close()
            _, output = await collect(loaded, engine, good)
            assert output.counts.num_tokens == 24

    run(scenario())


def test_clients_take_turns_where_requests_wait(loaded: LoadedModel) -> None:
    """A crowd of one client's requests was there first; another client's one request does not wait for all of it."""
    ended: list[str] = []

    async def ask(engine: AsyncEngine, name: str, key: str) -> None:
        stream = await submit(loaded, engine, request(loaded, name, max_tokens=8), key=key)
        async for _ in stream:
            pass
        ended.append(name)

    async def scenario() -> None:
        async with running(loaded) as engine:
            crowd = [asyncio.create_task(ask(engine, f"crowd{i}", "one")) for i in range(20)]
            await asyncio.sleep(0)
            await asyncio.gather(*crowd, ask(engine, "single", "other"))

    run(scenario())
    assert len(ended) == 21
    assert ended.index("single") < 10, ended


def test_the_groups_of_one_client_take_turns_too(loaded: LoadedModel) -> None:
    """Where all are one client, a request of one choice does not wait for all choices of those before it."""
    ended: list[str] = []

    async def ask(engine: AsyncEngine, name: str) -> None:
        async for _ in await submit(loaded, engine, request(loaded, name, max_tokens=8)):
            pass
        ended.append(name)

    async def scenario() -> None:
        async with running(loaded) as engine:
            names = [f"{body}-{choice}" for body in ("many", "more") for choice in range(12)]
            crowd = [asyncio.create_task(ask(engine, name)) for name in names]
            await asyncio.sleep(0)
            await asyncio.gather(*crowd, ask(engine, "single-0"))

    run(scenario())
    assert len(ended) == 25
    assert ended.index("single-0") < 12, ended


def test_a_client_that_fills_the_queue_keeps_no_other_out(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded, max_waiting=5) as engine:  # beside three rows
            long = [request(loaded, f"long-{i}", max_tokens=300, tau_m2t=1.0) for i in range(8)]
            full = await submit(loaded, engine, *long, key="one")
            with pytest.raises(TooManyRequests):
                await submit(loaded, engine, request(loaded, "more-0"), key="one")
            share = [request(loaded, f"other-{i}", max_tokens=300, tau_m2t=1.0) for i in range(4)]
            others = await submit(loaded, engine, *share, key="other")
            with pytest.raises(TooManyRequests):
                await submit(loaded, engine, request(loaded, "more-1"), key="other")
            full.close()
            others.close()
            await idle(loaded, engine)

    run(scenario())


def test_rows_are_kept_for_a_client_that_asked_lately(tiny_model_dir: Path) -> None:
    """Alone a client has all rows; beside another one, half of them waits for whoever has less."""
    loaded = load_engine(tiny_model_dir, EngineConfig(max_rows=8, num_pages=600))

    def long(name: str, number: int) -> list[Request]:
        return [request(loaded, f"{name}-{i}", max_tokens=400, tau_m2t=1.0, buffer_size=1) for i in range(number)]

    async def running_rows(engine: AsyncEngine, number: int) -> None:
        while engine.load.running < number:
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with running(loaded) as engine:
            crowd = await submit(loaded, engine, *long("alone", 20), key="crowd")
            await running_rows(engine, 8)
            crowd.close()
            await collect_of(engine, "first")
            crowd = await submit(loaded, engine, *long("beside", 20), key="crowd")
            await running_rows(engine, 4)
            for _ in range(5):
                await engine.call(lambda _: None)  # a step each
                assert engine.load.running == 4
            await collect_of(engine, "second")
            assert len(crowd.unfinished) == 20, "nobody's end was waited for"
            crowd.close()
            await idle(loaded, engine)

    async def collect_of(engine: AsyncEngine, name: str) -> None:
        async for _ in await submit(loaded, engine, request(loaded, name, max_tokens=8), key="bystander"):
            pass

    run(scenario())


def test_a_call_runs_between_steps_in_the_engine_s_thread(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded) as engine:
            answer = asyncio.create_task(collect(loaded, engine, request(loaded, "r", max_tokens=60)))
            name = await engine.call(lambda inner: (threading.current_thread().name, inner is loaded.engine))
            assert name[0].startswith("engine") and name[1]
            with pytest.raises(KeyError):
                await engine.call(lambda _: {}["mine"])
            assert (await answer)[1].counts.num_tokens == 60, "a call that fails is its caller's own"

    run(scenario())


def test_the_time_limit_ends_a_request_that_runs_and_one_that_waits(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded) as engine:
            for _ in range(2):
                long = [request(loaded, f"r{i}", max_tokens=400, tau_m2t=1.0, buffer_size=1) for i in range(4)]
                stream = await submit(loaded, engine, *long, limit=TimeLimit(0.2))
                with pytest.raises(RequestTimedOut):
                    async for _ in stream:
                        pass
                await idle(loaded, engine)

    run(scenario())


def test_an_adapter_that_goes_while_a_request_waits_refuses_that_request_alone(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The engine fails no other request, and serves on."""
    folder = write_adapter(tmp_path / "adapter", load_config(tiny_model_dir), seed=1)
    config = EngineConfig(max_rows=1, num_pages=64, max_adapters=1)
    loaded = load_engine(tiny_model_dir, config, adapters={"tuned": folder})

    async def scenario() -> None:
        async with running(loaded) as engine:
            first = [request(loaded, f"r{i}", max_tokens=60, tau_m2t=1.0) for i in range(2)]
            streams = [await submit(loaded, engine, one) for one in first]
            waiting = await submit(loaded, engine, replace(request(loaded, "late"), adapter="tuned"))
            await engine.call(lambda inner: inner.unload_adapter("tuned"))
            with pytest.raises(RequestRefused, match="tuned"):
                async for _ in waiting:
                    pass
            for stream in streams:
                *_, last = [step async for step in stream]
                assert last.output is not None and last.output.counts.num_tokens == 60
            await idle(loaded, engine)

    run(scenario())


def test_a_client_s_choices_beyond_its_places_wait_outside_the_engine(loaded: LoadedModel) -> None:
    """Their answers are those of the engine that knows them all; who leaves gives its places back."""

    async def scenario() -> None:
        async with running(loaded) as engine:
            asked = [request(loaded, f"n{number}", max_tokens=8) for number in range(7)]
            places, known = ClientPlaces(2), []
            whole = await submit(loaded, engine, *asked)
            expected = {s.request_id: s.output async for s in whole if s.output is not None}
            stream = await submit(loaded, engine, *asked, key="a", places=places)
            ends = {}
            async for step in stream:
                known.append(engine.load.running + engine.load.waiting)
                if step.output is not None:
                    ends[step.request_id] = step.output
            assert max(known) <= 2
            assert {name: end.tokens for name, end in ends.items()} == {n: e.tokens for n, e in expected.items()}
            left = await submit(loaded, engine, *asked, key="a", places=places)
            left.close()
            other = await submit(loaded, engine, request(loaded, "late", max_tokens=8), key="a", places=places)
            assert [step.output async for step in other][-1] is not None
            await idle(loaded, engine)

    run(scenario())


def test_choices_after_the_first_wait_where_the_engine_is_full(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_stream, "AGAIN_SECONDS", 0.01)

    async def scenario() -> None:
        async with running(loaded, max_waiting=0) as engine:
            rows = engine.capacity
            asked = [request(loaded, f"n{number}", max_tokens=8) for number in range(rows + 3)]
            with pytest.raises(TooManyRequests):
                await submit(loaded, engine, *asked, key="a")
            await idle(loaded, engine)
            others = await submit(loaded, engine, *asked[:rows], key="b")
            with pytest.raises(TooManyRequests):
                await submit(loaded, engine, request(loaded, "first"), key="b", places=ClientPlaces(1))
            assert len([s async for s in others if s.output is not None]) == rows
            await idle(loaded, engine)
            stream = await submit(loaded, engine, *asked, key="a", places=ClientPlaces(rows + 1))
            assert len([s async for s in stream if s.output is not None]) == rows + 3
            stream = await submit(loaded, engine, *asked, key="a", places=ClientPlaces(rows))
            other = await submit(loaded, engine, request(loaded, "b", max_tokens=8), key="b")
            assert len([s async for s in stream if s.output is not None]) == rows + 3
            assert [step.output async for step in other][-1] is not None

    run(scenario())


def test_a_stream_that_would_lose_recorded_experts_is_refused(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded) as engine:
            with pytest.raises(RequestRefused) as caught:
                await engine.open(replace(request(loaded, "r"), rollout=True, experts=True))
            assert caught.value.field == "experts"

    run(scenario())
