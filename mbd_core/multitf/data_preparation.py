"""Files of conversations to a folder of training samples, row by row: encoded, filtered, counted, compared."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.folder import ModelFolder
from mbd_core.files import folder_beside
from mbd_core.multitf.chat_encoding import EncodedChat, encode_chats, fill_token, tokenizer_fingerprint
from mbd_core.multitf.conversation_rows import Columns, Messages, read_rows
from mbd_core.multitf.overlap import Benchmark
from mbd_core.multitf.prepared_data import DATA_KIND, write_record, write_samples

CHUNK = 256
"""So many conversations are tokenised together."""


@dataclass
class RowCounts:
    """What became of the rows that were read."""

    read: int = 0
    kept: int = 0
    too_long: int = 0
    repeating: int = 0

    def __str__(self) -> str:
        return (
            f"{self.read} rows: {self.kept} kept, {self.too_long} too long, {self.repeating} left out for repeating a "
            "benchmark"
        )


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is prepared: rows of `files`, for the tokenizer of `model`, in at most `max_length` tokens with their EOS.

    `columns` name the conversations; by default they have usual names. Rows whose prompts repeat a problem of one of
    `benchmarks` are reported, and with `drop_overlap` left out. `limit` reads only so many rows.
    """

    files: Sequence[str]
    model: ModelFolder
    max_length: int
    columns: Columns | None = None
    benchmarks: Sequence[Benchmark] = ()
    drop_overlap: bool = False
    limit: int | None = None


def prepare_data(preparation: Preparation, folder: Path, *, overwrite: bool = False) -> RowCounts:
    """Write the folder, whole or not at all; the same rows give the same bytes.

    Raises `ValueError` naming the row that is malformed, has no answer, or that the template refuses, and if no row is
    left.
    """
    model, counts = preparation.model, RowCounts()
    eos = fill_token(model.tokenizer, model.config)
    with folder_beside(folder, DATA_KIND, overwrite=overwrite) as beside:
        written = write_samples(beside, _samples(preparation, eos, counts))
        if not counts.kept:
            raise ValueError(f"{', '.join(preparation.files)}: no row is left of {counts}")
        write_record(beside, record(preparation, counts, eos) | written)
    return counts


def record(preparation: Preparation, counts: RowCounts, eos_token_id: int) -> dict[str, Any]:
    """What the data folder says of its making; the sizes of what was written are added."""
    model = preparation.model
    return {
        "files": list(preparation.files),
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
        "eos_token_id": eos_token_id,
        "mask_token_id": model.config.mask_token_id,
        "max_length": preparation.max_length,
        "rows": asdict(counts),
        "overlap": {benchmark.name: benchmark.report() for benchmark in preparation.benchmarks},
    }


def _samples(preparation: Preparation, eos: int, counts: RowCounts) -> Iterator[EncodedChat]:
    model = preparation.model
    chats = _conversations(preparation, counts)
    while chunk := list(itertools.islice(chats, CHUNK)):
        encoded = encode_chats(model.tokenizer, chunk, eos_token_id=eos, mask_token_id=model.config.mask_token_id)
        for sample in encoded:
            if len(sample.prompt) + len(sample.response) + 1 > preparation.max_length:
                counts.too_long += 1
                continue
            counts.kept += 1
            yield sample


def _conversations(preparation: Preparation, counts: RowCounts) -> Iterator[tuple[str, Messages]]:
    columns = preparation.columns
    for name, row in itertools.islice(read_rows(preparation.files), preparation.limit):
        counts.read += 1
        try:
            columns = columns or Columns.of(row)
            messages = columns.messages(row)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        prompts = [message["content"] for message in messages if message["role"] == "user"]
        repeating = [benchmark.check(name, prompts) for benchmark in preparation.benchmarks]
        if any(repeating) and preparation.drop_overlap:
            counts.repeating += 1
            continue
        yield name, messages
