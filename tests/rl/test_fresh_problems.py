"""Which problems a run learns from: new ones in each iteration, none that a model was trained on or is judged by."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from rl_runs import ENGINE, finish, tiny_run

from mbd_core.multitf.data.prepared import TinyData, conversations
from mbd_core.multitf.recipes.shipped import LEDGER_BD, LEDGER_MBD
from mbd_core.rl.config import HeldOutConfig, as_recorded, other_settings
from mbd_core.rl.recipes import TINY_RL
from mbd_core.rl.rollouts import RolloutPlan

ITERATIONS = 20


def asked(plan: RolloutPlan) -> list[str]:
    """The problem of each group of all iterations."""
    return [
        row["prompt"]
        for n in range(ITERATIONS)
        for _, part in plan.parts(n)
        for row in part.to_pylist()[:: plan.recipe.rollouts.group]
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_problems_are_new_to_the_model_and_to_each_iteration(seed: int) -> None:
    plan = RolloutPlan.of(replace(TINY_RL, seed=seed, iterations=ITERATIONS), ENGINE)
    problems = asked(plan)
    assert len(set(problems)) == len(problems) == ITERATIONS * plan.recipe.rollouts.prompts
    trained = set()
    for recipe in (LEDGER_BD, LEDGER_MBD):
        assert isinstance(recipe.data, TinyData)
        trained |= {question for question, _ in conversations(recipe.data)}
    assert plan.held_out is not None
    held_out = {problem.prompt for task in plan.held_out.tasks for problem in task.problems}
    assert held_out and not trained & set(problems) and not held_out & (trained | set(problems))
    assert plan.describe() == (
        f"problems: generated: split train, seed {1_000_000 + seed}, 4 new ones in each iteration; "
        f"held out: generated: split valid, seed {seed}"
    )


def test_a_run_may_draw_from_the_stream_that_training_reads() -> None:
    recipe = replace(TINY_RL, seed=1, rollouts=replace(TINY_RL.rollouts, fresh_problems=False))
    plan = RolloutPlan.of(replace(recipe, iterations=ITERATIONS), ENGINE)
    assert isinstance(LEDGER_MBD.data, TinyData)
    assert asked(plan) == [question for question, _ in islice(conversations(LEDGER_MBD.data), len(asked(plan)))]
    assert "seed 1," in plan.describe()


def test_a_run_of_before_is_not_gone_on_with_under_other_problems() -> None:
    recorded = as_recorded(TINY_RL)
    del recorded["rollouts"]["fresh_problems"]
    assert "fresh_problems" in other_settings(recorded, TINY_RL)
    before = replace(TINY_RL, rollouts=replace(TINY_RL.rollouts, fresh_problems=False))
    assert other_settings(recorded, before) == ""


def test_a_run_says_where_its_problems_come_from(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=1, held_out=HeldOutConfig(evaluate_every=0))
    finish(replace(recipe, rollouts=replace(recipe.rollouts, fresh_problems=True)), tmp_path / "run")
    assert "problems: generated: split train, seed 1000000, 2 new ones in each iteration; none are held out" in (
        capsys.readouterr().out
    )


def test_more_held_out_problems_than_a_file_has_are_refused(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(tmp_path / "rows.jsonl")
    rollouts = replace(TINY_RL.rollouts, task="gsm8k", data=data, max_tokens=8)
    recipe = replace(TINY_RL, rollouts=rollouts, held_out=HeldOutConfig(held_out_data=data, held_out=9))
    with pytest.raises(ValueError, match=r"held_out=9 is more than the 8 problems of .*; give at most 8"):
        RolloutPlan.of(recipe, ENGINE)


def test_a_run_says_how_many_held_out_problems_it_learns_from(tmp_path: Path) -> None:
    for name, numbers in (("train", range(8)), ("valid", range(6, 12))):
        rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, held_out = (str(tmp_path / f"{name}.jsonl") for name in ("train", "valid"))
    rollouts = replace(TINY_RL.rollouts, task="gsm8k", data=data, max_tokens=8)
    recipe = replace(TINY_RL, rollouts=rollouts, held_out=HeldOutConfig(held_out_data=held_out))
    assert RolloutPlan.of(recipe, ENGINE).describe().endswith(", of whose 6 problems 2 are learned from too")
