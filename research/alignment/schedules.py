"""Models' traces beside the training states of several noise-schedules and layouts (paper Section 4.4, App. A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from mbd_core.multitf.states.layout import Layouts, StateConfig
from mbd_core.multitf.states.noise import SCHEDULES, FittedNoise, NoiseBounds, fit_noise

if TYPE_CHECKING:
    from research.alignment.distances import Distances
    from research.alignment.states import ModelTraces, States

FITTED = "fitted"
DEFAULT_SCHEDULES = (
    "chain_uniform", "sorted_uniform", "power_law", "stratified", "independent_uniform", "linear@one_group",
    "d2f_monotonic@one_group", FITTED,
)  # fmt: skip
D2F_BOUNDS = NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0)


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What is compared: `schedules` as `NAME` or `NAME@LAYOUT`, all else of the training states from `states`.

    Of every problem the layouts are drawn `draws` times. `seed` is that of whatever is drawn.
    """

    states: StateConfig
    schedules: tuple[str, ...]
    draws: int
    num_bootstrap: int
    seed: int

    def __post_init__(self) -> None:
        unfitted = FittedNoise(states=(((1.0,), 1),), source="nothing yet")
        for name in self.schedules:
            scheduled(name, self.states, fitted=unfitted)


@dataclass(frozen=True, kw_only=True)
class ComparedSchedule:
    """A schedule's states, and their distances from the model's."""

    name: str
    states: States
    distances: Distances


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model's measured states, those that `fitted` was fitted to not among them, and every schedule beside them."""

    name: str
    inference: States
    num_fitted: int
    fitted: FittedNoise
    schedules: tuple[ComparedSchedule, ...]


def scheduled(name: str, base: StateConfig, *, fitted: FittedNoise | None) -> StateConfig:
    """Training states of the schedule and layout of that name; `ValueError` for one that is not known or cannot be."""
    schedule, mark, layouts = name.partition("@")
    if schedule not in SCHEDULES:
        raise ValueError(f"noise-schedule '{schedule}' is unknown; known: {', '.join(SCHEDULES)}")
    known = [kind for kind in get_args(Layouts) if kind != "d2f"]  # one sequence without a clean one: no running-set
    if mark and layouts not in known:
        raise ValueError(f"layout '{layouts}' of {name} is unknown; known: {', '.join(known)}")
    bounds = D2F_BOUNDS if schedule == "d2f_monotonic" else base.bounds
    changes: dict = {"schedule": schedule, "bounds": replace(bounds, fitted=fitted)}
    if layouts == "one_group":
        changes |= {"layouts": layouts, "max_group": 1, "num_random": 0, "num_layouts": 1}
    elif layouts:
        changes |= {"layouts": layouts, "num_random": max(1, base.num_random)}
    return replace(base, **changes)


def compare_model(traces: ModelTraces, config: StudyConfig) -> ComparedModel:
    """One model: `fitted` is fitted to even-numbered problems, and every distance is from the odd-numbered ones."""
    from research.alignment.distances import compare
    from research.alignment.states import decoded_examples, inference_states, training_states

    requests = sorted(traces.run.requests, key=lambda r: int(r.request_id))
    even, odd = ([r for r in requests if int(r.request_id) % 2 == half] for half in (0, 1))
    if not even or not odd:
        raise ValueError(f"{traces.name} has {len(requests)} traced problems; two halves need at least 2")
    assert traces.run.block_size is not None
    inference, fitting = inference_states(odd), inference_states(even)
    fitted = fit_noise(fitting.rows(), source=f"{traces.name}, {len(fitting)} forwards of {len(even)} problems")
    examples = decoded_examples(replace(traces.run, requests=tuple(odd)), traces.prompt_lengths)
    base = replace(config.states, block_size=traces.run.block_size)
    schedules = []
    for name in config.schedules:
        drawn = scheduled(name, base, fitted=fitted if name.partition("@")[0] == FITTED else None)
        states = training_states(examples, drawn, draws=config.draws, seed=config.seed)
        distances = compare(inference, states, num_bootstrap=config.num_bootstrap, seed=config.seed)
        schedules.append(ComparedSchedule(name=name, states=states, distances=distances))
    return ComparedModel(
        name=traces.name,
        inference=inference,
        num_fitted=len(fitting),
        fitted=fitted,
        schedules=tuple(schedules),
    )


def compare_models(models: Sequence[ModelTraces], config: StudyConfig) -> list[ComparedModel]:
    """Every model; `ValueError` for a trace that does not say its block size or has too few problems."""
    for traces in models:
        if traces.run.block_size is None:
            raise ValueError(f"the trace of {traces.name} does not say its block size")
    return [compare_model(traces, config) for traces in models]
