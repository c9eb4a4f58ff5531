"""How much of an update is signal: what is published is the report of its numbers, and a measurement in small."""

import shutil
from pathlib import Path

import pytest

from research.rl.signal import PLOT, RECORD, REPORT, REWARDS, TEACHER, SignalSize, equal_parts, main, measure, report

PUBLISHED = Path(__file__).resolve().parents[3] / "research" / "published" / "signal"


def test_the_published_report_is_that_of_its_numbers(tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / RECORD, tmp_path)
    assert report(tmp_path) == (PUBLISHED / REPORT).read_text()
    assert (tmp_path / PLOT).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("cosines", "number"),
    [
        ((0.5, 0.5, 0.5), "100"),
        ((0.0, 0.0, 0.3), "more than 230"),  # a mean of 0.1 and a standard error of 0.1: at most 0.3
        ((0.5,), "-"),
        ((0.9, 0.1), "-"),
        ((-0.5, -0.5), "-"),
    ],
)
def test_pairs_give_a_number_a_bound_or_nothing(cosines: tuple[float, ...], number: str) -> None:
    assert equal_parts(100, cosines) == number


@pytest.mark.slow  # it draws 96 answers
def test_likelihood_and_teacher_have_more_signal_than_rewards() -> None:
    objectives = measure(SignalSize(sets=2, problems=6))
    assert set(objectives) == {*REWARDS, TEACHER}
    means = {name: numbers["cosines"][0] for name, numbers in objectives.items()}
    assert all(len(numbers["norms"]) == 2 and min(numbers["norms"]) > 0 for numbers in objectives.values())
    assert min(means["likelihood of right answers"], means[TEACHER]) > max(means["correctness"], means["both"])
    assert objectives["likelihood of right answers"]["sharpens"][0] > 0.2


def test_one_set_has_no_other_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "--sets", "1"]) == 2
    assert "sets" in capsys.readouterr().err


def test_numbers_are_neither_overwritten_nor_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--report-only"]) == 2
    assert "measure first" in capsys.readouterr().err
    shutil.copy(PUBLISHED / RECORD, tmp_path)
    assert main(["--out", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / RECORD).read_bytes() == (PUBLISHED / RECORD).read_bytes()
