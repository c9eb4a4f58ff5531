"""The engine behind asyncio: the same tokens as without it, exact stop strings, nothing left behind by who leaves."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.decoding.request import Output, Request
from mbd_core.decoding.sampling import Sampling
from mbd_core.engine.engine import EngineConfig
from mbd_core.serving.async_engine import AsyncEngine, EngineFailed, TextStep, TooManyRequests
from mbd_core.serving.committed_text import BROKEN, CommittedText
from mbd_core.serving.load import LoadedModel, load_engine

# -- text -----------------------------------------------------------------------------------------------------------


@dataclass
class ByteTokens:
    """A byte-level vocabulary made for one text: token i is the i-th piece of its bytes."""

    pieces: list[bytes]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[t] for t in tokens).decode("utf-8", "replace")


def cut_up(data: bytes, borders: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(b % (len(data) + 1) for b in borders)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def grow(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], CommittedText]:
    text = CommittedText(ByteTokens(pieces).decode, stop)
    deltas = []
    for token in range(len(pieces)):
        deltas.append(text.push(token))
        if text.stopped:
            return deltas, text
    return [*deltas, text.finish()], text


def before_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """The definition, character by character: the stop string complete first, the longest of those."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


words = st.text(alphabet="abé漢🙂 \n", max_size=30)


@given(text=words, borders=st.lists(st.integers(0, 200), max_size=40))
def test_characters_split_over_tokens_come_out_whole(text: str, borders: list[int]) -> None:
    deltas, _ = grow(cut_up(text.encode(), borders))
    assert "".join(deltas) == text
    assert not any(BROKEN in d for d in deltas)


@given(data=st.binary(max_size=30), borders=st.lists(st.integers(0, 60), max_size=20))
def test_bytes_that_are_no_text_decode_as_they_would_at_once(data: bytes, borders: list[int]) -> None:
    deltas, _ = grow(cut_up(data, borders))
    assert "".join(deltas) == data.decode("utf-8", "replace").rstrip(BROKEN)


