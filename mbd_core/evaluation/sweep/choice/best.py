"""The best of a model's swept configurations, chosen on one half of the problems and reported on the other.

    accuracy  the most accurate configuration; on ties, the higher TPF
    tps       the highest measured Batch-1 TPS among configurations at most 5 points below the best accuracy (d3LLM's
              floor), because the fastest configuration often answers nothing right
    knee      the point of the Pareto front of accuracy against TPF that is farthest above the chord between its ends,
              with both axes scaled to the front's range; on ties, the more accurate. A front of two points has no
              point above the chord, so its more accurate end is chosen

Accuracies, TPF and TPS are means over the tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mbd_core.decoding.blocks.methods import SpeedPoint, pareto_points
from mbd_core.evaluation.measures.rates import Summary, summarize
from mbd_core.evaluation.measures.statistics import mean
from mbd_core.evaluation.measures.summary import ReportKey, SamplesByKey

if TYPE_CHECKING:
    from mbd_core.evaluation.measures.speed import MeasuredSpeed

By = Literal["accuracy", "tps", "knee"]
BEST = (
    "the most accurate configuration, the one of highest TPS at most 5 points below it, or the knee of the front of "
    "accuracy against TPF. It is chosen on half of the problems, and its accuracy on the other half is printed."
)
"""The meaning of each choice, for help texts."""
FLOOR = 5.0  # points of accuracy


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration, with its results by task on the half of the problems for the choice and on the other half, and
    its TPS if it was timed."""

    method: str
    config: Mapping[str, Any]
    chosen_on: Mapping[str, Summary]
    reported_on: Mapping[str, Summary]
    tps: float | None

    @property
    def accuracy(self) -> float:
        return mean([summary.accuracy for summary in self.chosen_on.values()])

    @property
    def tpf(self) -> float:
        return mean([summary.tpf or 0.0 for summary in self.chosen_on.values()])


@dataclass(frozen=True, kw_only=True)
class BestPoint:
    """The chosen configuration out of `num_candidates`, of which `num_timed` have a TPS."""

    model: str
    by: By
    best: Candidate
    num_candidates: int
    num_timed: int

    @property
    def text(self) -> str:
        """The choice, and its numbers on the other half of the problems."""
        best = self.best
        timing_note = f", {self.num_timed} of them timed" if self.by == "tps" else ""
        lines = [
            f"The best by {self.by} of {self.model}'s {self.num_candidates} configurations{timing_note}: {best.method}"
        ]
        lines.append(f"- its decoding: {json.dumps(decoding_fields(best.config))}")
        speed = "" if best.tps is None else f", Batch-1 TPS {best.tps:.1f}"
        lines.append(
            f"- chosen on {sum(s.n for s in best.chosen_on.values())} answers: accuracy {best.accuracy:.2f}, TPF "
            f"{best.tpf:.2f}{speed}; the choice was made by these numbers, which biases them upwards"
        )
        for task, s in best.reported_on.items():
            lines.append(
                f"- {task}, on {s.n} answers to the other problems: accuracy {s.accuracy:.2f} [{s.accuracy_low:.1f}, "
                f"{s.accuracy_high:.1f}], TPF {s.tpf:.2f}"
            )
        return "\n".join(lines)

    @property
    def record(self) -> dict[str, Any]:
        """The record of the choice in `generation_config.json`."""
        return {
            "by": self.by,
            "of_configurations": self.num_candidates,
            "tasks": {
                task: {"n": s.n, "accuracy": s.accuracy, "interval": [s.accuracy_low, s.accuracy_high], "tpf": s.tpf}
                for task, s in self.best.reported_on.items()
            },
        }


def is_for_choice(problem: str) -> bool:
    """Whether a problem is in the half for the choice. A hash of its id decides, so that the half is the same in every
    sweep."""
    return hashlib.sha256(problem.encode()).digest()[0] % 2 == 0


