"""Folders of training samples, written once and read from the disk as needed; and the generated tasks' samples.

`samples.arrow` holds tokens without fill, so that one folder serves all block sizes. `data.json` records their origin.
Its digest identifies the data in a run's record.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mbd_core.checkpoint.chat import question
from mbd_core.fields import DATA, Flag, Ge, configuration
from mbd_core.files import write_json
from mbd_core.multitf.data.encoding import EncodedChat, encode_chats, tokenizer_fingerprint
from mbd_core.multitf.data.example import Example, encode_example, filled_length
from mbd_core.tasks.generated import GENERATED_TASKS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


DATA_KIND = "training set"  # the kind in a data folder's manifest
SAMPLES, RECORD = "samples.arrow", "data.json"
PLAIN = pa.schema([("tokens", pa.list_(pa.int32())), ("prompt_length", pa.int32())])
"""The schema of samples with one answer each."""
SCHEMA = PLAIN.append(pa.field("earlier", pa.list_(pa.int32())))
"""The schema with `earlier`: begin, end, begin, end, ... of the conversation's answers before the last one."""
BATCH = 1024
FIELDS = {"samples", "longest", "digest", "tokenizer", "eos_token_id", "mask_token_id", "max_length"}


@dataclass(frozen=True)
class PreparedData:
    """A data folder by its absolute path or URL, and the digest of its samples."""

    path: str
    digest: str

    def __str__(self) -> str:
        return self.path


def named_data(folder: Path, path: str | None = None) -> PreparedData:
    """The value by which a recipe names the data in `folder`: its path, or `path` (a path or URL) if given."""
    return PreparedData(path or str(folder.resolve()), read_record(folder)["digest"])


