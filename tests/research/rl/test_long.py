"""Ten thousand and a hundred thousand answers: equal sizes, one subject an arm, and a report that is of its rows."""

import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from mbd_core.multitf.data.prepared import TinyData
from mbd_core.rl.config import RLRecipe
from research.ledger.plan import PLOT, REPORT, ROWS
from research.rl.long import main
from research.rl.long_arms import A_LARGE, A_TENTH, ANSWERS, LONG_ARMS, SOLUTIONS, STARTS, TEACHER, A
from research.rl.long_report import CURVES, NAMES, report
from research.rl.report import TRAINING

PUBLISHED = Path(__file__).resolve().parents[3] / "research" / "published" / "long"
SUBJECTS = {
    "tenth-B": {"rewards", "groups"},
    "tenth-C": {"states"},
    "tenth-E": {"groups"},
    "tenth-F": {"groups"},
    "taught-A": {"model"},
}


def test_arms_see_equally_many_answers() -> None:
    rewarded = [arm for arm in LONG_ARMS.values() if isinstance(arm, RLRecipe)]
    answers = {arm.name: arm.answers * arm.iterations for arm in rewarded}
    assert answers.pop(A.name) == answers.pop(A_LARGE.name) == 10 * ANSWERS
    assert {*answers.values()} == {ANSWERS} == {10_240}
    assert SOLUTIONS.train.batch_size * SOLUTIONS.train.steps == ANSWERS
    assert isinstance(SOLUTIONS.data, TinyData) and SOLUTIONS.data.per_task == ANSWERS
    assert set(NAMES) == {*STARTS, *LONG_ARMS}


@pytest.mark.parametrize("name", SUBJECTS)
def test_an_arm_differs_from_a_in_its_subject_alone(name: str) -> None:
    differing = {
        f.name for f in fields(A_TENTH) if repr(getattr(LONG_ARMS[name], f.name)) != repr(getattr(A_TENTH, f.name))
    }
    assert differing == SUBJECTS[name] | {"name"}


def test_an_unknown_arm_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "--arms", "tenth-X"]) == 2
    assert f"tenth-X is no arm; choose of {TEACHER.name}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_published_report_is_that_of_its_rows(tmp_path: Path) -> None:
    for name in (ROWS, TRAINING):
        shutil.copy(PUBLISHED / name, tmp_path)
    assert report(tmp_path) == (PUBLISHED / REPORT).read_text()
    assert min((tmp_path / name).stat().st_size for name in (PLOT, CURVES)) > 10_000
