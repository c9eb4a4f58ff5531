"""The numbers of an iteration, the line that shows its progress, and the picture of a run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mbd_core.evaluation.measures.rates import Summary
from mbd_core.multitf.run.loss_plot import COLOURS
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.groups import REASONS, Reason, RewardedAnswer, num_even, weighted_sum
from mbd_core.rl.parts import CORRECT, TPF
from mbd_core.rl.rows import ScoredRow

RecordedNumbers = dict[str, Any]
"""The numbers of an iteration, or of a point of the front, as the run's record has them."""
MOST_SHOWN = 3  # reasons for answers without a reward, in a sentence
MOST_MARKED = 30  # points of a curve that are marked each


def rollout_numbers(
    rows: Sequence[ScoredRow], answers: Sequence[RewardedAnswer], weights: Mapping[str, float]
) -> dict[str, Any]:
    """Statistics of an iteration's rollouts. `rows` have their scores; `answers` are the decoded answers, at least one
    of them with a reward.

    reward         the mean of the weighted sum; `reward_*` the mean of each part, over the answers that have it
    unrewarded     number of answers without any reward
    failed         number of answers whose function or service failed; `failures` has the reasons
    correct, tpf   means over answers; `tpf_range` is the mean over groups of the largest TPF less the smallest
    tokens_each    useful tokens of an answer, on average
    eos, overlong  shares of the answers; `undecoded` is a number
    """
    decoded = [row for row in rows if row["error"] is None]
    groups: dict[int, list[float]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer.tpf)
    rewarded = [answer for answer in answers if answer.is_rewarded]
    given = {name: [value for answer in rewarded if (value := answer.rewards[name]) is not None] for name in weights}
    failures = failure_texts(rows)
    return {
        "rollouts": len(rows),
        "undecoded": len(rows) - len(decoded),
        "unrewarded": len(answers) - len(rewarded),
        "failed": sum(failures.values()),
        **({"failures": failures} if failures else {}),
        "reward": fmean(weighted_sum(answer.rewards, weights) for answer in rewarded) if rewarded else 0.0,
        **{f"reward_{_plain(name)}": fmean(values) for name, values in given.items() if values},
        "correct": fmean(answer.correct for answer in answers),
        "tpf": fmean(answer.tpf for answer in answers),
        "tpf_range": fmean(max(tpfs) - min(tpfs) for tpfs in groups.values()),
        "tokens_each": fmean(row["num_tokens"] for row in decoded),
        "forwards_each": fmean(row["num_forwards"] for row in decoded),
        "eos": fmean(row["finish_reason"] == "stop" for row in decoded),
        "overlong": fmean(row["overlong"] for row in decoded),
    }


def failure_texts(rows: Iterable[ScoredRow]) -> dict[str, int]:
    """The reasons why answers got no reward, each with its number of answers; without the answers' names."""
    texts = (failure.rpartition(", for an answer to ")[0] for row in rows if (failure := row.get("failure")))
    return dict(Counter(texts).most_common())


def failures_text(failures: Mapping[str, int]) -> str:
    """The failures in words; rarer failures are only counted."""
    shown = [text + (f" ({number} times)" if number > 1 else "") for text, number in failures.items()]
    more = len(shown) - MOST_SHOWN
    return "; ".join(shown[:MOST_SHOWN]) + (f"; and {more} other reasons" if more > 0 else "")


def group_numbers(
    answers: Sequence[RewardedAnswer], dropped: Mapping[Reason, int], taught: Mapping[int, float], *, num_groups: int
) -> dict[str, float]:
    """The numbers of groups, of groups dropped by reason, and of answers to learn from. The rewards of `even` groups
    teach nothing."""
    return {
        "groups": num_groups,
        **{f"groups_dropped_{reason}": dropped.get(reason, 0) for reason in REASONS},
        "groups_even": num_even(answers, taught),
        "answers_learned": len(taught),
        "advantage_max": max(taught.values(), default=0.0),
    }