def write_samples(folder: Path, samples: Iterable[EncodedChat]) -> dict[str, Any]:
    """Writes the samples as they come. Returns the record's fields that depend on them.

    samples       the number of samples
    longest       most tokens of a sample, its EOS included
    tokens        tokens of all samples
    most_answers  most answers of a sample
    most_trained  most tokens of a sample if each of its answers is trained with a copy of the tokens before it
    digest        the digest of all samples
    """
    digest, count, longest, total, answers, most_trained = hashlib.sha256(), 0, 0, 0, 0, 0
    rows: list[EncodedChat] = []

    def flush() -> None:
        earlier_places = [[place for span in row.earlier for place in span] for row in rows]
        columns = [
            pa.array([row.tokens for row in rows], SCHEMA.field(0).type),
            pa.array([len(row.prompt) for row in rows], pa.int32()),
            pa.array(earlier_places, SCHEMA.field(2).type),
        ]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        rows.clear()

    with pa.OSFile(str(folder / SAMPLES), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for sample in samples:
            count, length = count + 1, len(sample.prompt) + len(sample.response)
            longest, total = max(longest, length + 1), total + length
            answers, most_trained = max(answers, 1 + len(sample.earlier)), max(most_trained, sample.num_trained)
            digest.update(np.array([len(sample.prompt), length, *sample.prompt, *sample.response], "<i4").tobytes())
            if sample.earlier:  # nothing for one answer, so digests of folders without `earlier` stay valid
                digest.update(np.array([-len(sample.earlier), *itertools.chain(*sample.earlier)], "<i4").tobytes())
            rows.append(sample)
            if len(rows) == BATCH:
                flush()
        if rows:
            flush()
    return {
        "samples": count,
        "longest": longest,
        "tokens": total,
        "most_answers": answers,
        "most_trained": most_trained,
        "digest": digest.hexdigest(),
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes the samples' record, which `read_record` reads."""
    assert record.keys() >= FIELDS
    write_json(folder / RECORD, record)


def read_record(folder: Path) -> dict[str, Any]:
    """A data folder's record. Raises `ValueError` if it is no data folder or its files are not whole."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict) or not record.keys() >= FIELDS or not (folder / SAMPLES).is_file():
        raise ValueError(f"{folder} holds no prepared training data; make it with jobs/prepare_data.py")
    _read_samples(folder, record)
    return record


def _read_samples(folder: Path, record: dict[str, Any]) -> pa.Table:
    """The samples, mapped into memory. Raises `ValueError` for a file that is cut or is not the record's."""
    file = folder / SAMPLES
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is cut or damaged ({reason}); copy it again, or prepare it again") from None
    if table.schema not in (SCHEMA, PLAIN) or len(table) != record["samples"]:
        raise ValueError(f"{file} does not hold the samples that {RECORD} names; prepare it again")
    return table


class PreparedExamples(Sequence[Example]):
    """The samples of a data folder, filled to blocks. Each is read on access.

    A conversation with several answers is one sample; with `apart`, each answer is a sample. `lengths` holds each
    sample's number of tokens: of its answers, each counted with its context. Access raises `ValueError` for a sample
    that is longer than `max_length` with its fill.
    """

    def __init__(
        self, folder: Path, *, block_size: int, max_length: int, trailing_fill: int = 0, apart: bool = False
    ) -> None:
        record = read_record(folder)
        self._fill = {
            "eos_token_id": int(record["eos_token_id"]),
            "block_size": block_size,
            "max_length": max_length,
            "trailing_fill": trailing_fill,
        }
        self._table = _read_samples(folder, record)
        sizes = pa.compute.list_value_length(self._table["tokens"]).to_numpy() + 1
        room = max_length // block_size * block_size
        filled_sizes = sizes + np.clip(room - sizes, 0, trailing_fill)
        filled_lengths = filled_length(filled_sizes, block_size)
        counts = np.zeros(len(filled_lengths), dtype=np.int64)
        stops = np.zeros(0, dtype=np.int64)
        if "earlier" in self._table.column_names:
            counts = pa.compute.list_value_length(self._table["earlier"]).to_numpy() // 2
            stops = pa.compute.list_flatten(self._table["earlier"]).to_numpy()[1::2]
        self._rows: NDArray[np.int64] | None = None
        self._answers: NDArray[np.int64] | None = None
        spans = filled_length(stops + 1, block_size)
        if apart and len(spans):
            self._rows = np.repeat(np.arange(len(filled_lengths)), counts + 1)
            ends = np.cumsum(counts + 1)  # the last answer, which is not in `earlier`, follows the earlier answers
            self._answers = np.arange(len(self._rows)) - np.repeat(ends - counts - 1, counts + 1)
            lengths = np.empty(len(self._rows), dtype=np.int64)
            is_last = np.zeros(len(self._rows), dtype=bool)
            is_last[ends - 1] = True
            lengths[is_last], lengths[~is_last] = filled_lengths, spans
        else:
            lengths = filled_lengths + np.bincount(
                np.repeat(np.arange(len(filled_lengths)), counts), spans, len(filled_lengths)
            ).astype(np.int64)
        self.lengths: list[int] = lengths.tolist()

    def split(self, share: float) -> tuple[PreparedExamples, PreparedExamples]:
        """The samples of the training conversations, and the samples of the held-out conversations.

        The choice depends on the number of conversations and the share alone.
        """
        count = len(self._table)
        held_out_places = random.Random(f"held-out/{count}").sample(range(count), num_held_out(count, share))
        rows = np.arange(count) if self._rows is None else self._rows
        is_held_out = np.isin(rows, held_out_places)
        return self._subset(~is_held_out), self._subset(is_held_out)

    def _subset(self, places: NDArray[np.bool_]) -> PreparedExamples:
        """The samples at these places."""
        part = copy.copy(self)
        part._rows = np.flatnonzero(places) if self._rows is None else self._rows[places]
        part._answers = None if self._answers is None else self._answers[places]
        part.lengths = np.array(self.lengths)[places].tolist()
        return part

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = index if self._rows is None else int(self._rows[index])
        tokens = self._table["tokens"][row].as_py()
        prompt = self._table["prompt_length"][row].as_py()
        places = self._table["earlier"][row].as_py() if "earlier" in self._table.column_names else []
        own_fill = self._fill | {"trailing_fill": 0}
        answers = [
            encode_example(tokens[:start], tokens[start:stop], **own_fill)
            for start, stop in zip(places[::2], places[1::2], strict=True)
        ]
        answers.append(encode_example(tokens[:prompt], tokens[prompt:], **self._fill))
        present = [answer for answer in answers if answer is not None]
        if len(present) < len(answers):
            raise ValueError(f"training sample {index} is longer than max_length={self._fill['max_length']} tokens")
        if self._answers is not None:
            return present[int(self._answers[index])]
        return replace(present[-1], earlier=tuple(present[:-1]))


def num_held_out(count: int, share: float) -> int:
    """The number of held-out conversations of `count`, at least one."""
    return max(1, round(share * count))


def sample_lengths(examples: Sequence[Example]) -> Sequence[int]:
    """Tokens of each sample: the sum over its answers, each with its context. Prepared samples are not read."""
    if isinstance(examples, PreparedExamples):
        return examples.lengths
    return [sum(len(answer.tokens) for answer in (*e.earlier, e)) for e in examples]


TOKENIZER_PAIRS = 8000
"""The number of conversations from which a fresh model's tokenizer learns its merges."""


@configuration(panel=DATA)
class TinyData:
    """How many problems of each task, and the stream they come from."""

    per_task: Annotated[int, Ge(1)]
    """Generated problems of each task."""
    seed: Annotated[int, Ge(0), Flag(name="--data-seed")] = 0
    """Random seed of the generated problems."""
    tasks: Annotated[tuple[str, ...], Flag(commas=True)] = ("gsm-mini", "code-mini")
    """The tasks whose problems are generated."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in GENERATED_TASKS:
                raise ValueError(f"data.tasks: there is no task {name}; known: {', '.join(GENERATED_TASKS)}")


def conversations(data: TinyData) -> Iterator[tuple[str, str]]:
    """(user, assistant) pairs of the tasks' train splits, interleaved."""
    tasks = [GENERATED_TASKS[name] for name in data.tasks]
    streams = [task.generate(split="train", seed=data.seed) for task in tasks]
    for rows in itertools.islice(zip(*streams, strict=True), data.per_task):
        for task, row in zip(tasks, rows, strict=True):
            yield row[task.question_column], row[task.answer_column]


def write_conversations(
    folder: Path, tokenizer: PreTrainedTokenizerBase, data: TinyData, *, block_size: int, max_length: int
) -> None:
    """Tokenises the generated conversations into a folder of samples, `BATCH` at a time.

    Raises `ValueError` for a sample longer than `max_length` tokens with its fill, because nothing is cut silently.
    """
    ids = {"eos_token_id": tokenizer.eos_token_id, "mask_token_id": tokenizer.mask_token_id}

    def samples() -> Iterator[EncodedChat]:
        for first, pairs in _batches(conversations(data)):
            names = [f"training sample {number}" for number in range(first, first + len(pairs))]
            chats = [[*question(user), {"role": "assistant", "content": answer}] for user, answer in pairs]
            encoded = encode_chats(tokenizer, list(zip(names, chats, strict=True)), eos_token_id=ids["eos_token_id"])
            for name, sample in zip(names, encoded, strict=True):
                length = len(sample.prompt) + len(sample.response) + 1
                if filled_length(length, block_size) > max_length:
                    raise ValueError(f"{name} is longer than max_length={max_length} tokens")
                yield sample

    written = write_samples(folder, samples())
    write_record(folder, {**written, **ids, "tokenizer": tokenizer_fingerprint(tokenizer), "max_length": max_length})


def _batches(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """The pairs in lists, each with its first pair's number."""
    source, first = iter(pairs), 0
    while batch := list(itertools.islice(source, BATCH)):
        yield first, batch
        first += len(batch)
