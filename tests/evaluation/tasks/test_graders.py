"""What counts as a right answer."""

import json

import pytest

from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.evaluation.tasks.kinds import mathematics
from mbd_core.evaluation.tasks.kinds.task import Problem

STUB = 'def double(x):\n    """Twice x."""\n'
TESTS = json.dumps({"preamble": STUB, "tests": "def check(f):\n    assert f(4) == 8\n", "check": "check"})
CODE = Problem(problem_id="p", prompt=STUB, reference=TESTS, entry_point="double")


def test_the_task_s_rule_decides_and_both_extractions_are_kept() -> None:
    problem = Problem(problem_id="p", prompt="?", reference="5")
    found = {name: TASKS[name].grade(problem, "first 4\n#### 4\nor 5") for name in ("gsm-mini", "gsm8k")}
    assert (found["gsm-mini"].correct, found["gsm8k"].correct) == (False, True)
    for result in found.values():
        assert (result.strict, result.flexible) == ("4", "5")
        assert (result.strict_correct, result.flexible_correct) == (False, True)


@pytest.mark.parametrize(
    "answer",
    [
        'def double(x):\n    return 2 * x\n\nn = int(input("Number: "))\nprint(double(n))',
        'def double(x):\n    return 2 * x\n\ndata = open("in.txt").read()',
        "from argparse import ArgumentParser\nparser = ArgumentParser()\nparser.add_argument('x')\n\n"
        "def double(x):\n    return 2 * x\n\nargs = parser.parse_args()",
        "from __future__ import annotations\nfrom typing import List\n\ndef double(x: List) -> int:\n    return 2 * x",
    ],
)
def test_a_function_is_graded_whatever_stands_around_it(answer: str) -> None:
    mbpp = TASKS["mbpp"].problem("1", {"task_id": 2, "text": "Twice x.", "test_list": ["assert double(4) == 8"]})
    stub = "from typing import List\n\n" + STUB
    humaneval = Problem(problem_id="p", prompt=stub, reference=TESTS, entry_point="double")
    for task, problem in (("humaneval", humaneval), ("mbpp", mbpp)):
        result = TASKS[task].grade(problem, f"The function:\n```python\n{answer}\n```")
        assert (result.reason, result.detail) == ("passed", ""), task


def test_a_chain_of_thought_is_read_behind_its_own_mark() -> None:
    problem = Problem(problem_id="p", prompt="?", reference="1021")
    text = "15 + 6 = 21, and 1,000 more. The answer is $1,021."
    for name, strict in (("gsm8k-cot", True), ("gsm8k", False)):
        result = TASKS[name].grade(problem, text)
        assert (result.correct, result.strict_correct) == (True, strict)
    late = TASKS["gsm8k-cot"].grade(problem, "The answer is 7.\nNo: the answer is 1021. The answer is 1021.")
    assert (late.correct, late.strict_correct) == (True, False)


def test_an_expression_is_right_in_any_notation_and_strict_wants_a_box() -> None:
    problem = Problem(problem_id="p", prompt="?", reference=r"\frac{3}{4}")
    boxed, plain, wrong = (
        TASKS["math500"].grade(problem, text) for text in (r"\boxed{0.75}", "The answer is $3/4$.", r"\boxed{3/5}")
    )
    assert (boxed.correct, boxed.strict_correct, boxed.strict) == (True, True, "0.75")
    assert (plain.correct, plain.strict_correct, plain.strict) == (True, False, None)
    assert (wrong.correct, wrong.strict_correct, wrong.reason) == (False, False, "wrong")


@pytest.mark.parametrize("task", ["gsm-mini", "gsm8k", "math500", "code-mini"])
@pytest.mark.parametrize("text", ["#### " + "7" * 5000, r"\boxed{" * 200, "\0\ud800", "(" * 50_000, ""])
def test_no_text_breaks_a_grader(task: str, text: str) -> None:
    problem = CODE if task == "code-mini" else Problem(problem_id="p", prompt="?", reference="7")
    result = TASKS[task].grade(problem, text)
    assert not result.correct and result.reason != "passed"


def test_what_a_grader_raises_is_a_grade_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(mathematics, "judge_answer", crash)
    result = TASKS["gsm8k"].grade(Problem(problem_id="p", prompt="?", reference="7"), "7")
    assert (result.correct, result.reason, result.detail) == (False, "ungradable", "RecursionError: too deep")


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("    return 2 * x\n", True),
        ("    return 2 * x\n\nThis doubles x.\n", True),
        (f"```python\n{STUB}    return 2 * x\n```", True),
        (f"Sure:\n\n```python\n{STUB}    return 2 * x\n```\nDone. It is `double(2)`.", True),
        ("```\n    return x * x\n```", False),
    ],
)
def test_code_in_every_layout_is_run(text: str, correct: bool) -> None:
    assert TASKS["code-mini"].grade(CODE, text).correct == correct
