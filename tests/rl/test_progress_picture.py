"""The picture of a run has the panels whose numbers the run has."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rl_runs import DIGITS, finish, number_lines, tiny_run

from mbd_core.multitf.config import TeacherSettings
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.config import HeldOutConfig
from mbd_core.rl.folder import HELD_OUT, PLOT
from mbd_core.rl.record import draw_progress, progress_figure
from mbd_core.rl.rewards import RewardConfig

POLICY = ["entropy", "KL divergence: to the rollouts' policy"]
LEARNER = ["|d|, learner minus engine", "share of clipped tokens", "answers"]
ANSWERS = ["reward", "right answers: rollouts", "tokens per forward: rollouts"]


def figure_of(run: Path) -> Figure:
    fronts = number_lines(run, HELD_OUT) if (run / HELD_OUT).exists() else []
    return progress_figure(number_lines(run), fronts, title="a run")


def titles(figure: Figure) -> list[str]:
    return [panel.get_title() for panel in figure.axes]


def legends(figure: Figure) -> dict[str, list[str]]:
    return {
        panel.get_title(): [text.get_text() for text in legend.get_texts()]
        for panel in figure.axes
        if (legend := panel.get_legend())
    }


def test_a_rewarded_run_shows_its_parts_its_fronts_and_both_divergences(tiny_model_dir: Path, tmp_path: Path) -> None:
    recipe = tiny_run(
        tiny_model_dir,
        iterations=2,
        rewards=RewardConfig(rewards={"correct": 1.0, "tpf": 1.0} | DIGITS),
        objective=PolicyObjective(kl=0.1),
        held_out=HeldOutConfig(evaluate_every=1, held_out=2, thresholds=(0.4, 0.9)),
    )
    finish(recipe, tmp_path / "run")
    figure = figure_of(tmp_path / "run")
    answers = ["reward", "right answers", "tokens per forward", "parts of the reward: rl_rewards_digits"]
    assert titles(figure) == [*answers, "held-out front", "entropy", "KL divergence", *LEARNER]
    assert legends(figure) == {
        "right answers": ["rollouts", "held out"],
        "tokens per forward": ["rollouts", "held out"],
        "held-out front": ["after 0 iterations", "after 2 iterations"],
        "KL divergence": ["to the rollouts' policy", "to the reference"],
        "answers": ["drawn", "learned from"],
    }
    held_out = figure.axes[1].lines[1]
    fronts = number_lines(tmp_path / "run", HELD_OUT)
    means = [sum(line["accuracy"] for line in fronts if line["iteration"] == done) / 2 for done in range(3)]
    assert list(held_out.get_xdata()) == [0, 1, 2] and list(held_out.get_ydata()) == means


def test_a_resumed_run_without_a_reference_has_the_picture_of_the_whole_run(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    finish(tiny_run(tiny_model_dir, iterations=2), tmp_path / "run")
    before = (tmp_path / "run" / PLOT).read_bytes()
    finish(tiny_run(tiny_model_dir), tmp_path / "run", resume=True)
    finish(tiny_run(tiny_model_dir), tmp_path / "whole")
    assert titles(figure_of(tmp_path / "run")) == [*ANSWERS, *POLICY, *LEARNER]
    assert list(figure_of(tmp_path / "run").axes[0].lines[0].get_xdata()) == [1, 2, 3]
    drawn = (tmp_path / "run" / PLOT).read_bytes()
    assert drawn == (tmp_path / "whole" / PLOT).read_bytes() != before


def test_a_distillation_shows_the_teacher_and_no_difference_from_the_engine(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=2)
    teacher = TeacherSettings(model=str(tiny_model_dir), reads="blocks")
    finish(replace(recipe, train=replace(recipe.train, teacher=teacher)), tmp_path / "run")
    figure = figure_of(tmp_path / "run")
    assert titles(figure) == [*ANSWERS, "divergence from the teacher", "agreement with the rollouts", "answers"]


@pytest.mark.usefixtures("rendered_pictures")
def test_values_that_are_missing_or_not_finite_are_left_out(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"reward": 1.0, "correct": 0.5, "tpf": 2.0, "rollouts": 8, "answers_learned": 8}
    changes = [
        {"entropy": 0.5, "d_mean": None, "failures": {"a service": 2}},
        {"entropy": math.nan, "d_mean": None, "kl_old": math.inf},
        {"entropy": 0.4, "answers_learned": 0},
        {},
    ]
    texts = [json.dumps({"iteration": n} | whole | change) for n, change in enumerate(changes)]
    lines = [json.loads(text) for text in texts]
    figure = progress_figure(lines, [], title="a run")
    assert titles(figure) == [*ANSWERS, "entropy", "answers"]
    entropy, learned = figure.axes[3].lines[0], figure.axes[4].lines[1]
    assert list(zip(entropy.get_xdata(), entropy.get_ydata(), strict=True)) == [(1, 0.5), (3, 0.4)]
    assert list(learned.get_ydata()) == [8, 8, 0, 8]
    draw_progress(lines, [], tmp_path / PLOT, title="a run")
    assert (tmp_path / PLOT).stat().st_size > 1000
