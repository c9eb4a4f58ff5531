"""Chunks by time: a step stays under its limit beside who decodes, a lone prompt fills the chip, tokens stay equal."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_engines import B, build, gist, request
from torch import Tensor

from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule.pacing import LEAST_LIMIT, LEAST_MEASURES, UNMEASURED_TOKENS, Pace, Pacer
from mbd_core.engine.step.batch import Batch
from mbd_core.models.flops import matrix_flops, pair_flops
from mbd_core.models.shapes import SHAPES

MODEL = SHAPES["sdar-50m"]
SIZE = MODEL.block_size


@dataclasses.dataclass(frozen=True)
class Span:
    start: int
    stop: int


costs = st.floats(0, 3)


@given(
    start=st.integers(0, 40), most=st.integers(0, 30), spent=costs, seconds=costs, token=costs, pair=st.floats(0, 0.1)
)
def test_the_most_blocks_that_fit_are_taken(
    start: int, most: int, spent: float, seconds: float, token: float, pair: float
) -> None:
    pace = Pace(max_tokens=1, seconds=seconds, token_seconds=token, pair_seconds=pair)
    fitting = [n for n in range(1, most + 1) if spent + pace.cost(start, start + n * B) <= seconds]
    assert pace.fitting_blocks(start, most, block_size=B, spent=spent) == max(fitting, default=0)


def observed(pacer: Pacer, *, flops: float, quiet: float, depth: int = 4096) -> None:
    """Steps on a machine of `flops` a second, whose steps without prompts take `quiet`."""
    for _ in range(5):
        pacer.observe([], decodes=True, seconds=quiet)
    for start in range(0, depth, 512):
        operations = 512 * (matrix_flops(MODEL) + pair_flops(MODEL) * (start + 256))
        pacer.observe([Span(start, start + 512)], decodes=True, seconds=quiet + operations / flops)


@pytest.mark.parametrize(("quiet", "limit"), [(0.1, 0.175), (0.01, LEAST_LIMIT)])
def test_the_limit_is_below_two_quiet_steps(quiet: float, limit: float) -> None:
    pacer = Pacer(MODEL, max_step_seconds=None)
    observed(pacer, flops=1e11, quiet=quiet)
    assert pacer.limit == pytest.approx(limit)
    pace = pacer.pace()
    assert pace is not None and pace.seconds == pytest.approx(limit - quiet)
    assert Pacer(MODEL, max_step_seconds=7.0).limit == 7.0


def test_a_chunk_is_shorter_the_deeper_it_stands_and_takes_as_long() -> None:
    pacer = Pacer(MODEL, max_step_seconds=0.5)
    observed(pacer, flops=1e11, quiet=0.1)
    pace = pacer.pace()
    assert pace is not None
    blocks = [pace.fitting_blocks(d, 10_000, block_size=SIZE, spent=0.0) for d in (0, 4096, 16384, 131072)]
    assert blocks == sorted(blocks, reverse=True) and blocks[0] > 4 * blocks[2] > 8 * blocks[3] and blocks[2] > 0
    for depth, number in zip((0, 4096, 16384, 131072), blocks, strict=True):
        assert pace.cost(depth, depth + number * SIZE) <= 0.4 < pace.cost(depth, depth + (number + 1) * SIZE)


def test_a_disturbed_step_among_chunks_alike_makes_none_long() -> None:
    """The last step of a prompt carries its request's first block too, and so takes longer than its chunk."""
    pacer = Pacer(MODEL, max_step_seconds=None)
    for _ in range(5):
        pacer.observe([], decodes=True, seconds=0.1)
    per_chunk = 1 / (64 * matrix_flops(MODEL))  # of an operation, so that a chunk of 64 takes a unit
    for start in (0, 32, 0, 64, 128, 192, 256):
        stop = start + (32 if start == 32 else 64)
        operations = (stop - start) * (matrix_flops(MODEL) + pair_flops(MODEL) * (start + stop) / 2)
        seconds = 0.049 if stop - start == 32 else 0.05 * operations * per_chunk
        pacer.observe([Span(start, stop)], decodes=True, seconds=0.1 + seconds)
    pace = pacer.pace()
    assert pace is not None
    assert 1 <= pace.fitting_blocks(0, 10_000, block_size=SIZE, spent=0.0) * SIZE <= 128