def front_line(iteration: int, threshold: float, summary: Summary) -> dict[str, float]:
    """A point of a held-out front: `accuracy` as a share with its interval, and the mean TPF with its standard
    error."""
    return {
        "iteration": iteration,
        "tau_m2t": threshold,
        "problems": summary.n,
        "accuracy": summary.accuracy / 100,
        "accuracy_low": summary.accuracy_low / 100,
        "accuracy_high": summary.accuracy_high / 100,
        "tpf": summary.tpf or 0.0,
        "tpf_stderr": summary.tpf_stderr or 0.0,
    }


def front_value(lines: Sequence[RecordedNumbers]) -> float:
    """How good the points of one front are together: the mean of accuracy times TPF."""
    return fmean(line["accuracy"] * line["tpf"] for line in lines)


def sweeps_since_best(fronts: Sequence[RecordedNumbers]) -> int:
    """The number of sweeps since the sweep with the best front, the first of equal fronts; 0 if it is the last, or
    without sweeps."""
    values = [front_value(lines) for lines in _by_sweep(fronts).values()]
    return len(values) - 1 - values.index(max(values)) if values else 0


def _by_sweep(fronts: Sequence[RecordedNumbers]) -> dict[int, list[RecordedNumbers]]:
    """The points of each front, by the number of iterations before its sweep, in order."""
    swept = sorted({line["iteration"] for line in fronts})
    return {iteration: [line for line in fronts if line["iteration"] == iteration] for iteration in swept}


SINCE_START = "seconds_since_start"
"""The seconds of a run up to an iteration's end, sweeps and checkpoints before it included."""


def run_seconds(lines: Sequence[RecordedNumbers]) -> float:
    """The seconds of a run up to its last iteration's end; older records have the seconds of each iteration."""
    return lines[-1].get(SINCE_START, sum(line["seconds"] for line in lines)) if lines else 0.0


def ended_by(recipe: RLRecipe, lines: Sequence[RecordedNumbers], fronts: Sequence[RecordedNumbers]) -> str | None:
    """Which limit of the recipe ends a run with these iterations and sweeps, in words."""
    drawn, seconds, since = len(lines) * recipe.answers, run_seconds(lines), sweeps_since_best(fronts)
    if 0 < recipe.max_rollouts <= drawn:
        return f"{drawn} answers were drawn (--max-rollouts {recipe.max_rollouts})"
    if 0 < recipe.max_seconds <= seconds:
        return f"it took {seconds:.1f} seconds (--max-seconds {recipe.max_seconds:g})"
    if 0 < recipe.held_out.patience <= since:
        return f"{since} sweeps in a row had no better front (--patience {recipe.held_out.patience})"
    return None


def progress_line(line: RecordedNumbers, iterations: int, seconds_each: float) -> str:
    """An iteration in one line."""
    left = (iterations - line["iteration"] - 1) * seconds_each
    learned = f"{line['answers_learned']} of {line['rollouts']} answers"
    loss = f"loss {line['loss']:+.4f}" if "loss" in line else "nothing to learn from"
    if "d_mean" in line:
        loss += f"  |d| {line['d_mean']:.1e}"
    return (
        f"iteration {line['iteration'] + 1}/{iterations}  reward {line['reward']:.3f}  "
        f"right {line['correct']:.3f}  TPF {line['tpf']:.2f}  {learned}  {loss}  "
        f"{line['seconds_rollouts']:.1f} + {line['seconds_scores']:.1f} + {line['seconds_update']:.1f} s  "
        f"ETA {left // 60:.0f} min {left % 60:02.0f} s"
    )


HELD_OUT_FRONT = "held-out front"
PANELS: tuple[dict[str, dict[str, str]], ...] = (
    {
        "reward": {"reward": ""},
        "right answers": {"correct": "rollouts", "held_out_accuracy": "held out"},
        "tokens per forward": {"tpf": "rollouts", "held_out_tpf": "held out"},
    },
    {
        "entropy": {"entropy": ""},
        "KL divergence": {"kl_old": "to the rollouts' policy", "kl_reference": "to the reference"},
        "divergence from the teacher": {"divergence": ""},
        "agreement with the rollouts": {"agreement": ""},
    },
    {
        "|d|, learner minus engine": {"d_mean": ""},
        "share of clipped tokens": {"clip_share": ""},
        "answers": {"rollouts": "drawn", "answers_learned": "learned from"},
    },
)
"""Rows of panels, of answers, policy and learner: titles, and a panel's numbers with their labels."""


