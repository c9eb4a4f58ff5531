"""A sweep's folder, which fills part by part and never loses or repeats a row.

    sweep.json                  the record of the sweep (`SweepRecord`), its id, the digests of its report's files
    samples/part-*.parquet      one row for each sample; a part is written beside its place and renamed
    times/case-*.parquet        one row for each request of a timed configuration
    report.md, report.html, report.json, plot.png

Each new sweep in a folder draws an id, and every part carries it. The files of the report carry no id, so the record
keeps their digests. A file without such an id or digest is foreign: it is never read, replaced or removed.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.batch.rows import DRAFTS, TimedRow, current_config
from mbd_core.evaluation.sweep.grading.graded_rows import ISOLATION, GradedRow
from mbd_core.evaluation.sweep.record import SweepRecord, current_plan, difference
from mbd_core.fields import configuration, load
from mbd_core.files import (
    MANIFEST,
    PartsFolder,
    check_target_folder,
    durable_file,
    file_beside,
    folder_kind,
    is_leftover,
)

KIND = "sweep"
RECORD = "sweep.json"
REPORT = "report.json"
FAILURE = "failure.txt"  # the traceback of a sweep that failed
REPORT_FILES = ("plot.png", "report.md", "report.html", REPORT)
LOCK = ".mbd-sweep.lock"
FILES = (RECORD, LOCK, "samples/part-*.parquet", "times/case-*.parquet", *REPORT_FILES, FAILURE)
OPTIONAL = ("draw", "vote", *DRAFTS)  # columns of sweeps that draw tokens, and columns that earlier versions lack
TABLES = ("samples", "times")  # the folders of files that carry an id
MARK = b"mbd-sweep"  # the key of the id in a part's metadata


@configuration()
class FolderState:
    """The content of `sweep.json`.

    id        the id that the parts of this sweep carry
    previous  the ids of the sweeps that this sweep replaced, whose remaining parts are removed
    digests   by file name, the digests of each version of the report's files that was written here
    """

    record: SweepRecord
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    previous: tuple[str, ...] = ()
    digests: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The state that lies in a folder, `None` if there is no state; `ValueError` for a file that is not ours."""
        path = folder / RECORD
        if not path.exists():
            return None
        try:
            state = cast(Self, load(cls, json.loads(path.read_text(encoding="utf-8"))))
        except ValueError as error:
            raise ValueError(f"{path} was not written by this version of the project ({error}); move it") from None
        return state.with_record(plan=current_plan(state.record.plan))

    def save(self, folder: Path) -> None:
        """Write it, durably: without it the existing parts belong to no sweep."""
        with durable_file(folder / RECORD) as new_file:
            new_file.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def with_record(self, **changes: Any) -> Self:
        """The state with a changed record."""
        return replace(self, record=replace(self.record, **changes))

    def owns(self, folder: Path, name: str) -> bool:
        """Whether a file of the folder, by its relative name, was written by this sweep or a sweep that it
        replaced."""
        if name in (MANIFEST, RECORD, LOCK) or is_leftover(name, FILES):
            return True
        if Path(name).parts[0] in TABLES:
            return part_id(folder / name) in (self.id, *self.previous)
        return name in self.digests and _digest(folder / name) in self.digests[name]


