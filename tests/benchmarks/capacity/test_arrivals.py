"""Arrivals on a virtual clock: nothing is lost, the same seed gives the same times, turns find what they stored."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.capacity.agreement import Agreement, LoggedEngine, fit
from benchmarks.capacity.arrivals import Served, Simulated, serve
from benchmarks.capacity.commands import arrivals as arrivals_command
from benchmarks.capacity.commands import place_of
from benchmarks.capacity.counted_blocks import rate_for
from benchmarks.capacity.plan import Demand, plans
from benchmarks.capacity.simulated_engine import SimulatedEngine, weightless
from benchmarks.capacity.step_model import Deployment, StepModel, Work
from benchmarks.capacity.traffic import Routing, Traffic, arrivals
from benchmarks.roofline import ForwardCost
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.schedule import scheduler
from mbd_core.engine.step_ahead import LaunchedStep, StepPlan
from mbd_core.models.shapes import SHAPES

MINI = SHAPES["llada2-mini"]
DECODING = DecodingConfig(block_size=32, buffer_size=2)
PLACE = place_of(Deployment())


mini = functools.cache(lambda: weightless(MINI))
rate_of = functools.cache(lambda length: rate_for(6.19, DECODING, length=length))


def simulate(traffic: Traffic, *, replicas: int = 1, routing: Routing = "prefix", **changes: Any) -> Served:
    sizes = {"max_rows": 16, "buffer_size": 2, "num_pages": 2000, "static_shapes": True, "overlap": True}
    model, rate = mini(), rate_of(traffic.output)
    page_seconds = changes.pop("page_seconds", 0.0)
    engines = [
        SimulatedEngine(
            model,
            EngineConfig(**(sizes | changes)),
            steps=PLACE.steps,
            rate=rate,
            page_seconds=page_seconds,
            seed=n,
        )
        for n in range(replicas)
    ]
    served = serve([Simulated(engine) for engine in engines], traffic, DECODING, routing=routing)
    for engine in engines:
        engine.check_integrity()
        assert not engine.num_known and engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
    return served


def test_every_request_is_served_and_waits_at_least_its_own_steps() -> None:
    served = simulate(Traffic(rate=40, sessions=100, prompt=600), replicas=3)
    assert len(served.turns) == 100 and {t.session.number for t in served.turns} == {*range(100)}
    for turn in served.turns:
        assert turn.due < turn.first_token <= turn.end
        assert turn.tokens == turn.request.max_tokens
    row = served.row(3)
    assert row["ttft_p50"] <= row["ttft_p90"] <= row["ttft_p99"] and 0 < row["busy"] <= 1
    assert row["tokens"] == sum(t.tokens for t in served.turns)


def test_the_same_seed_gives_the_same_times() -> None:
    traffic = Traffic(rate=30, sessions=40, burst=4, turns=2, think=0.2)
    times = [[(t.due, t.first_token, t.end) for t in simulate(traffic, replicas=2).turns] for _ in range(2)]
    assert times[0] == times[1]


def test_bursts_keep_the_rate_and_come_together() -> None:
    poisson, bursty = (
        list(arrivals(Traffic(rate=5, burst=burst), 4000, rng=random.Random(1))) for burst in (1.0, 8.0)
    )
    for times in (poisson, bursty):
        assert times == sorted(times) and 4000 / times[-1] == pytest.approx(5, rel=0.1)
    assert len({*poisson}) == 4000 and len({*bursty}) == pytest.approx(500, rel=0.1)
    waits = [simulate(Traffic(rate=10, sessions=60, burst=b)).row(1)["ttft_mean"] for b in (1.0, 8.0)]
    assert waits[1] > 1.3 * waits[0]


def test_short_prompts_wait_less_behind_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"prompt": 300, "long_every": 4, "long_prompt": 12000, "output": 64, "vary": 0.1}
    traffic = Traffic(rate=8, burst=8, sessions=40, **sizes)
    row = simulate(traffic).row(1, traffic)
    monkeypatch.setattr(scheduler, "OLDEST_FIRST", 1)
    by_age = simulate(traffic).row(1, traffic)
    assert row["short_mean"] < 0.7 * by_age["short_mean"] and row["long_mean"] < 1.5 * by_age["long_mean"]
    assert row["long_mean"] > row["ttft_mean"] > row["short_mean"]


def test_a_later_turn_finds_what_its_session_has_stored() -> None:
    traffic = Traffic(rate=5, sessions=10, prompt=2000, turns=4, turn_tokens=200, think=0.5, vary=0.2)
    served = simulate(traffic, replicas=4)
    for turn in served.turns:
        earlier = len(turn.request.prompt) - 240 if turn.session.turn > 1 else 0
        first = next(t for t in served.turns if t.session is turn.session)
        if turn is first:
            assert turn.cached == 0
        else:
            assert turn.cached >= earlier - 64
    by_load = simulate(traffic, replicas=4, routing="load")
    assert by_load.row(4)["hits"] < 0.7 * served.row(4)["hits"]
    assert by_load.row(4)["ttft_mean"] > served.row(4)["ttft_mean"]


def test_pages_in_the_hosts_memory_are_found_and_their_copies_take_time() -> None:
    """Sessions that come back when the device has given their pages to others."""
    traffic = Traffic(rate=4, sessions=12, prompt=3000, turns=3, turn_tokens=100, think=4.0)
    page_bytes = 32 * PLACE.steps.cost.kv_token_bytes
    plain, hosted = (simulate(traffic, num_pages=500, host_kv_bytes=int(n * page_bytes)).row(1) for n in (0, 2000))
    assert hosted["hits"] > 1.3 * plain["hits"] and hosted["ttft_mean"] < plain["ttft_mean"]
    slow = simulate(traffic, num_pages=500, host_kv_bytes=int(2000 * page_bytes), page_seconds=0.01).row(1)
    assert slow["ttft_mean"] > hosted["ttft_mean"] + 0.2


def test_few_pages_cost_preemptions_and_no_answer() -> None:
    """Where pages run out, the scheduler preempts as it does with a model."""
    served = simulate(Traffic(rate=1e6, sessions=16, prompt=300), num_pages=100)
    assert len(served.turns) == 16 and served.row(1)["preemptions"] > 0


@pytest.mark.parametrize("rate", [pytest.param(3.0, marks=pytest.mark.slow), 5.0])
def test_the_plan_is_near_the_simulation(rate: float) -> None:
    """8K prompts: the mean time to first tokens, and the seconds of an answer."""
    demand = Demand(context=8192, rate=rate)
    rows = list(plans(PLACE, demand, DECODING, rate_for(6.19, DECODING, length=256)))
    below, above = (pick(rows, rate) for pick in (_last_below, _first_above))
    share = (rate - below["served"]) / (above["served"] - below["served"])
    planned = below["ttft_seconds"] + share * (above["ttft_seconds"] - below["ttft_seconds"])
    served = simulate(Traffic(rate=rate, sessions=150, prompt=8192, vary=0.2), num_pages=20000, max_rows=32)
    assert planned == pytest.approx(served.row(1)["ttft_mean"], rel=0.2)


def _last_below(rows: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    return [row for row in rows if row["served"] <= rate][-1]


def _first_above(rows: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    return next(row for row in rows if row["served"] > rate)


# The step model of a CPU, from steps that are timed.

TRUE = StepModel(
    cost=ForwardCost(SHAPES["tiny-sdar"], dtype_bytes=4),
    bandwidth=float("inf"),
    flops=2e9,
    score_flops=5e8,
    fixed=0.003,
    launched=0.003,
    host=0.0,
    overlap=False,
)


def test_a_fit_finds_the_numbers_that_made_the_seconds() -> None:
    rng = random.Random(0)
    works = [
        Work(tokens=n, live_tokens=n, scores=n * rng.randint(32, 500), kv_tokens=0, logit_tokens=rng.randint(0, n))
        for n in range(32, 800, 32)
    ]
    found = fit(TRUE.cost, works, [TRUE.forward(work) for work in works])
    for name in ("fixed", "flops", "score_flops"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    free = fit(TRUE.cost, works, [replace(TRUE, score_flops=float("inf")).forward(work) for work in works])
    assert free.score_flops > 1e6 * TRUE.score_flops and free.fixed == pytest.approx(TRUE.fixed)


def test_where_steps_take_what_the_model_says_both_sides_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine whose clock is moved by its forwards alone: the simulation gives its times exactly."""
    now, launch = [0.0], LoggedEngine.launch

    def timed(engine: LoggedEngine, plan: StepPlan) -> LaunchedStep:
        step = launch(engine, plan)
        now[0] += TRUE.forward(engine.log[-1])
        return step

    monkeypatch.setattr(LoggedEngine, "launch", timed)
    agreement = Agreement(
        config=SHAPES["tiny-sdar"],
        engine=EngineConfig(max_rows=4, buffer_size=2, num_pages=100, max_prefill_tokens=128),
        decoding=DecodingConfig(block_size=32, buffer_size=2, tau_m2t=1.0, tokens_per_step=4),
        traffic=Traffic(sessions=12, prompt=60, output=40, turns=2, turn_tokens=40, think=0.1),
        clock=lambda: now[0],
    )
    torch.set_num_threads(1)
    rows = agreement.run([3.0, 30.0])
    for row in rows:
        assert row["fixed"] == pytest.approx(TRUE.fixed, rel=1e-3)
        assert row["steps_measured"] == row["steps_predicted"]
        for name in ("ttft_ratio", "ttft_p90_ratio", "tps_ratio", "busy_ratio"):
            assert row[name] == pytest.approx(1.0, rel=1e-3)


def test_the_command_prints_a_row_for_each_number_of_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--replicas", "1,3", "--rate", "8", "--rate-each", "--sessions", "30"]
    texts = []
    for _ in range(2):
        assert arrivals_command(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].count("\n| ") == 3
    assert "room for 907559 tokens" in texts[0]
    assert arrivals_command(["--model", "sdar-8b", "--prompt", "30000"]) == 2
    assert "exceeds the 32768 positions of sdar-8b" in capsys.readouterr().err
