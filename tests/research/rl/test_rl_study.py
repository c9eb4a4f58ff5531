"""The study of reinforcement learning: claims judged on rows made by hand, and what is published computed again."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawn_study import study_table

from mbd_core.command_line import Main
from mbd_core.multitf.recipes.recipe import TrainingRecipe, shortened
from mbd_core.rl.config import RLRecipe
from research.ledger.plan import BASE, PLOT, REPORT, ROWS, run_name
from research.ledger.rows import StudyCell, read_table, write_rows
from research.rl import long, study, teacher
from research.rl.arms import ARMS, A, D
from research.rl.report import CLAIMS, SLOTS, TRAINING, ArmClaim, judge, report, training_lines
from research.rl.study import RECORD, ArmStudy, ArmStudySize

TAUS = (0.8, 0.9)


def rows_of(recipes: dict[str, tuple[float, int]], *, seeds: tuple[int, ...] = (1, 2, 3)) -> pa.Table:
    """Rows of each recipe: its accuracy and forwards."""
    cells = {StudyCell(name, SLOTS, tau): numbers for name, numbers in recipes.items() for tau in TAUS}
    return study_table(
        {cell: accuracy for cell, (accuracy, _) in cells.items()},
        {cell: forwards for cell, (_, forwards) in cells.items()},
        seeds=seeds,
    )


def claim(*measures: tuple[str, float | None]) -> ArmClaim:
    return ArmClaim(text="", first="rl-A", second=BASE, measures=measures)  # type: ignore[arg-type]


FASTER, EQUAL = ("tpf", 0.0), ("accuracy", -1.0)


@pytest.mark.parametrize(
    ("recipe", "measures", "verdict"),
    [
        ((0.9, 10), (FASTER, EQUAL), "shown"),
        ((0.1, 10), (FASTER, EQUAL), "contradicted"),
        ((0.5, 10), (FASTER, EQUAL), "not shown"),
        ((0.9, 30), (FASTER, EQUAL), "contradicted"),
        ((0.9, 10), (("aup", 0.0),), "shown"),
        ((0.1, 30), (("aup", 0.0),), "contradicted"),
        ((0.5, 20), (("accuracy", None),), "shown"),
        ((0.9, 20), (("accuracy", None),), "contradicted"),
        ((0.5, 10), (("tpf", None),), "contradicted"),
    ],
)
def test_a_claim_is_judged_by_the_intervals(
    recipe: tuple[float, int], measures: tuple[tuple[str, float | None], ...], verdict: str
) -> None:
    assert judge(claim(*measures), rows_of({BASE: (0.5, 20), "rl-A": recipe})).verdict == verdict


def test_a_claim_is_judged_on_the_seeds_of_both_sides() -> None:
    start, arm = rows_of({BASE: (0.5, 20)}), rows_of({"rl-A": (0.9, 10)}, seeds=(1, 2))
    judged = judge(claim(FASTER), pa.concat_tables([start, arm]))
    assert (judged.num_seeds, judged.verdict) == (2, "not enough seeds")
    assert judged.differences[0].is_above(), "the difference is told all the same"
    assert judge(claim(FASTER), start).verdict == "not enough seeds"


def test_the_report_gathers_the_pieces_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name, numbers in {BASE: (0.5, 20), "rl-A": (0.9, 10)}.items():
        pq.write_table(rows_of({name: numbers}), tmp_path / "rows" / f"{name}.parquet")
    text = report(tmp_path)
    assert "| TPF rises at equal accuracy | tpf > 0 | 3 | +" in text
    assert "| replay matters: A above C | aup > 0 | 0 | - | - | not enough seeds |" in text
    shutil.rmtree(tmp_path / "rows")
    picture = (tmp_path / PLOT).read_bytes()
    assert report(tmp_path) == text == (tmp_path / REPORT).read_text(), "from the gathered rows alone"
    assert (tmp_path / PLOT).read_bytes() == picture


def test_a_model_that_lacks_a_seed_is_compared_on_those_it_has(tmp_path: Path) -> None:
    start, arm = rows_of({BASE: (0.5, 20), "rl-A": (0.5, 20)}), rows_of({"rl-C": (0.9, 10)}, seeds=(1, 2))
    write_rows(tmp_path / ROWS, [start, arm])
    text = report(tmp_path)
    compared, cells = text.split("## All cells")
    assert "| C: all-masked states | 2 | +" in compared and "| A: correctness + TPF, exact states | 3 | " in compared
    assert "C: all-masked" not in cells and "A: correctness" in cells
    write_rows(tmp_path / ROWS, [arm])
    with pytest.raises(ValueError):
        report(tmp_path)


def test_what_training_saw_is_told_by_run_and_by_answer() -> None:
    def line(seed: int, iteration: int, answers: int, entropy: float | None) -> dict[str, float | str | None]:
        numbers = {"answers_learned": answers, "labels": 10 * answers, "tokens": 90 * answers, "entropy": entropy}
        return {"recipe": "rl-A", "seed": seed, "iteration": iteration, "kl_reference": None, "d_max": None} | numbers

    idle = line(2, 1, 0, None) | {"labels": None, "tokens": None}
    lines = [line(1, 0, 4, 0.3), line(1, 1, 2, 0.1), line(2, 0, 4, 0.5), idle]
    assert training_lines(pa.Table.from_pylist(lines), {"rl-A": "A"})[2:] == [
        "| A | 2 | 5 | 450 | 10 | 90 | 0.400 | 0.100 | - | - |"
    ]


def test_every_claim_names_arms_that_are_run() -> None:
    assert {name for claim in CLAIMS for name in (claim.first, claim.second)} <= {BASE, *ARMS}


def test_a_folder_of_another_study_and_one_without_rows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ArmStudy(tmp_path / "a", ARMS, ArmStudySize())
    with pytest.raises(ValueError, match="holds a study of another size or of other arms"):
        ArmStudy(tmp_path / "a", ARMS, ArmStudySize(problems=7))
    with pytest.raises(ValueError, match="holds a study of another size or of other arms"):
        ArmStudy(tmp_path / "a", {"rl-A": A}, ArmStudySize())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ValueError, match="exists already and holds no study"):
        ArmStudy(tmp_path / "mine", ARMS, ArmStudySize())
    (tmp_path / "a" / RECORD).write_text("")
    with pytest.raises(ValueError, match=f"{RECORD} is not valid JSON"):
        ArmStudy(tmp_path / "a", ARMS, ArmStudySize())
    assert study.main(["--out", str(tmp_path / "b"), "--report-only"]) == 2
    assert "cannot be read as rows of a study" in capsys.readouterr().err and not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--taus", "1.5"], "must be a list of numbers from 0 to 1"),
        (["--seeds", str(2**31)], "at most 2147483647"),
        (["--problems", "2000000"], "from 2 to 1000000"),
    ],
)
@pytest.mark.parametrize("main", [study.main, teacher.main, long.main], ids=["rl", "teacher", "long"])
def test_an_option_that_is_refused_claims_no_folder(
    main: Main, option: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), *option]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


PUBLISHED = Path(__file__).resolve().parents[3] / "research" / "published" / "rl"


def test_the_published_report_is_computed_again_from_its_rows(tmp_path: Path) -> None:
    for name in (ROWS, TRAINING):
        shutil.copy(PUBLISHED / name, tmp_path)
    assert report(tmp_path) == (PUBLISHED / REPORT).read_text()
    assert (tmp_path / PLOT).stat().st_size > 10_000


def test_supervised_training_has_as_many_learner_tokens() -> None:
    """Within a tenth of what A's runs really had; an update of MultiTF has 6,640 tokens."""
    lines = [line for line in pq.read_table(PUBLISHED / TRAINING).to_pylist() if line["recipe"] == A.name]
    tokens = sum(line["tokens"] for line in lines) / len({line["seed"] for line in lines})
    assert D.train.steps * 6_640 == pytest.approx(tokens, rel=0.1)


