"""What counts as a right answer."""

from mbd_core.evaluation.graders import grade
from mbd_core.evaluation.tasks import TASKS, Problem


def test_the_task_s_rule_decides_and_both_extractions_are_kept() -> None:
    problem = Problem(problem_id="p", prompt="?", reference="5")
    found = {name: grade(TASKS[name], problem, "first 4\n#### 4\nor 5") for name in ("gsm-mini", "gsm8k")}
    assert (found["gsm-mini"].correct, found["gsm8k"].correct) == (False, True)
    for result in found.values():
        assert (result.strict, result.flexible) == ("4", "5")
        assert (result.strict_correct, result.flexible_correct) == (False, True)
