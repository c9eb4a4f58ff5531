"""Which samples a report's page shows: a bounded choice that says of itself what it leaves out."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written_sweeps import graded_table, planned_rows, sweep_record, write_parts, write_rows

from mbd_core.batch.parts import cut
from mbd_core.batch.rows import REPLAY
from mbd_core.evaluation.report import shown_samples
from mbd_core.evaluation.report.shown_samples import choose_samples
from mbd_core.evaluation.sweep.folder import SweepFolder
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS
from mbd_core.evaluation.sweep.shard import SweepShard

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


def numbers(samples: Any) -> list[int]:
    return [json.loads(text)["sample"] for text in samples]


def test_each_configuration_shows_its_wrong_samples_first_in_the_order_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path)
    whole = choose_samples([tmp_path])
    assert whole.note == "All 40 samples are here." and sum(map(len, whole.samples.values())) == 40
    monkeypatch.setattr(shown_samples, "MOST_EACH", 5)
    shown = choose_samples([tmp_path])
    assert len(shown.samples) == 4 and shown.left_out == 0
    for key, samples in shown.samples.items():
        wrong_first = sorted(numbers(whole.samples[key]), key=lambda number: (number % 3 > 0, number))
        assert numbers(samples) == wrong_first[:5]
    assert "20 of 40 samples are here: of each configuration on each task at most 5" in shown.note
    monkeypatch.setattr(shown_samples, "MOST_SAMPLES", 8)
    assert [len(samples) for samples in choose_samples([tmp_path]).samples.values()] == [2] * 4


def test_the_choice_does_not_depend_on_shards_or_on_a_folder_that_is_named_twice(tmp_path: Path) -> None:
    write_parts(tmp_path / "whole")
    for index in (1, 2):
        write_parts(tmp_path / str(index), shard=SweepShard(index=index, count=2))
    whole = choose_samples([tmp_path / "whole"])
    assert choose_samples([tmp_path / "2", tmp_path / "1", tmp_path / "2"]) == whole


def test_where_the_room_ends_every_configuration_has_its_share(tmp_path: Path) -> None:
    write_parts(tmp_path)
    whole = choose_samples([tmp_path])
    size = sum(len(text) for samples in whole.samples.values() for text in samples) + sum(map(len, whole.prompts))
    shown = choose_samples([tmp_path], most_bytes=size // 2)
    counts = [len(samples) for samples in shown.samples.values()]
    assert min(counts) > 1 and max(counts) - min(counts) <= 1
    assert shown.left_out == 40 - sum(counts) and f"{shown.left_out} more were chosen" in shown.note
    assert sum(len(text) for samples in shown.samples.values() for text in samples) < size // 2


def test_only_parts_with_a_chosen_sample_are_read_for_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path)
    opened: list[Path] = []
    real = pq.ParquetFile

    def counted(path: Path) -> pq.ParquetFile:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(shown_samples.pq, "ParquetFile", counted)
    monkeypatch.setattr(shown_samples, "MOST_EACH", 1)
    choose_samples([tmp_path])
    assert 0 < len(opened) <= 4 < len(list((tmp_path / "samples").iterdir()))


def test_rows_of_an_earlier_version_have_no_replay(tmp_path: Path) -> None:
    (row,) = graded_table(cut(planned_rows(problems=1, tasks=("a",)), rows_per_part=4)[0]).to_pylist()[:1]
    write_rows(tmp_path, [{name: value for name, value in row.items() if name not in [f.name for f in REPLAY]}])
    ((text,),) = [samples for samples in choose_samples([tmp_path]).samples.values() if samples]
    assert "steps" not in json.loads(text) and json.loads(text)["text"] == row["text"]


def test_a_sample_holds_what_the_model_was_given_and_nothing_in_it_is_markup(tmp_path: Path) -> None:
    rows = planned_rows(problems=2, tasks=("a",))
    (part,) = cut(rows, rows_per_part=4)
    chat = [{"role": "user", "content": HOSTILE}]
    changes = {"text": HOSTILE, "input": json.dumps(chat), "reference": "x" * 5000, "pieces": [HOSTILE], "steps": [1]}
    table = pa.Table.from_pylist([{**row, **changes} for row in graded_table(part).to_pylist()], schema=GRADED_COLUMNS)
    with SweepFolder.claim(tmp_path, sweep_record(rows, [part])) as folder:
        folder.write_part(0, table)
    shown = choose_samples([tmp_path])
    assert [json.loads(prompt) for prompt in shown.prompts] == [chat], "one prompt of all configurations is there once"
    texts = [text for samples in shown.samples.values() for text in samples]
    for text in texts:
        sample = json.loads(text)
        assert sample["text"] == sample["pieces"][0] == HOSTILE and sample["prompt"] == 0
        assert sample["reference"].endswith("... (5,000 characters)") and len(sample["reference"]) < 2100
    assert not any("<" in text or "\u2028" in text for text in (*texts, *shown.prompts))