def draw_progress(
    lines: Sequence[RecordedNumbers], fronts: Sequence[RecordedNumbers], path: Path, *, title: str
) -> None:
    """Write the picture of a run as PNG."""
    progress_figure(lines, fronts, title=title).savefig(path, format="png", dpi=110)


def progress_figure(lines: Sequence[RecordedNumbers], fronts: Sequence[RecordedNumbers], *, title: str) -> Figure:
    """The panels of a run's numbers over iterations, and its first and last held-out fronts.

    A panel appears if some iteration has one of its numbers; what is missing or not finite is left out. The parts of a
    reward share a panel, without right answers and TPF, which have their own.
    """
    sweeps = _by_sweep(fronts)
    curves = _curves(lines, sweeps)
    parts = [name.removeprefix("reward_") for name in curves if name.startswith("reward_")]
    of_parts = {f"reward_{part}": part for part in parts if part not in (CORRECT, TPF)}
    shown = [
        [(head, names) for head, names in row.items() if names.keys() & curves.keys()]
        for row in (PANELS[0] | {"parts of the reward": of_parts}, *PANELS[1:])
    ]
    shown[0] += [(HELD_OUT_FRONT, {})] if sweeps else []
    rows = [row for row in shown if row]
    num_columns = max(map(len, rows))
    figure = Figure(figsize=(3.4 * num_columns, 0.4 + 2.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, row in enumerate(rows):
        for place, (head, names) in enumerate(row, start=number * num_columns + 1):
            panel = figure.add_subplot(len(rows), num_columns, place)
            if head == HELD_OUT_FRONT:
                _draw_fronts(panel, sweeps)
            else:
                _draw_curves(panel, {label: curves[name] for name, label in names.items() if name in curves})
            panel.grid(alpha=0.3)
            labels = panel.get_legend_handles_labels()[1]
            panel.set_title(f"{head}: {labels[0]}" if len(labels) == 1 else head, fontsize="medium")
            if len(labels) > 1:
                panel.legend(fontsize="x-small")
    return figure


def _curves(
    lines: Sequence[RecordedNumbers], sweeps: Mapping[int, Sequence[RecordedNumbers]]
) -> dict[str, list[tuple[int, float]]]:
    """Each number's finite values, behind the iterations done at each; held-out numbers are means of a sweep."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float) and isfinite(value):
                curves.setdefault(name, []).append((line["iteration"] + 1, value))
    for done, points in sweeps.items():
        for name in ("accuracy", "tpf"):
            curves.setdefault(f"held_out_{name}", []).append((done, fmean(point[name] for point in points)))
    return curves


def _draw_curves(panel: Axes, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for number, (label, points) in enumerate(curves.items()):
        marker = "." if len(points) <= MOST_MARKED else None
        panel.plot(*zip(*points, strict=True), color=COLOURS[number % len(COLOURS)], label=label, marker=marker)
    panel.set_xlabel("iteration", fontsize="small")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_fronts(panel: Axes, sweeps: Mapping[int, Sequence[RecordedNumbers]]) -> None:
    for number, iteration in enumerate(dict.fromkeys((min(sweeps), max(sweeps)))):
        points = sorted((point["tpf"], point["accuracy"]) for point in sweeps[iteration])
        label = f"after {iteration} iterations"
        panel.plot(*zip(*points, strict=True), color=COLOURS[number], marker="os"[number], label=label)
    panel.set_xlabel("tokens per forward", fontsize="small")
    panel.set_ylabel("right answers", fontsize="small")


def _plain(name: str) -> str:
    """A part of the reward as a part of a number's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")