def test_one_slow_step_changes_nothing_and_a_slower_machine_does() -> None:
    pacer = Pacer(MODEL, max_step_seconds=0.5)
    observed(pacer, flops=1e11, quiet=0.1)
    before = pacer.pace()
    pacer.observe([Span(0, 512)], decodes=True, seconds=60.0)
    assert pacer.pace() == before
    observed(pacer, flops=2.5e10, quiet=0.1)
    assert before is not None and pacer.pace() is not None
    assert pacer.token_seconds == pytest.approx(4 * before.token_seconds, rel=1e-6)


def test_what_chunks_cost_however_short_they_are_is_no_cost_of_their_tokens() -> None:
    """A block that takes nearly as long as 64 blocks, as where it reads all experts, does not end in single blocks."""
    fixed, token, quiet = 0.9, 0.001, 1.0
    pacer = Pacer(MODEL, max_step_seconds=None)
    for _ in range(5):
        pacer.observe([], decodes=True, seconds=quiet)
    tokens = 0
    for _ in range(40):
        pace = pacer.pace()
        assert pace is not None
        most = min(2048, pace.max_tokens) // SIZE
        tokens = SIZE * max(1, pace.fitting_blocks(0, most, block_size=SIZE, spent=0.0))
        pacer.observe([Span(0, tokens)], decodes=True, seconds=quiet + fixed + token * tokens)
    assert pacer.limit == pytest.approx(quiet + 2 * fixed, rel=0.05)
    assert 0.5 * fixed / token < tokens < 1.5 * fixed / token
    strict = Pacer(MODEL, max_step_seconds=quiet)
    strict.observe([], decodes=True, seconds=quiet)
    for tokens in (32, 64, 128, 256):
        strict.observe([Span(0, tokens)], decodes=True, seconds=quiet + fixed + token * tokens)
    pace = strict.pace()
    assert pace is not None and pace.seconds == 0.0, "a limit that was given is kept to"


def test_before_anything_is_measured_chunks_are_short_and_without_streams_they_are_free() -> None:
    pacer = Pacer(MODEL, max_step_seconds=None)
    for number in range(LEAST_MEASURES):
        pace = pacer.pace()
        assert pace is not None and pace.max_tokens == UNMEASURED_TOKENS[number % 2] and pace.cost(0, 9**9) == 0.0
        pacer.observe([Span(0, 64)], decodes=False, seconds=0.1)
    pace = pacer.pace()
    assert pace is not None and pace.max_tokens > 1 << 60 and pace.cost(0, 64) == pytest.approx(0.1)
    with pacer.without_streams():
        assert pacer.pace() is None
    assert pacer.pace() == pace


class Clock:
    """Time passes in forwards alone: a block's share, and its pairs with keys."""

    def __init__(self) -> None:
        self.now = 0.0
        self.forwards: list[tuple[float, int]] = []  # seconds, prompt blocks

    def __call__(self) -> float:
        return self.now

    def watch(self, engine: Engine) -> None:
        forward = engine.runner.forward

        def timed(batch: Batch) -> Tensor:
            seconds = 0.01 * len(batch.kv_lens_K) + 0.0001 * float(batch.kv_lens_K.sum())
            self.now += seconds
            decoding = sum(s.prompt_stored and s.seated for s in engine.scheduler.running.values())
            self.forwards.append((seconds, len(batch.kv_lens_K) - decoding))
            return forward(batch)

        engine.runner.forward = timed  # type: ignore[method-assign]


