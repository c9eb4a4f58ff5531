"""A prediction compared with a measurement on this CPU: a real and a simulated engine get the same arrivals.

Every step of the real engine is timed in processor seconds of one thread, to which other work on the machine adds
little. Separate loads before and after each compared run give the three numbers of the step model: a forward's fixed
seconds, and the operations a second of its matrix products and of its attention. Each forward accepts a fixed number
of tokens, so that random weights need a known number of forwards.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.capacity.arrivals import Measured, Served, Simulated, serve
from benchmarks.capacity.counted_blocks import FillRate
from benchmarks.capacity.simulated_engine import SimulatedEngine, weightless
from benchmarks.capacity.step_model import StepModel, Work
from benchmarks.capacity.traffic import Traffic
from benchmarks.roofline import ForwardCost
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step_ahead import LaunchedStep, StepPlan
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import random_model

FORCED = 4  # tokens that a block accepts in a forward
SEED_OF_FIT = 1000


class LoggedEngine(Engine):
    """A real engine that logs its forwards' contents."""

    log: list[Work]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        step = super().launch(plan)
        batch = self.runner.last_batch
        assert batch is not None
        lengths_K = batch.cu_seqlens_q.diff()
        tokens = len(batch.input_ids_T)
        self.log.append(
            Work(
                tokens=tokens,
                live_tokens=tokens,
                scores=int((lengths_K * batch.kv_lens_K).sum()),
                kv_tokens=int(batch.kv_lens_K.sum()),
                logit_tokens=batch.num_logits,
            )
        )
        return step


def fit(cost: ForwardCost, works: Sequence[Work], seconds: Sequence[float]) -> StepModel:
    """The step model that explains measured steps best: the least sum of squared relative errors, with no negative
    number.

    A term that would be negative is left out. Bytes are no term: on a CPU their time is part of the fixed seconds.
    """
    terms_SX = np.array(
        [
            [1.0, w.tokens * cost.token_flops + w.logit_tokens * cost.logit_flops, w.scores * cost.score_flops]
            for w in works
        ]
    )
    seconds_S = np.array(seconds)
    best, numbers = np.inf, np.zeros(3)
    for used in (choice for n in (3, 2, 1) for choice in itertools.combinations(range(3), n)):
        part_SX = terms_SX[:, used] / seconds_S[:, None]
        solution, *_ = np.linalg.lstsq(part_SX / (scale := part_SX.max(0)), np.ones(len(works)), rcond=None)
        error = float(((part_SX / scale @ solution - 1) ** 2).sum())
        if (solution > 0).all() and error < best:
            best, numbers = error, np.zeros(3)
            numbers[list(used)] = solution / scale
    fixed, a_flop, a_score_flop = numbers.tolist()
    return StepModel(
        cost=cost,
        bandwidth=np.inf,
        flops=1 / a_flop if a_flop else np.inf,
        score_flops=1 / a_score_flop if a_score_flop else np.inf,
        fixed=fixed,
        launched=fixed,
        host=0.0,
        overlap=False,
    )


