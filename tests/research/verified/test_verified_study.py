"""The study of verified drafts: its settings, its choice, its claims, and its published report."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mbd_core.decoding.blocks.config import decoding_config
from research.verified import study
from research.verified.lengths import LENGTHS, LENGTHS_FILE, length_lines
from research.verified.report import REPORT, ROWS, TURNS, SplitAnswers, chosen_settings, report
from research.verified.settings import SUBJECTS, family_of, settings, slots_of, width_of
from research.verified.study import COLUMNS, COUNTS, run

PUBLISHED = Path(__file__).resolve().parents[3] / "research" / "published" / "verified"
MODEL = "tiny-bd"
BEST = {"threshold 0.9 in 1": (1.0, 5), "score at 0.8 in 1": (1.0, 4)}  # share right, forwards of an answer


def written(out: Path, split: str, cells: Mapping[str, tuple[float, int]], *, problems: int = 20) -> None:
    """Rows of all settings of a model: 20 tokens an answer, half of them right in 10 forwards unless `cells` has
    another share and number."""
    rows = []
    for name in settings():
        share, forwards = cells.get(name, (0.5, 10))
        for number in range(problems):
            counts = dict.fromkeys(COUNTS, 0) | {"num_tokens": 20, "num_forwards": forwards, "num_positions": 160}
            if family_of(name) == "verified":
                counts |= {"num_drafted_tokens": 20, "num_confirmed_tokens": 10 * slots_of(name)}
            right = number < share * problems
            rows.append({"model": MODEL, "setting": name, "problem": f"p{number:02}", "correct": right, **counts})
    pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), out / ROWS[split])


def test_every_setting_can_be_decoded_and_says_its_slots() -> None:
    for name, fields in settings().items():
        decoding = decoding_config({"buffer_size": 4}, fields, block_size=16)
        assert decoding.buffer_size == slots_of(name), name
        assert (decoding.verify is None) == (family_of(name) == "threshold"), name
        assert (width_of(name) == "one slot") == (decoding.buffer_size == 1), name


def test_the_fastest_setting_near_the_most_accurate_is_chosen(tmp_path: Path) -> None:
    cells = {"threshold 0.9 in 1": (1.0, 5), "threshold 0.8 in 1": (0.99, 4), "threshold 0.5 in 1": (0.9, 2)}
    written(tmp_path, "valid", cells, problems=100)
    chosen = chosen_settings(SplitAnswers.read(tmp_path / ROWS["valid"]), MODEL)
    assert chosen["threshold", "one slot"] == "threshold 0.8 in 1"
    assert set(chosen) == {(f, w) for f in ("threshold", "verified") for w in ("one slot", "several slots")}


def test_claims_are_judged_on_the_test_split_by_the_settings_of_the_valid_split(tmp_path: Path) -> None:
    written(tmp_path, "valid", BEST)
    written(tmp_path, "test", {**BEST, "threshold 0.5 in 1": (1.0, 2)})
    said = report(tmp_path).splitlines()
    faster = next(line for line in said if "faster at equal accuracy, one slot" in line)
    assert "score at 0.8 in 1 | threshold 0.9 in 1 | +1.00 [+1.00, +1.00]" in faster and "| shown |" in faster
    assert "0 and 0, p = 1.000" in faster
    accurate = next(line for line in said if "more accurate than any threshold" in line)
    assert accurate.endswith("| not shown |")
    slots = [line for line in said if "more slots confirm more" in line]
    assert len(slots) == 4 and all("| shown |" in line for line in slots)
    assert any(line.startswith(f"| {MODEL} | score at 0.8 in 1 | 100.0, 5.00 |") for line in said)

    written(tmp_path, "test", {**BEST, "score at 0.8 in 1": (0.5, 4)})
    faster = next(line for line in report(tmp_path).splitlines() if "faster at equal accuracy, one slot" in line)
    assert "0 and 10, p = 0.002" in faster and "| contradicted |" in faster


def test_tokens_a_second_are_a_multiple_of_the_thresholds(tmp_path: Path) -> None:
    written(tmp_path, "valid", BEST)
    written(tmp_path, "test", BEST)
    timed = [("threshold 0.9 in 1", 2.0), ("score at 0.8 in 1", 1.0)]
    rows = [{"model": MODEL, "setting": name, "tokens": 20, "seconds": seconds} for name, seconds in timed]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / TURNS)
    lines = [line for line in report(tmp_path).splitlines() if "100.0, " in line]
    assert [line.rsplit("|", 2)[1].strip() for line in lines] == ["1.00", "2.00"]


def test_exact_answers_are_timed_by_the_length_of_their_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("lengths", out=tmp_path, models=("tiny-mbd",), problems=2, rounds=2)
    timed = pq.read_table(tmp_path / LENGTHS_FILE)
    assert timed["setting"].to_pylist() == [*LENGTHS, *LENGTHS] and len(set(timed["tokens"].to_pylist())) == 1
    lines = length_lines(timed)
    assert capsys.readouterr().out.splitlines() == lines
    assert lines[2].startswith("| tiny-mbd | one slot |") and lines[2].endswith("| 1.00 | 1.00 to 1.00 |")
    monkeypatch.setitem(LENGTHS, "measured", {"buffer_size": 2, "tau_m2t": 0.1})
    with pytest.raises(ValueError, match="differ, though all are exact"):
        run("lengths", out=tmp_path / "other", models=("tiny-mbd",), problems=2, rounds=1)
    with pytest.raises(ValueError, match="--models smollm2-ar has no task; give some of tiny-bd"):
        run("valid", out=tmp_path, models=("smollm2-ar",))


def length_rows(model: str, *_: object, rounds: int = 2, problems: int = 3) -> pa.Table:
    numbers = {"tokens": 8.0, "forwards": 4.0, "positions": 32.0, "seconds": 1.0}
    named = [
        {"model": model, "problems": problems, "round": n + 1, "setting": s} for n in range(rounds) for s in LENGTHS
    ]
    return pa.Table.from_pylist([row | numbers for row in named])


def test_each_models_rows_are_kept_when_they_are_whole_and_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def timed(model: str, *_: object, rounds: int) -> pa.Table:
        asked.append(model)
        if model == "ledger-bd" and len(asked) < 4:
            raise KeyboardInterrupt
        return length_rows(model, rounds=rounds)

    monkeypatch.setattr(study, "timed_lengths", timed)
    names = ("tiny-bd", "tiny-mbd", "ledger-bd")
    with pytest.raises(KeyboardInterrupt):
        run("lengths", out=tmp_path, models=names, problems=3, rounds=2)
    run("lengths", out=tmp_path, models=names, problems=3, rounds=2)
    assert asked == [*names, "ledger-bd"]
    found = pq.read_table(tmp_path / LENGTHS_FILE)
    assert found.equals(pa.concat_tables(map(length_rows, names)))
    assert len(length_lines(found)) == len(capsys.readouterr().out.splitlines())
    with pytest.raises(ValueError, match="tiny-bd, measured with --problems 3 and --rounds 2; give these, or another"):
        run("lengths", out=tmp_path, models=("tiny-bd",), problems=3, rounds=1)
    assert pq.read_table(tmp_path / LENGTHS_FILE).equals(found) and len(asked) == 4


def test_published_rows_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "out")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(study, "planned", lambda *_: pytest.fail("a model was asked"))
    with pytest.raises(ValueError, match="tiny-bd, measured with --problems unknown and --rounds 3"):
        run("lengths", out=tmp_path / "out", models=("tiny-bd",), problems=8, rounds=3)
    with pytest.raises(ValueError, match="tiny-bd, measured with --problems 24; give these"):
        run("turns", out=tmp_path / "out", problems=2)
    with pytest.raises(ValueError, match="tiny-mbd, measured with --problems 500; give these"):
        run("test", out=tmp_path / "out", models=("tiny-mbd",), problems=2)
    run("test", out=tmp_path / "out", models=("tiny-mbd",), problems=500)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files


def test_a_sweep_adds_its_models_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "valid", BEST)
    before = pq.read_table(tmp_path / ROWS["valid"])
    counts = dict.fromkeys(COUNTS, 1)
    samples = [
        {"method": name, "problem_id": f"p{number}", "correct": True, "error": None, **counts}
        for name in settings()
        for number in range(2)
    ]
    monkeypatch.setattr("mbd_core.evaluation.sweep.folder.read_samples", lambda *_, **__: samples)
    monkeypatch.setattr(study, "sweep", lambda *_: None)
    run("valid", out=tmp_path, models=("tiny-mbd",), problems=2)
    table = pq.read_table(tmp_path / ROWS["valid"])
    assert table.slice(0, len(before)).equals(before) and len(table) == len(before) + len(samples)
    assert [*SplitAnswers.read(tmp_path / ROWS["valid"]).of] == [MODEL, "tiny-mbd"]
    run("valid", out=tmp_path, models=("tiny-mbd",), problems=2)
    assert pq.read_table(tmp_path / ROWS["valid"]).equals(table)


def test_the_rows_of_an_earlier_stage_are_asked_for_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "planned", lambda *_: pytest.fail("a model was asked"))

    def said(*arguments: str) -> str:
        assert study.main([*arguments, "--out", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "has no valid.parquet: run valid first" in said("test", "--models", "tiny-mbd")
    assert "has no valid.parquet: run valid first" in said("turns")
    assert "has no test.parquet: run valid and test first" in said("report")
    (tmp_path / ROWS["valid"]).write_text("no table")
    assert "valid.parquet cannot be read as the rows of a stage" in said("turns")
    pq.write_table(pa.table({"x": [1]}), tmp_path / ROWS["valid"])
    assert "valid.parquet holds no rows of a stage: its columns are x" in said("turns")
    written(tmp_path, "valid", BEST)
    assert "has no rows of tiny-mbd: run valid --models tiny-mbd first" in said("test", "--models", "tiny-mbd")
    timed = {"model": MODEL, "setting": "span in 1", "tokens": 20, "seconds": 1.0}
    pq.write_table(pa.Table.from_pylist([timed]), tmp_path / TURNS)
    assert "times of other settings of tiny-bd than valid.parquet chooses" in said("turns")
    written(tmp_path, "test", BEST)
    pq.write_table(COLUMNS.empty_table(), tmp_path / ROWS["valid"])
    assert "has no rows of tiny-bd: run valid --models tiny-bd first" in said("report")
    assert study.main(["report", "--out", "/proc/none"]) == 2
    assert "/proc/none cannot be written" in capsys.readouterr().err


def test_settings_that_are_not_whole_are_named(tmp_path: Path) -> None:
    written(tmp_path, "valid", BEST)
    table = pq.read_table(tmp_path / ROWS["valid"])
    pq.write_table(table.slice(1), tmp_path / ROWS["valid"])
    with pytest.raises(ValueError, match="the settings of tiny-bd are not whole; decode its sweep to the end"):
        SplitAnswers.read(tmp_path / ROWS["valid"])
    assert MODEL in SUBJECTS


def test_the_published_report_is_that_of_its_rows_and_the_page_has_its_tables() -> None:
    text = report(PUBLISHED)
    assert text == (PUBLISHED / REPORT).read_text()
    page = (PUBLISHED.parents[1] / "verified" / "README.md").read_text()
    tables = text[text.index("## Claims") : text.index("## All settings")].splitlines()
    tables += length_lines(pq.read_table(PUBLISHED / LENGTHS_FILE))
    assert [line for line in tables if line.startswith("|") and line not in page] == []
