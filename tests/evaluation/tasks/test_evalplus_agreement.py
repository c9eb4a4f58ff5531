"""Verdicts beside those of EvalPlus itself, on canonical and corrupted programs, as `evalplus.evaluate` gives them.

EvalPlus brings packages that this project does without: install it elsewhere (`pip install evalplus==0.3.1`) and put
its `evalplus.evaluate` on PATH.
`pytest tests/evaluation/tasks/test_evalplus_agreement.py -rP -m "slow or not slow"` prints the counts of
benchmarks/README.md.
"""

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from program_corruptions import corruptions

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.task import Problem
from mbd_core.evaluation.tasks.problems import load_problems

DATA = Path(__file__).resolve().parents[4] / "shared" / "benchmarks"
FILES = {
    "humaneval-plus": "humaneval_plus/HumanEvalPlus.jsonl.gz",
    "mbpp-plus": "mbpp_plus/MbppPlus.jsonl.gz",
}
HEAVY = (
    *(f"HumanEval/{n}" for n in (15, 36, 59, 94, 130, 139)),
    *(f"Mbpp/{n}" for n in (123, 255, 271, 392, 583, 589, 592, 599, 603, 630)),
)  # minutes, each compared by itself
# EvalPlus skips its own count of a right root in the first; an input of the second returns a gigabyte.
UNEQUAL = {"HumanEval/32 canonical", "Mbpp/255 canonical"}


@pytest.fixture(scope="module")
def evalplus() -> str:
    command = shutil.which("evalplus.evaluate")
    if command is None:
        pytest.skip("no evalplus.evaluate on PATH")
    return command


def all_rows(task: str) -> list[dict[str, Any]]:
    path = DATA / FILES[task]
    if not path.exists():
        pytest.skip(f"no benchmark data at {path}")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def programs(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    canonical = row["prompt"] + row["canonical_solution"]
    yield "canonical", canonical
    yield from corruptions(canonical)


def verdicts(command: str, task: str, folder: Path, samples: list[tuple[str, str, str]]) -> list[tuple[bool, bool]]:
    """EvalPlus's base and plus verdicts of the samples (problem, name, program) on the problems in `folder`."""
    lines = [json.dumps({"task_id": problem, "solution": program}) for problem, _, program in samples]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    dataset = task.removesuffix("-plus")
    environment = {
        **os.environ,
        f"{dataset.upper()}_OVERRIDE_PATH": str(folder / "problems.jsonl"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": "",
    }
    arguments = ["--dataset", dataset, "--samples", str(folder / "samples.jsonl"), "--parallel", "1"]
    done = subprocess.run([command, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((folder / "samples_eval_results.json").read_text())["eval"]
    places = {problem: iter(results) for problem, results in found.items()}
    results = [next(places[problem]) for problem, _, _ in samples]
    base = [result["base_status"] == "pass" for result in results]
    return [(one, one and result["plus_status"] == "pass") for one, result in zip(base, results, strict=True)]


def unequal_verdicts(command: str, task: str, rows: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """The programs of these problems on which the two graders differ, with both verdicts."""
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems: dict[str, Problem] = {
        one.problem_id: one for one in load_problems(find_task(task), data=str(folder / "problems.jsonl")).problems
    }
    samples = [(row["task_id"], name, program) for row in rows for name, program in programs(row)]
    theirs = verdicts(command, task, folder, samples)
    with ThreadPoolExecutor(min(2, len(rows))) as pool:  # a heavy problem's programs run alone
        graded = list(pool.map(lambda one: find_task(task).grade_program(problems[one[0]], one[2]), samples))
    ours = [(bool(one.base_correct), bool(one.plus_correct)) for one in graded]
    unequal = {
        f"{problem} {name}": f"here {here}, EvalPlus {there}"
        for (problem, name, _), here, there in zip(samples, ours, theirs, strict=True)
        if here != there
    }
    subject = task if len(rows) > 1 else rows[0]["task_id"]
    print(
        f"{subject}: {len(samples) - len(unequal)} of {len(samples)} verdicts equal, base and plus; unequal: {unequal}"
    )
    return unequal


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", FILES)
def test_verdicts_are_those_of_evalplus(evalplus: str, task: str, every: int, tmp_path: Path) -> None:
    rows = [row for row in all_rows(task)[::every] if row["task_id"] not in HEAVY]
    unequal = unequal_verdicts(evalplus, task, rows, tmp_path)
    assert unequal.keys() <= UNEQUAL, unequal


@pytest.mark.slow
@pytest.mark.parametrize("problem", HEAVY)
def test_verdicts_on_a_heavy_problem_are_those_of_evalplus(evalplus: str, problem: str, tmp_path: Path) -> None:
    task = f"{problem.partition('/')[0].lower()}-plus"
    (row,) = (row for row in all_rows(task) if row["task_id"] == problem)
    unequal = unequal_verdicts(evalplus, task, [row], tmp_path)
    assert unequal.keys() <= UNEQUAL, unequal