def measured_steps(config: ModelConfig) -> StepModel:
    """The step model of this machine's CPU for a shape with random weights, fitted to a short load."""
    decoding = DecodingConfig(block_size=config.block_size, buffer_size=2, tau_m2t=1.0, tokens_per_step=FORCED)
    load = Agreement(
        config=config,
        engine=EngineConfig(max_rows=8, buffer_size=2, num_pages=512),
        decoding=decoding,
        traffic=Traffic(prompt=192, output=64),
    )
    return load.fitted(load.model())


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A model, an engine's configuration, the loads that are compared, and the clock of the real engine's steps."""

    config: ModelConfig
    engine: EngineConfig
    decoding: DecodingConfig
    traffic: Traffic
    clock: Callable[[], float] = time.process_time

    def __post_init__(self) -> None:
        longest, most = replace(self.traffic, vary=1.0).longest, self.config.max_positions
        if longest > most:
            raise ValueError(f"sessions of up to {longest} tokens exceed the model's {most} positions; shorten them")

    def run(
        self, rates: Sequence[float], *, seed: int = 0, tick: Callable[[], object] = lambda: None
    ) -> list[dict[str, Any]]:
        """A row for each rate, in sessions a second of the clock.

        A load for the fit runs before each compared load and after the last. The two fits around a compared load give
        its step model, because the speed of a shared machine varies.
        """
        model = self.model()
        loads, runs = [self._for_fit(model, SEED_OF_FIT)], []
        for number, rate in enumerate(rates):
            runs.append(self._measure(model, replace(self.traffic, rate=rate), seed=seed, tick=tick)[0])
            loads.append(self._for_fit(model, SEED_OF_FIT + 1 + number))
        rows = []
        for number, (rate, measured) in enumerate(zip(rates, runs, strict=True)):
            steps = self._fit(loads[number : number + 2])
            engine = SimulatedEngine(
                weightless(self.config, torch.float32),
                self.engine,
                steps=steps,
                rate=FillRate(tokens=FORCED, forced=True),
            )
            traffic = replace(self.traffic, rate=rate)
            predicted = serve([Simulated(engine)], traffic, self.decoding, seed=seed)
            fitted = {"fixed": steps.fixed, "flops": steps.flops / 1e9, "score_flops": steps.score_flops / 1e9}
            rows.append({"rate": rate, **_beside(measured, predicted), **fitted})
        return rows

    def model(self) -> Decoder:
        """The model with random weights, on which an engine has run: caches and allocators are warm."""
        model = random_model(self.config, device=torch.device("cpu"), dtype=torch.float32)
        self._measure(model, replace(self.traffic, sessions=2, rate=1e9), seed=SEED_OF_FIT)
        return model

    def fitted(self, model: Decoder) -> StepModel:
        """The step model, without a comparison."""
        return self._fit([self._for_fit(model, SEED_OF_FIT)])

    def _fit(self, loads: Sequence[tuple[list[Work], list[float]]]) -> StepModel:
        works = [work for load, _ in loads for work in load]
        seconds = [value for _, load in loads for value in load]
        return fit(ForwardCost(self.config, dtype_bytes=4), works, seconds)

    def _measure(
        self, model: Decoder, traffic: Traffic, *, seed: int, tick: Callable[[], object] = lambda: None
    ) -> tuple[Served, tuple[list[Work], list[float]]]:
        engine = LoggedEngine(model, self.engine, clock=self.clock)
        engine.log = []
        timed = Measured(engine, self.clock)
        served = serve([timed], traffic, self.decoding, seed=seed, tick=tick)
        return served, (engine.log, timed.seconds)

    def _for_fit(self, model: Decoder, seed: int) -> tuple[list[Work], list[float]]:
        """Steps of many sizes: sessions all at once and one by one, with lengths from nearly zero to twice the
        mean."""
        traffic = replace(self.traffic, vary=1.0, sessions=max(4, self.engine.max_rows), rate=1e9)
        together = self._measure(model, traffic, seed=seed)[1]
        apart = self._measure(model, replace(traffic, sessions=2, rate=1e-9), seed=seed)[1]
        return together[0] + apart[0], together[1] + apart[1]


def _beside(measured: Served, predicted: Served) -> dict[str, Any]:
    """Both runs' numbers, and each predicted number divided by the measured number."""
    sides = [
        {
            "ttft": row["ttft_mean"],
            "ttft_p50": row["ttft_p50"],
            "ttft_p90": row["ttft_p90"] or max(t.ttft for t in served.turns),
            "tps": row["tps"],
            "steps": row["steps"],
            "busy": row["busy"],
        }
        for served, row in ((measured, measured.row(1)), (predicted, predicted.row(1)))
    ]
    ratios = {f"{name}_ratio": sides[1][name] / value for name, value in sides[0].items()}
    return (
        {f"{name}_measured": value for name, value in sides[0].items()}
        | {f"{name}_predicted": value for name, value in sides[1].items()}
        | ratios
        | {"requests": len(measured.turns), "forwards": sum(t.forwards for t in measured.turns)}
    )
