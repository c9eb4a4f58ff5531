"""Work that the engine's process dies of: rows with the reason, and the sweep's end only where nothing is decoded."""

from typing import Any

import pyarrow as pa
import pytest
from sweep_rows import planned_samples

from mbd_core.batch.deaths import DEATH_TEXT, MOST_LOST, NO_SAMPLES, Attempts, DeathWatch, DividedParts, ModelDies
from mbd_core.batch.parts import Part, cut
from mbd_core.batch.rows import DECODED_COLUMNS
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS, ISOLATION
from mbd_core.evaluation.sweep.grading.part_grading import Grading, grade_table


def parts_of(num_problems: int) -> list[Part]:
    """Parts of two samples, one of each configuration of a problem."""
    prompts = ["word " * (1 + number) for number in range(num_problems)]
    rows = planned_samples(["m"], prompts=prompts, buffer_sizes=[1, 4]).to_pylist()
    return cut(rows, rows_per_part=2)


def decoded(row: Any) -> pa.Table:
    return grade_table(pa.Table.from_pylist([{**row, "text": "4", "num_tokens": 1}], schema=DECODED_COLUMNS))


def test_work_is_begun_twice_and_again_once_it_was_done() -> None:
    attempts = Attempts()
    assert [attempts.begin(7), attempts.begin(7), attempts.begin(7)] == [True, True, False]
    assert attempts.begin(8)
    attempts.end(8)
    assert [attempts.begin(8), attempts.begin(8), attempts.begin(8)] == [True, True, False]


def test_a_divided_part_comes_whole_with_the_reason_in_the_row_of_the_sample_that_kills() -> None:
    parts = parts_of(2)
    divided = DividedParts(parts, DeathWatch(()), Grading())
    killer = parts[0].rows[1]["sample"]
    come: dict[int, pa.Table] = {}
    for number, planned in divided.samples():
        (row,) = planned.to_pylist()
        come |= divided.add(number, grade_table(NO_SAMPLES) if number == killer else decoded(row))
    divided.check_end()
    assert sorted(come) == [0, 1]
    for part in parts:
        assert come[part.number].schema == GRADED_COLUMNS
        assert come[part.number]["sample"].to_pylist() == [row["sample"] for row in part.rows]
    first, second = come[0].to_pylist()
    assert (first["error"], first["text"]) == (None, "4")
    assert (second["error"], second["correct"], second["text"], second["num_tokens"]) == (
        DEATH_TEXT,
        False,
        None,
        None,
    )
    assert second["input"] == parts[0].rows[1]["input"]


def test_a_divided_part_says_how_its_programs_were_contained_though_its_first_sample_kills() -> None:
    (part,) = parts_of(1)
    killer, other = part.rows
    contained = decoded(other).replace_schema_metadata({ISOLATION: b"limits"})
    divided = DividedParts([part], DeathWatch(()), Grading())
    assert divided.add(killer["sample"], grade_table(NO_SAMPLES)) == []
    ((_, whole),) = divided.add(other["sample"], contained)
    assert whole.schema.metadata == {ISOLATION: b"limits"}


def test_a_part_of_which_nothing_is_decoded_waits_until_its_model_decodes_something() -> None:
    first, second = parts_of(2)
    divided = DividedParts([first, second], DeathWatch(()), Grading())
    for row in first.rows:
        assert divided.add(row["sample"], grade_table(NO_SAMPLES)) == []
    (whole,) = divided.add(second.rows[0]["sample"], decoded(second.rows[0]))
    assert (whole[0], whole[1]["error"].to_pylist()) == (first.number, [DEATH_TEXT, DEATH_TEXT])


def test_a_model_that_decodes_nothing_is_one_sentence_after_a_few_deaths_or_at_the_end() -> None:
    watch = DeathWatch(())
    for number in range(MOST_LOST - 1):
        watch.note_lost("m", f"part {number}")
    with pytest.raises(ModelDies, match=r"^model 'm' .*2 times on each of part 0, part 1, "):
        watch.note_lost("m", f"part {MOST_LOST - 1}")

    (part,) = parts_of(1)
    divided = DividedParts([part], DeathWatch(()), Grading())
    for row in part.rows:
        assert divided.add(row["sample"], grade_table(NO_SAMPLES)) == []
    with pytest.raises(ModelDies, match="sample 0 of part 0, sample 1 of part 0"):
        divided.check_end()


def test_a_model_that_decoded_something_never_ends_the_sweep() -> None:
    parts = parts_of(MOST_LOST)
    known, came = DeathWatch({"m"}), DeathWatch(())
    came.note_decoded("m")
    for watch in (known, came):
        divided = DividedParts(parts, watch, Grading())
        whole = [number for part in parts for row in part.rows for number, _ in divided.add(row["sample"], NO_SAMPLES)]
        divided.check_end()
        assert whole == [part.number for part in parts]