@pytest.mark.slow  # it trains
def test_a_study_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        A,
        iterations=1,
        rollouts=replace(A.rollouts, prompts=1, group=2),
        groups=replace(A.groups, least_right=0.0),  # both answers are wrong
    )
    arms: dict[str, RLRecipe | TrainingRecipe] = {"rl-A": small, "rl-D": shortened(D, 1)}
    size = ArmStudySize(seeds=(1,), problems=2, taus=(0.9,))
    first = ArmStudy(tmp_path / "out", arms, size)
    with monkeypatch.context() as patch:
        patch.setattr("research.rl.study._supervised", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.compute(tuple(arms))
    rows = tmp_path / "out" / "rows"
    assert {path.stem for path in rows.iterdir()} == {run_name(BASE, 1), run_name("rl-A", 1)}
    before = (rows / f"{run_name('rl-A', 1)}.parquet").stat().st_mtime_ns
    ArmStudy(tmp_path / "out", arms, size, {BASE: A.model, "bd": "ledger-bd"}).compute(tuple(arms))
    assert (rows / f"{run_name('rl-D', 1)}.parquet").exists()
    assert read_table(rows / f"{run_name('bd', 1)}.parquet")["recipe"].unique().to_pylist() == ["bd"]
    assert (rows / f"{run_name('rl-A', 1)}.parquet").stat().st_mtime_ns == before, "a piece is computed once"
    assert "A: correctness + TPF" in report(tmp_path / "out")