def check_halves(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise `ValueError` for a task without a problem in one of the halves. `problems` maps tasks to problems' ids."""
    for task, ids in problems.items():
        if len({is_for_choice(problem) for problem in ids}) < 2:
            raise ValueError(
                f"a best configuration is chosen on one half of a task's problems and reported on the other; the "
                f"{len(ids)} of {task} are all in one half: take more"
            )


def choose_best(samples: SamplesByKey, times: Sequence[MeasuredSpeed], *, model: str, by: By) -> BestPoint:
    """A model's best configuration; `ValueError` if a task cannot be halved, if configurations were measured on
    different problems, or if nothing was timed for `tps`."""
    of_model = {key: model_samples for key, model_samples in samples.items() if key.model == model}
    tasks = list(dict.fromkeys(key.task for key in of_model))
    check_halves({task: [s.problem for k, g in of_model.items() if k.task == task for s in g] for task in tasks})
    tps = {(speed.model, speed.task, speed.config): speed.tps_batch_1 for speed in times}
    groups: dict[str, dict[str, ReportKey]] = {}
    for key in of_model:
        groups.setdefault(key.config, {}).setdefault(key.task, key)  # two methods may have one configuration
    _check_alike(groups, of_model)
    candidates = [_candidate(keys, of_model, tps) for keys in groups.values()]
    return BestPoint(
        model=model,
        by=by,
        best=_best(candidates, by),
        num_candidates=len(candidates),
        num_timed=sum(candidate.tps is not None for candidate in candidates),
    )


def _check_alike(groups: Mapping[str, Mapping[str, ReportKey]], samples: SamplesByKey) -> None:
    """Raise `ValueError` unless every configuration has all tasks, with the same problems."""
    problems: dict[str, set[str]] = {}
    for keys in groups.values():
        for task, key in keys.items():
            problems.setdefault(task, set()).update(s.problem for s in samples[key])
    for config, keys in groups.items():
        for task, of_task in problems.items():
            own_problems = {s.problem for s in samples[keys[task]]} if task in keys else set()
            if own_problems != of_task:
                first = next(iter(keys.values()))
                raise ValueError(
                    "configurations are compared on the same problems, and of the "
                    f"{len(of_task)} of {task} method '{first.method}' lacks {len(of_task - own_problems)}, "
                    f"decoded with {json.dumps(decoding_fields(json.loads(config)))}; sweep all configurations on all "
                    "problems"
                )


def _candidate(
    keys: Mapping[str, ReportKey], samples: SamplesByKey, tps: Mapping[tuple[str, str, str], float]
) -> Candidate:
    first = next(iter(keys.values()))
    halves = [
        {task: summarize([s for s in samples[key] if is_for_choice(s.problem) == half]) for task, key in keys.items()}
        for half in (True, False)
    ]
    speeds = [tps.get((key.model, task, key.config)) for task, key in keys.items()]
    return Candidate(
        method=first.method,
        config=json.loads(first.config),
        chosen_on=halves[0],
        reported_on=halves[1],
        tps=None if None in speeds else mean([value for value in speeds if value is not None]),
    )


def _best(candidates: Sequence[Candidate], by: By) -> Candidate:
    if by == "accuracy":
        return max(candidates, key=lambda candidate: (candidate.accuracy, candidate.tpf))
    if by == "tps":
        floor = max(candidate.accuracy for candidate in candidates) - FLOOR
        fast = [
            (candidate.tps, candidate)
            for candidate in candidates
            if candidate.tps is not None and candidate.accuracy >= floor
        ]
        if not fast:
            raise ValueError(
                f"the best by tps needs timed runs, and no configuration within {FLOOR:g} points of the most "
                "accurate one has any; time the sweep (--timed), or choose by accuracy or knee"
            )
        return max(fast, key=lambda pair: (pair[0], pair[1].accuracy))[1]
    by_place = {(candidate.accuracy, candidate.tpf): candidate for candidate in reversed(candidates)}
    return by_place[knee([(candidate.accuracy, candidate.tpf) for candidate in candidates])]


def knee(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The knee of (accuracy, TPF) points, as the first lines of this file define it."""
    front = pareto_points(SpeedPoint(decoding={}, accuracy=accuracy, tpf=tpf) for accuracy, tpf in points)
    slowest, fastest = front[0], front[-1]
    if len(front) == 1:
        return slowest.accuracy, slowest.tpf

    def above_chord(point: SpeedPoint) -> float:
        """Proportional to the distance: the chord goes from (0, 1) to (1, 0)."""
        share = (point.tpf - slowest.tpf) / (fastest.tpf - slowest.tpf)
        return share + (point.accuracy - fastest.accuracy) / (slowest.accuracy - fastest.accuracy)

    best = max(front, key=lambda point: (round(above_chord(point), 9), point.accuracy))
    return best.accuracy, best.tpf


def decoding_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored configuration that are set."""
    return {name: value for name, value in config.items() if value is not None}