def serve(engine: Engine, stream: Request, *prompts: Request) -> list[Output]:
    """The prompts come one after another, each when the one before has ended, while `stream` decodes."""
    outputs: dict[str, Output] = {}
    engine.add(stream)
    waiting = list(prompts)
    number = 0
    while engine.has_work or waiting:
        if number > 3 and waiting and engine.num_known < 2:
            engine.add(waiting.pop(0))
        for step in engine.step():
            if step.output is not None:
                outputs[step.request_id] = step.output
        number += 1
    return [outputs[r.request_id] for r in (stream, *prompts)]


def paced_engine(clock: Clock, **changes: Any) -> Engine:
    config = EngineConfig(
        **{"max_rows": 4, "num_pages": 200, "page_size": 8, "max_prefill_tokens": 128, "batch_invariant": True}
        | changes
    )
    engine = Engine(build(), config, clock=clock)
    clock.watch(engine)
    return engine


def long_request(name: str, length: int, max_tokens: int) -> Request:
    prompt = tuple(2 + (i * i + ord(name[-1])) % 37 for i in range(length))
    return request(name, 1, "single", prompt=prompt, max_tokens=max_tokens, ignore_eos=True)


def test_beside_a_stream_chunks_are_cut_to_the_limit_and_tokens_stay_equal() -> None:
    stream, prompts = long_request("s", 4, 150), [long_request(f"p{i}", 180 + i, 4) for i in range(4)]
    free = Clock()
    wanted = serve(paced_engine(free, max_step_seconds=1e9), stream, *prompts)
    clock = Clock()
    engine = paced_engine(clock, max_step_seconds=0.1)
    assert [gist(o) for o in serve(engine, stream, *prompts)] == [gist(o) for o in wanted]
    assert engine.pacer.token_seconds > 0 and engine.pacer.limit == 0.1
    learned = clock.forwards[11:]  # the first prompt and a chunk of the second have taught it what a block costs
    most, of_free = max(s for s, _ in learned), max(s for s, _ in free.forwards)
    own_block = 0.03  # of the prompt, which decodes in the step that stores its end
    assert most <= 0.1 + own_block < of_free / 3
    busy = [s for s, blocks in learned if blocks > 1]
    assert len(busy) > 10 and sum(busy) / len(busy) > 0.07, "the limit is made use of"


def test_a_block_is_stored_in_every_step_whatever_the_limit() -> None:
    clock = Clock()
    engine = paced_engine(clock, max_step_seconds=1e-9)
    engine.pacer.observe([Span(0, 4)] * 3, decodes=False, seconds=1.0)
    stream, prompt = long_request("s", 4, 100), long_request("p", 80, 4)
    for _ in range(LEAST_MEASURES):
        engine.pacer.observe([Span(0, 4)], decodes=False, seconds=1.0)
    assert len(serve(engine, stream, prompt)[1].tokens) == 4
    assert [blocks for _, blocks in clock.forwards if blocks][:20] == [1] * 20


def test_a_lone_prompt_fills_the_chip() -> None:
    clock = Clock()
    engine = paced_engine(clock, max_step_seconds=1e-9, max_prefill_tokens=128)
    engine.add(long_request("p", 200, 4))
    engine.step()
    assert [blocks for _, blocks in clock.forwards] == [128 // B]


def test_whoever_generates_has_no_limit() -> None:
    clock = Clock()
    engine = paced_engine(clock, max_step_seconds=1e-9)
    with torch.inference_mode():
        engine.generate([long_request("s", 4, 60), long_request("p", 120, 4)])
    assert max(blocks for _, blocks in clock.forwards) >= 120 // B and engine.pacer.has_streams


def test_a_rank_that_follows_keeps_to_rank_0s_pace() -> None:
    leader, follower = Pacer(MODEL, max_step_seconds=0.5), Pacer(MODEL, max_step_seconds=0.5)
    observed(leader, flops=1e11, quiet=0.1)
    observed(follower, flops=1e9, quiet=0.4)
    assert leader.pace() != follower.pace()
    follower.follow(leader.pace())
    assert leader.pace() == follower.pace()
    follower.follow(None)
    assert follower.pace() is None
