"""The grader gives no wrong verdict on right and wrong texts of our own golds; the command counts what it gives."""

import json
from pathlib import Path

import pytest

from benchmarks.graded_texts import OWN_GOLDS
from benchmarks.graders import FILES, count, graders, kinds_of, load_golds, totals
from mbd_core.evaluation.tasks.answers.math_judge import MathAnswer, MathJudge

KINDS = {task: list(kinds_of(task, golds, number=6, seed=1)) for task, golds in OWN_GOLDS.items()}


@pytest.mark.parametrize("task", KINDS)
def test_no_verdict_is_wrong(task: str) -> None:
    judge = MathJudge()
    failures = [(kind.name, *failure) for kind in KINDS[task] for failure in count(kind, judge, alone=False)[1]]
    judge.close()
    assert not failures


def test_every_kind_of_right_and_wrong_text_has_the_texts_that_the_seed_draws() -> None:
    kinds = KINDS["math500"]
    assert len(kinds) > 80 and all(len(kind.texts) == 6 for kind in kinds)
    assert kinds == list(kinds_of("math500", OWN_GOLDS["math500"], number=6, seed=1))
    assert kinds != list(kinds_of("math500", OWN_GOLDS["math500"], number=6, seed=2))


class _SaysRight(MathJudge):
    def judge(self, gold: str, text: str) -> MathAnswer:
        return MathAnswer(answer=gold, correct=True)


def test_false_rights_and_false_wrongs_are_counted_apart() -> None:
    rows = [count(kind, _SaysRight(), alone=False)[0] for kind in KINDS["gsm8k"]]
    sums = totals(rows, "gsm8k")
    assert (sums["false_wrongs"], sums["false_wrongs_alone"]) == (0, None)
    assert sums["false_rights"] == sums["wrong"] > 0


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", " holds no rows"),
        ('{"answer": "#### 5"}\n{"question": "q"}\n', ", line 2: answer must be a text"),
        ('{"answer": "#### 5"}\n[5]\n', ", line 2: a list, not a JSON object"),
        ('{"answer": "#### 5"}\n{"answer\n', ", line 2: it is not valid JSON"),
    ],
)
def test_a_bad_file_of_golds_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, fault: str
) -> None:
    file = tmp_path / FILES["gsm8k"]
    file.parent.mkdir()
    file.write_text(content)
    assert graders(["--data-dir", str(tmp_path)]) == 2
    assert f"{file}{fault}" in capsys.readouterr().err


def test_a_gold_may_hold_any_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / FILES["gsm8k"]
    file.parent.mkdir()
    file.write_text(json.dumps({"answer": "one\u2028two #### 5"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_golds("gsm8k", tmp_path) == ["5"]
