"""The study of verified drafts: its settings, its choice, its claims, and its published report."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mbd_core.decoding.blocks.config import decoding_config
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
        run("lengths", out=tmp_path, models=("tiny-mbd",), problems=2, rounds=1)
    with pytest.raises(ValueError, match="--models smollm2-ar has no task; give some of tiny-bd"):
        run("valid", out=tmp_path, models=("smollm2-ar",))


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