class SweepFolder:
    """A sweep's `PartsFolder` and state.

    `publish` is called with the relative name of every file that was written or removed.
    """

    def __init__(self, parts: PartsFolder, state: FolderState, publish: Callable[[str], None]) -> None:
        self.path, self.state, self._parts, self._publish = parts.path, state, parts, publish

    @classmethod
    def claim(
        cls,
        path: Path,
        record: SweepRecord,
        *,
        overwrite: bool = False,
        publish: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Make the folder for this sweep, or resume the same sweep in it.

        Raises `ValueError` as `check_sweep_folder` does, and while another process writes there.
        """
        check_sweep_folder(path, record, overwrite=overwrite)
        parts = PartsFolder(path, KIND, FILES, lock=LOCK)
        old_state = FolderState.load(path)
        if old_state is None:
            state = FolderState(record=record)
        elif is_resumable(path, old_state, record, overwrite=overwrite):
            state = old_state
            if record.num_cases and not old_state.record.num_cases:  # nothing was to be timed before
                state = state.with_record(num_cases=record.num_cases, timing=record.timing)
        else:
            state = FolderState(record=record, previous=(old_state.id, *old_state.previous), digests=old_state.digests)
        folder = cls(parts, state, publish)
        folder._save()
        folder._clear()
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write there."""
        self._parts.close()

    def missing(self) -> list[int]:
        """The numbers of the parts that are still to be computed."""
        return [number for number in self.state.record.parts if not self._has_file(part_name(number))]

    def missing_cases(self) -> list[int]:
        """The numbers of the cases that are still to be timed."""
        return [number for number in self.state.record.cases if not self._has_file(case_name(number))]

    def write_part(self, number: int, table: pa.Table) -> None:
        """Write a part of the samples, durably, completely or not at all; a part that is there already stays as it
        is."""
        assert number in self.state.record.parts, f"part {number} is not of this shard"
        self._write_table(part_name(number), table)

    def write_case(self, number: int, table: pa.Table) -> None:
        """Write the timed requests of a case, as `write_part` does a part."""
        assert number in self.state.record.cases, f"case {number} is not of this shard"
        self._write_table(case_name(number), table)

    def _write_table(self, name: str, table: pa.Table) -> None:
        if self._has_file(name):
            return
        path = self.path / name
        if path.exists():
            raise OSError(f"{path} was not written by this sweep, and has the name of one of its files; move it")
        metadata = {key: value for key, value in (table.schema.metadata or {}).items() if key == ISOLATION}
        with durable_file(path) as new_file:
            pq.write_table(table.replace_schema_metadata({**metadata, MARK: self.state.id}), new_file)
        self._publish(name)

    def write_files(self, contents: dict[str, bytes]) -> None:
        """Write files of the report. Raises `OSError` if a foreign file has the name of one of them."""
        for name, content in contents.items():
            if (self.path / name).exists() and not self.state.owns(self.path, name):
                raise OSError(
                    f"{self.path / name} was not written by this sweep, and has the name of its report; move it"
                )
            digests = [hashlib.sha256(content).hexdigest(), *self.state.digests.get(name, ())][:8]
            self.state = replace(self.state, digests={**self.state.digests, name: digests})
        self._save()  # before the files: a process that is killed between them leaves no unknown file
        for name, content in contents.items():
            with file_beside(self.path / name) as new_file:
                new_file.write_bytes(content)
            self._publish(name)

    def remove(self, name: str) -> None:
        """Remove a file if it is there and ours."""
        if (self.path / name).exists() and self.state.owns(self.path, name):
            (self.path / name).unlink()
            self._publish(name)

    def note_machine(self, machine: str) -> None:
        """Record that a part of the sweep was computed on this machine too."""
        machines = self.state.record.settings.get("machines", [])
        if machine not in machines:
            self.state = self.state.with_record(
                settings={**self.state.record.settings, "machines": [*machines, machine]}
            )
            self._save()

    def _has_file(self, name: str) -> bool:
        return part_id(self.path / name) == self.state.id

    def _save(self) -> None:
        self.state.save(self.path)
        self._publish(RECORD)

    def _clear(self) -> None:
        """Remove the remaining parts of replaced sweeps, and the report while parts are missing."""
        report_files = REPORT_FILES if self.missing() or self.missing_cases() else ()
        for name in files_in(self.path):
            if name in report_files or part_id(self.path / name) in self.state.previous:
                self.remove(name)


def part_name(number: int) -> str:
    return f"samples/part-{number:05d}.parquet"


def case_name(number: int) -> str:
    return f"times/case-{number:05d}.parquet"


def tables_of(record: SweepRecord) -> list[str]:
    """The names of all files that carry the id of a finished sweep."""
    return [*map(part_name, record.parts), *map(case_name, record.cases)]


def part_id(path: Path) -> str | None:
    """The id of the sweep that wrote a part; `None` if no sweep wrote the file, or there is no file."""
    return _metadata_value(path, MARK)


def isolations(folder: Path) -> set[str]:
    """How the machines of a sweep contained its programs. Empty if no program ran, or an earlier version graded the
    parts. Raises `ValueError` if no sweep lies there."""
    return {isolation for path in part_files(folder) if (isolation := _metadata_value(path, ISOLATION)) is not None}


def _metadata_value(path: Path, key: bytes) -> str | None:
    """A value of a part's metadata."""
    try:
        value = (pq.read_metadata(path).metadata or {}).get(key)
    except (OSError, pa.ArrowInvalid):
        return None
    return None if value is None else value.decode(errors="replace")


def files_in(folder: Path) -> list[str]:
    """The relative names of the files in a sweep's folder and in its folders of tables."""
    paths = (
        path for place in (folder, *(folder / name for name in TABLES)) if place.is_dir() for path in place.iterdir()
    )
    return sorted(str(path.relative_to(folder)) for path in paths if path.is_symlink() or not path.is_dir())


def check_sweep_folder(folder: Path, record: SweepRecord | None = None, *, overwrite: bool = False) -> None:
    """Raise `ValueError` if the sweep of `record`, or with `overwrite` any sweep, cannot be written to `folder`.

    The sweep can be written if the folder is empty or holds the same sweep, which is then resumed. With `overwrite` a
    finished sweep or another sweep is replaced, unless foreign files lie beside it.
    """
    if folder_kind(folder) != KIND:
        check_target_folder(folder, KIND, overwrite=overwrite, in_place=True)
        return
    state = FolderState.load(folder)
    if state is None:
        strange = [name for name in files_in(folder) if name not in (MANIFEST, LOCK) and not is_leftover(name, FILES)]
        if strange:
            raise ValueError(f"{folder} cannot be used: it has no {RECORD}, and {strange[0]} in it; move that")
        return
    if record is not None and is_resumable(folder, state, record, overwrite=overwrite):
        for name in (*tables_of(state.record), *REPORT_FILES, FAILURE):
            if (folder / name).exists() and not state.owns(folder, name):
                raise ValueError(
                    f"{folder / name} was not written by this sweep, and has the name of one of its files; move it"
                )
        return
    if not overwrite:
        contents = "a sweep" if record is None else f"another sweep: {difference(state.record, record)}"
        raise ValueError(f"{folder} exists already and holds {contents}; give another folder, or --overwrite")
    foreign = [name for name in files_in(folder) if not state.owns(folder, name)]
    if foreign:
        raise ValueError(f"{folder} cannot be replaced: {foreign[0]} in it was not written by this project; move it")


def is_resumable(folder: Path, state: FolderState, record: SweepRecord, *, overwrite: bool) -> bool:
    """Whether the folder's sweep is the sweep of `record` and is resumed. With `overwrite` an interrupted sweep is
    resumed, and a finished sweep is computed again."""
    return difference(state.record, record) is None and not (overwrite and is_finished(folder, state))


def is_finished(folder: Path, state: FolderState) -> bool:
    """Whether all parts and the report are there."""
    return state.owns(folder, REPORT) and all(part_id(folder / name) == state.id for name in tables_of(state.record))


def is_computed(folder: Path, record: SweepRecord, *, overwrite: bool) -> bool:
    """Whether every part and case of `record` is there. With `overwrite` a sweep that has its report counts as not
    computed."""
    state = FolderState.load(folder)
    if state is None or not is_resumable(folder, state, record, overwrite=overwrite):
        return False
    return all(part_id(folder / name) == state.id for name in tables_of(record))


def read_record(folder: Path) -> SweepRecord:
    """The record of the sweep in a folder. Raises `ValueError` if no sweep lies there."""
    return _present_state(folder).record


def _present_state(folder: Path) -> FolderState:
    """The state in a folder. Raises `ValueError` if no sweep lies there."""
    state = FolderState.load(folder)
    if state is None:
        raise ValueError(f"{folder} holds no sweep: it has no {RECORD}")
    return state


def read_report(folder: Path) -> dict[str, Any]:
    """A finished sweep's `report.json`; `ValueError` if there is none."""
    path = folder / REPORT
    if not path.exists():
        raise ValueError(f"{folder} has no {REPORT}; run jobs/eval_sweep.py --out {folder}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def read_samples(folder: Path, *, columns: Sequence[str] | None = None) -> Iterator[GradedRow]:
    """A sweep's samples as rows of `GRADED_COLUMNS`, or some of them; `ValueError` if no sweep lies there."""
    for path in part_files(folder):
        if columns is None:
            yield from read_rows(path)
            continue
        present_columns = set(pq.read_schema(path).names)
        missing_columns = {name: None for name in OPTIONAL if name in columns and name not in present_columns}
        yield from (
            row | missing_columns for row in read_rows(path, [name for name in columns if name in present_columns])
        )


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The rows of a part or a case, their configurations as this version writes them."""
    for row in pq.read_table(path, columns=columns).to_pylist():
        yield {**row, "config": current_config(row["config"])} if "config" in row else row


def part_files(folder: Path) -> Iterator[Path]:
    """The present files of a sweep's samples. Raises `ValueError` if no sweep lies there."""
    state = _present_state(folder)
    for number in state.record.parts:
        path = folder / part_name(number)
        if part_id(path) == state.id:
            yield path


def read_times(folder: Path) -> Iterator[TimedRow]:
    """A sweep's timed requests, none if nothing was timed. Raises `ValueError` if no sweep lies there."""
    state = _present_state(folder)
    for number in state.record.cases:
        path = folder / case_name(number)
        if part_id(path) == state.id:
            yield from read_rows(path)


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
