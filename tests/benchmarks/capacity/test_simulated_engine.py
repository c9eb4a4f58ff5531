"""A simulated engine takes the steps of the real one: the same rows, forwards, preemptions and answers."""

from typing import Any

import pytest
import torch

from benchmarks.capacity.counted_blocks import FillRate, counted_answer, rate_for, request_of
from benchmarks.capacity.simulated_engine import SimulatedEngine, weightless
from benchmarks.capacity.step_model import Deployment, Work
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step_ahead import LaunchedStep, StepPlan
from mbd_core.models.shapes import SHAPES, random_model

SHAPE = SHAPES["tiny-sdar"]
STEPS = Deployment().steps()
FORCED = 4


class Recorded(Engine):
    """A real engine that keeps each step's last forward: tokens, pairs of queries and keys, positions with logits."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(random_model(SHAPE, device=torch.device("cpu"), dtype=torch.float32), config)
        self.forwards: list[tuple[int, int, int]] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        step = super().launch(plan)
        batch = self.runner.last_batch
        assert batch is not None
        scores = int((batch.cu_seqlens_q.diff() * batch.kv_lens_K).sum())
        self.forwards.append((len(batch.input_ids_T), scores, batch.num_logits))
        return step


def simulated(config: EngineConfig, **changes: Any) -> SimulatedEngine:
    defaults: dict[str, Any] = {"steps": STEPS, "rate": FillRate(tokens=FORCED, forced=True), "keeps": True}
    return SimulatedEngine(weightless(SHAPE, torch.float32), config, **(defaults | changes))


def requests(decoding: DecodingConfig) -> list[Request]:
    """Prompts of all remainders, two of them the same, so that pages are shared."""
    prompts = [tuple((7 * n + k) % 200 for k in range(40 + 37 * n)) for n in range(6)]
    return [request_of(str(n), p, 50 + 13 * n, decoding) for n, p in enumerate([*prompts, prompts[-1]])]


def counts(output: Output) -> tuple[int, ...]:
    c = output.counts
    forwards = (c.num_forwards, c.num_store_forwards, c.num_prefill_forwards)
    return len(output.tokens), *forwards, c.num_cached_tokens, c.num_preemptions


CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "few pages": {"num_pages": 14},
    "a block budget": {"block_budget": 4},
    "static": {"static_shapes": True},
    "launched ahead": {"static_shapes": True, "overlap": True},
}


QUICK = {("packed", 1), ("packed", 4), ("few pages", 2), ("few pages", 4), ("a block budget", 4)}
QUICK |= {("static", 2), ("launched ahead", 1), ("launched ahead", 4)}


@pytest.mark.parametrize(
    ("case", "slots"),
    [
        pytest.param(case, slots, marks=() if (case, slots) in QUICK else pytest.mark.slow)
        for case in CASES
        for slots in (1, 2, 4)
    ],
)
def test_its_steps_are_those_of_the_real_engine(case: str, slots: int) -> None:
    decoding = DecodingConfig(block_size=32, buffer_size=slots, tau_m2t=1.0, tokens_per_step=FORCED)
    config = EngineConfig(
        **({"max_rows": 3, "buffer_size": 4, "num_pages": 40, "max_prefill_tokens": 96} | CASES[case])
    )
    real, counted = Recorded(config), simulated(config)
    outputs = real.generate(requests(decoding)), counted.generate(requests(decoding))
    assert [counts(o) for o in outputs[0]] == [counts(o) for o in outputs[1]]
    assert counted.log is not None
    last_forwards = [forwards[-1] for forwards in counted.log]
    assert [(w.tokens, w.scores, w.logit_tokens) for w in last_forwards] == real.forwards
    counted.check_integrity()
    assert any(o.counts.num_preemptions for o in outputs[0]) == (case == "few pages" and slots < 4)
    assert any(o.counts.num_cached_tokens for o in outputs[0])


def test_its_seconds_are_those_of_its_forwards() -> None:
    config = EngineConfig(max_rows=3, num_pages=40, static_shapes=True, overlap=True)
    engine = simulated(config)
    engine.generate(requests(DecodingConfig(block_size=32, buffer_size=2)))
    assert engine.log is not None
    assert engine.seconds == pytest.approx(sum(STEPS.step(forwards).seconds for forwards in engine.log))
    assert sum(engine.bounds.values()) == pytest.approx(engine.seconds)
    prompts = [forwards[0] for forwards in engine.log if not forwards[0].logit_tokens]
    assert prompts and all(work.launched for work in prompts), "a prompt's kernels are launched one by one"


@pytest.mark.parametrize(("tpf", "slots"), [(3.47, 1), (6.19, 2), (6.19, 4), (1.0, 1)])
def test_a_rate_gives_the_tokens_per_forward_it_was_made_for(tpf: float, slots: int) -> None:
    decoding = DecodingConfig(block_size=32, buffer_size=slots)
    rate = rate_for(tpf, decoding, length=256)
    assert 256 / counted_answer(rate, decoding, length=256).forwards == pytest.approx(tpf, rel=0.03)
    config = EngineConfig(max_rows=8, buffer_size=4, num_pages=200)
    answers = [request_of(str(n), (1,) * (8 + n), 256, decoding) for n in range(16)]
    outputs = simulated(config, rate=rate).generate(answers)
    assert sum(len(o.tokens) for o in outputs) / sum(o.counts.num_forwards for o in outputs) == pytest.approx(
        tpf, rel=0.06
    )


def test_tokens_per_forward_that_no_rate_gives_are_refused() -> None:
    with pytest.raises(ValueError, match="tpf=40"):
        rate_for(40, DecodingConfig(block_size=32), length=256)


def test_work_adds_up() -> None:
    one = Work(tokens=1, live_tokens=2, scores=3, kv_tokens=4, logit_tokens=5)
    two = Work(tokens=10, live_tokens=20, scores=30, kv_tokens=40, logit_tokens=50, launched=True)
    assert one + two == Work(tokens=11, live_tokens=22, scores=33, kv_tokens=44, logit_tokens=55, launched=True)
