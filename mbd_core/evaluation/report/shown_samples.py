"""The samples that a report's page shows: a bounded choice, the same for the same rows, made without reading the rest.

The grades of all rows are read; prompts, texts and decodings only in the parts that hold a chosen sample. So neither
the page nor the memory that it takes grows with the sweep.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mbd_core.batch.rows import COUNTS, DRAFTS, REPLAY, current_config
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.sweep.folder import part_files, read_record
from mbd_core.tables import script_json

MOST_EACH = 20  # samples of one configuration on one task
MOST_SAMPLES = 2000
MOST_BYTES = 16 * 2**20  # of all shown samples as JSON, prompts included
LONGEST_REFERENCE = 2000  # characters; the tests of a program are long

SUBJECT = ("model", "method", "task", "config", "problem_id", "seed", "sample", "correct")
GRADE = ("finish_reason", "error", "correct", "reason", "detail", "strict", "flexible")
FLAGS = ("strict_correct", "flexible_correct", "base_correct", "plus_correct")
ANSWER = ("text", *GRADE, *FLAGS, *COUNTS, *DRAFTS, "seconds", *(f.name for f in REPLAY))
SHOWN = ("sample", "problem_id", "seed", "draw", "reference", *ANSWER)


@dataclass(frozen=True)
class SamplePlace:
    """The place of a sample. Wrong samples come first; otherwise samples are in the order of the plans and of each
    plan."""

    correct: bool
    plan: int
    sample: int
    path: Path = field(compare=False)
    index: int = field(compare=False)

    @property
    def rank(self) -> tuple[bool, int, int]:
        return self.correct, self.plan, self.sample


@dataclass(frozen=True, kw_only=True)
class ShownSamples:
    """The samples that are shown of each configuration, as JSON texts, and how they were chosen.

    samples  JSON objects by configuration, in the order of `SamplePlace.rank`; `prompt` is an index into `prompts`
    prompts  JSON texts of the models' inputs
    each     the most samples of a configuration on a task
    left_out chosen samples for which the page had no room
    """

    samples: Mapping[ReportKey, Sequence[str]]
    prompts: Sequence[str]
    total: int
    each: int
    left_out: int

    @property
    def note(self) -> str:
        """A sentence: how many samples are shown, of how many, and which."""
        count = sum(map(len, self.samples.values()))
        if count == self.total:
            return f"All {self.total:,} samples are here."
        room = f" {self.left_out:,} more were chosen, for which the page had no room." if self.left_out else ""
        return (
            f"{count:,} of {self.total:,} samples are here: of each configuration on each task at most {self.each}, "
            f"wrong ones first, then right ones, both in the order of the plan.{room} All of them lie in samples/."
        )


def choose_samples(folders: Sequence[Path], *, most_bytes: int = MOST_BYTES) -> ShownSamples:
    """The samples to show of sweeps whose rows can be joined (`load_samples`)."""
    places = _places(folders)
    each = max(1, min(MOST_EACH, MOST_SAMPLES // max(1, len(places))))
    chosen = {key: sorted(of_key, key=lambda place: place.rank)[:each] for key, of_key in places.items()}
    texts = _texts([place for of_key in chosen.values() for place in of_key])
    prompts: dict[str, int] = {}
    samples: dict[ReportKey, list[str]] = {key: [] for key in chosen}
    room, left_out = most_bytes, 0
    for number in range(each):  # the first of every configuration, then the second: all have their share of the room
        for key, of_key in chosen.items():
            if number >= len(of_key):
                continue
            prompt, sample = texts[of_key[number].path, of_key[number].index]
            size = len(sample) + (0 if prompt in prompts else len(prompt))
            if size > room:
                left_out += 1
                continue
            room -= size
            index = prompts.setdefault(prompt, len(prompts))
            samples[key].append(f'{{"prompt":{index},{sample[1:]}')
    total = sum(map(len, places.values()))
    return ShownSamples(samples=samples, prompts=list(prompts), total=total, each=each, left_out=left_out)


def _places(folders: Sequence[Path]) -> dict[ReportKey, list[SamplePlace]]:
    """Where every sample lies, by its configuration. A sample in several folders lies in the first of them."""
    places: dict[ReportKey, list[SamplePlace]] = {}
    plans: list[Any] = []
    keys_so_far: set[tuple[Any, ...]] = set()  # with the configuration's number, because a key is slow to hash
    numbers: dict[tuple[str, ...], int] = {}
    for folder in folders:
        record = read_record(folder)
        if record.plan not in plans:
            plans.append(record.plan)
        plan = plans.index(record.plan)
        for key in record.subjects():
            numbers.setdefault(astuple(key), len(numbers))
            places.setdefault(key, [])
        by_number = list(places.values())
        for path in part_files(folder):
            names = [*SUBJECT, *(["draw"] if "draw" in pq.read_schema(path).names else [])]
            table = pq.read_table(path, columns=names)
            columns = zip(*(table[name].to_pylist() for name in names), strict=True)
            for index, (model, method, task, config, problem, seed, sample, correct, *draw) in enumerate(columns):
                number = numbers[model, method, task, current_config(config)]
                if (number, problem, seed, *draw) not in keys_so_far:
                    keys_so_far.add((number, problem, seed, *draw))
                    by_number[number].append(SamplePlace(bool(correct), plan, sample, path, index))
    return {key: of_key for key, of_key in places.items() if of_key}


def _texts(places: Sequence[SamplePlace]) -> dict[tuple[Path, int], tuple[str, str]]:
    """The prompt and the sample at each place, as JSON."""
    by_path: dict[Path, list[int]] = {}
    for place in places:
        by_path.setdefault(place.path, []).append(place.index)
    return {
        (path, index): (script_json(_prompt(row)), script_json(_sample_fields(row)))
        for path, indices in by_path.items()
        for index, row in zip(indices, _rows(path, indices), strict=True)
    }


def _rows(path: Path, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of a part; a column that an earlier version did not write is `None`."""
    file = pq.ParquetFile(path)
    names = (*SHOWN, "prompt", "input")
    table = file.read(columns=[name for name in names if name in file.schema_arrow.names])
    for row in table.take(indices).to_pylist():
        yield {name: row.get(name) for name in names}


def _prompt(row: Mapping[str, Any]) -> Any:
    """The messages or the text that the model was given; only the problem if a row has no input."""
    return row["prompt"] if row["input"] is None else json.loads(row["input"])


def _sample_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: row[name] for name in SHOWN if row[name] is not None}
    reference = str(row["reference"] or "")
    if len(reference) > LONGEST_REFERENCE:
        cut = f"{reference[:LONGEST_REFERENCE]} ... ({len(reference):,} characters)"
        return {**fields, "reference": cut}
    return fields