@given(
    text=words,
    borders=st.lists(st.integers(0, 200), max_size=40),
    stop=st.lists(st.text(alphabet="abé漢🙂 \n", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_stop_strings_match_across_any_border(text: str, borders: list[int], stop: tuple[str, ...]) -> None:
    pieces = cut_up(text.encode(), borders)
    deltas, grown = grow(pieces, stop)
    wanted = before_first_stop(text, stop)
    assert "".join(deltas) == wanted
    assert grown.stopped == any(s in text for s in stop)
    if grown.stopped:  # at the first token that ended a character with a stop string complete
        ends = grown.num_tokens, grown.num_tokens - 1
        shown, before = (b"".join(pieces[:end]).decode("utf-8", "replace") for end in ends)
        assert any(s in shown for s in stop)
        assert before.endswith(BROKEN) or not any(s in before for s in stop)


def test_an_ending_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    text = CommittedText(ByteTokens([b"x", b"#", b"a", b"#", b"#"]).decode, ("##",))
    assert [text.push(t) for t in range(5)] == ["x", "", "#a", "", ""]
    assert text.stopped
    assert text.finish() == ""


# -- engine ---------------------------------------------------------------------------------------------------------

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
    return lambda tokens: loaded.tokenizer.decode(tokens, skip_special_tokens=True)


@asynccontextmanager
async def running(loaded: LoadedModel, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(loaded.engine, decode(loaded), **options)
    try:
        yield engine
    finally:
        await engine.stop()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(engine: AsyncEngine, made: Request, *, stop: tuple[str, ...] = ()) -> tuple[str, Output]:
    steps: list[TextStep] = [s async for s in engine.generate(made, stop=stop)]
    output = steps[-1].output
    assert output is not None
    assert tuple(t for s in steps for t in s.new_tokens) == output.tokens
    if made.logprobs:
        assert tuple(p for s in steps for p in s.logprobs or ()) == output.logprobs
        assert all(len(s.new_tokens) == len(s.logprobs or ()) for s in steps)
    else:
        assert {s.logprobs for s in steps} == {output.logprobs} == {None}
    return "".join(s.text for s in steps), output


async def idle(loaded: LoadedModel, engine: AsyncEngine) -> None:
    """Wait until the engine has nothing left, then check that nothing is lost."""
    for _ in range(200):
        if not loaded.engine.has_work and engine.load.running == 0:
            break
        await asyncio.sleep(0.01)
    assert not loaded.engine.has_work
    loaded.engine.check_integrity()
    assert loaded.engine.scheduler.pool.num_free == loaded.engine.scheduler.pool.capacity


def test_concurrent_requests_equal_each_alone(loaded: LoadedModel) -> None:
    made = [request(loaded, f"r{i}", p, max_tokens=9 + 5 * i, buffer_size=1 + i % 4) for i, p in enumerate(PROMPTS)]
    alone = [loaded.engine.generate([r])[0] for r in made]

    async def scenario() -> list[tuple[str, Output]]:
        async with running(loaded) as engine:
            answers = await asyncio.gather(*(collect(engine, r) for r in made))
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
            answer = await collect(engine, long, stop=(stop,))
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
            (_, free), (_, stopped) = [await collect(engine, long, stop=s) for s in ((), (stop,))]
            return free, stopped

    free, stopped = run(scenario())
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.tokens) == 80
    assert free.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert stopped.logprobs == pytest.approx(whole.logprobs[: len(stopped.tokens)], abs=1e-5)
    assert 0 < len(stopped.tokens) < 80


def test_leaving_frees_the_request(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(loaded) as engine:
            long = [request(loaded, f"r{i}", max_tokens=400, tau_m2t=1.0, buffer_size=1) for i in range(5)]
            tasks = [asyncio.create_task(collect(engine, r)) for r in long]
            leaver = engine.generate(request(loaded, "leaver", max_tokens=400))
            while engine.load.running < 3:
                await asyncio.sleep(0.01)
            assert engine.load.waiting > 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await anext(leaver)
            await leaver.aclose()
            await idle(loaded, engine)
            _, output = await collect(engine, request(loaded, "after"))
            assert output.finish_reason == "length"

    run(scenario())


def test_the_loop_goes_on_during_a_step_and_one_thread_touches_the_engine(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    turned = threading.Event()
    for name in ("validate", "add", "abort", "step"):
        method = getattr(loaded.engine, name)

        def watched(*args: Any, method: Callable[..., Any] = method, name: str = name) -> Any:
            threads.add(threading.get_ident())
            if name == "step":
                assert turned.wait(10), "the event loop stood still during a step"
            return method(*args)

        monkeypatch.setattr(loaded.engine, name, watched)

    async def scenario() -> None:
        async with running(loaded) as engine:
            answers = [asyncio.create_task(collect(engine, request(loaded, f"r{i}"))) for i in range(4)]
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
            failures = await asyncio.gather(*(collect(engine, r) for r in made), return_exceptions=True)
            assert [type(f) for f in failures] == [EngineFailed] * 5
            assert "no memory left" in str(failures[0])
            with pytest.raises(EngineFailed):
                engine.check_health()
            with pytest.raises(EngineFailed):
                await engine.submit([request(loaded, "late")])

    run(scenario())


def test_stopping_releases_who_waits(loaded: LoadedModel) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(loaded.engine, decode(loaded))
        waiting = asyncio.create_task(collect(engine, request(loaded, "r", max_tokens=400)))
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
                await engine.submit([good, bad])
            await idle(loaded, engine)
            with pytest.raises(ValueError, match="at most 4"):
                await engine.submit([request(loaded, f"r{i}") for i in range(5)])
            with pytest.raises(ValueError, match="twice"):
                await engine.submit([good, good])
            full = await engine.submit([request(loaded, f"r{i}", max_tokens=300, tau_m2t=1.0) for i in range(4)])
            with pytest.raises(TooManyRequests):
                await engine.submit([good])
            full.close()
            _, output = await collect(engine, good)
            assert output.counts.num_tokens == 24

    run(scenario())
