"""Files of conversations to a folder of training samples, row by row: encoded, filtered, counted, compared."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import chat_text
from mbd_core.checkpoint.folder import ModelFolder
from mbd_core.files import folder_beside
from mbd_core.multitf.data.conversation_rows import PAIRS, Columns, Messages, Row, read_rows
from mbd_core.multitf.data.encoding import EncodedChat, encode_chats, fill_token, tokenizer_fingerprint
from mbd_core.multitf.data.prepared import DATA_KIND, write_record, write_samples

# Which training prompts repeat a benchmark's problems: the same run of words in both.

RUN = 13
"""So many words in a row, as decontamination usually takes; a shorter problem counts as a whole."""
SHOWN = 5
PROBLEM_COLUMNS = (*dict.fromkeys(prompt for prompt, _ in PAIRS), "text")


def words(text: str) -> list[str]:
    """The text's words and numbers in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def runs(text: str, size: int = RUN) -> Iterator[tuple[str, ...]]:
    """Every run of `size` words; of a shorter text all its words, if there are at least three."""
    if len(words(text)) >= size:
        yield from _windows(text, size)
    elif len(words(text)) >= 3:
        yield tuple(words(text))


@dataclass
class Benchmark:
    """A benchmark's problems as runs of words, and what training prompts had of them so far."""

    name: str
    problems: dict[tuple[str, ...], int]
    lengths: frozenset[int]
    rows: int = 0
    seen: set[int] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, rows: Iterable[Row]) -> "Benchmark":
        """The benchmark of a file's rows; `ValueError` if they hold no problem."""
        problems: dict[tuple[str, ...], int] = {}
        for number, (row_name, row) in enumerate(rows):
            column = next((c for c in PROBLEM_COLUMNS if isinstance(row.get(c), str)), None)
            if column is None:
                raise ValueError(f"{row_name}: a benchmark's row needs one of {', '.join(PROBLEM_COLUMNS)}, as text")
            for run in runs(row[column]):
                problems.setdefault(run, number)
        if not problems:
            raise ValueError(f"{name} holds no problem with which to compare")
        return cls(name, problems, frozenset(map(len, problems)))

    def check(self, name: str, prompts: Sequence[str]) -> bool:
        """Whether a row's prompts repeat a problem; it is counted."""
        repeated = {
            self.problems[run]
            for prompt in prompts
            for size in self.lengths
            for run in _windows(prompt, size)
            if run in self.problems
        }
        if repeated:
            self.rows += 1
            self.seen |= repeated
            if len(self.examples) < SHOWN:
                self.examples.append(name)
        return bool(repeated)

    def report(self) -> dict[str, object]:
        """Rows that repeat a problem, how many of its problems they repeat, and the first rows' names."""
        return {"rows": self.rows, "problems": len(self.seen), "first": list(self.examples)}


def _windows(text: str, size: int) -> Iterator[tuple[str, ...]]:
    row = words(text)
    return (tuple(row[i : i + size]) for i in range(len(row) - size + 1))


# Rows to samples.

CHUNK = 256
"""So many conversations are tokenised together."""

Chat = tuple[str, Messages]
"""A row's name, and its conversation."""


Encode = Callable[[Iterable[list[Chat]]], Iterator[list[EncodedChat]]]
"""Tokenises chunks of conversations, in their order: here (`encoder`), or on a cluster."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to a row; or why there is none: it did not end within its tokens, or is empty, or the prompt
    does not fit into the model."""

    text: str
    missing: Literal["unfinished", "unanswered"] | None = None


class Answers(Protocol):
    """Whoever answers rows in place of the answers that they have, chats that end with the user's message."""

    rows_at_once: int

    def answer(self, chats: Sequence[Chat]) -> list[Answer]: ...
    def record(self) -> dict[str, Any]: ...


@dataclass
class RowCounts:
    """What became of the rows that were read.

    Answers of a model that cannot be encoded count as `unanswered`; `not_encoded` says of the first why.
    """

    read: int = 0
    kept: int = 0
    too_long: int = 0
    repeating: int = 0
    unfinished: int = 0
    unanswered: int = 0
    not_encoded: str = ""

    def __str__(self) -> str:
        missing = self.unfinished + self.unanswered
        return (
            f"{self.read} rows: {self.kept} kept, {self.too_long} too long, {self.repeating} left out for repeating a "
            "benchmark"
            + (f", {self.unfinished} whose answer did not end, {self.unanswered} without an answer" if missing else "")
            + (f"; an answer cannot be encoded: {self.not_encoded}" if self.not_encoded else "")
        )


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is prepared: rows of `files`, for the tokenizer of `model`, in at most `max_length` tokens with their EOS.

    `columns` name the conversations; by default they have usual names. Rows whose prompts repeat a problem of one of
    `benchmarks` are reported, and with `drop_overlap` left out. `limit` reads only so many rows. With `answers` a
    row's own answer, if it has one, gives way to that of a model.
    """

    files: Sequence[str]
    model: ModelFolder
    max_length: int
    columns: Columns | None = None
    benchmarks: Sequence[Benchmark] = ()
    drop_overlap: bool = False
    limit: int | None = None
    answers: Answers | None = None


def prepare_data(
    preparation: Preparation, folder: Path, *, overwrite: bool = False, encode: Encode | None = None
) -> RowCounts:
    """Write the folder, whole or not at all; the same rows give the same bytes, whoever tokenises (`encode`).

    Raises `ValueError` naming the row that is malformed, has no answer, or that the template refuses, and if no row is
    left.
    """
    model, counts = preparation.model, RowCounts()
    eos = fill_token(model.tokenizer, model.config)
    with folder_beside(folder, DATA_KIND, overwrite=overwrite) as beside:
        written = write_samples(beside, _samples(preparation, encode or encoder(model), counts))
        if not counts.kept:
            raise ValueError(f"{', '.join(preparation.files)}: no row is left of {counts}")
        write_record(beside, record(preparation, counts, eos) | written)
    return counts


def record(preparation: Preparation, counts: RowCounts, eos_token_id: int) -> dict[str, Any]:
    """What the data folder says of its making; the sizes of what was written are added."""
    model, answers = preparation.model, preparation.answers
    return {
        "files": list(preparation.files),
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
        "eos_token_id": eos_token_id,
        "mask_token_id": model.config.mask_token_id,
        "max_length": preparation.max_length,
        "rows": asdict(counts),
        "overlap": {benchmark.name: benchmark.report() for benchmark in preparation.benchmarks},
        "answers": None if answers is None else answers.record(),
    }


def encoder(model: ModelFolder) -> Encode:
    """Tokenise for a model in this process."""
    eos = fill_token(model.tokenizer, model.config)

    def encode(chunks: Iterable[list[Chat]]) -> Iterator[list[EncodedChat]]:
        for chunk in chunks:
            yield encode_chats(model.tokenizer, chunk, eos_token_id=eos)

    return encode


def _samples(preparation: Preparation, encode: Encode, counts: RowCounts) -> Iterator[EncodedChat]:
    for encoded in encode(_chunks(preparation, counts)):
        for sample in encoded:
            if len(sample.prompt) + len(sample.response) + 1 > preparation.max_length:
                counts.too_long += 1
                continue
            counts.kept += 1
            yield sample


def _chunks(preparation: Preparation, counts: RowCounts) -> Iterator[list[Chat]]:
    chats, answers = _conversations(preparation), preparation.answers
    while chunk := list(itertools.islice(chats, CHUNK if answers is None else answers.rows_at_once)):
        counts.read += len(chunk)
        given = None if answers is None else answers.answer(chunk)  # all: answers are kept whatever is left out now
        kept = [number for number, chat in enumerate(chunk) if not _is_left_out(preparation, chat)]
        counts.repeating += len(chunk) - len(kept)
        chunk = [chunk[number] for number in kept]
        yield chunk if given is None else _answered(preparation, chunk, [given[number] for number in kept], counts)


def _answered(
    preparation: Preparation, chats: Sequence[Chat], answers: Sequence[Answer], counts: RowCounts
) -> list[Chat]:
    """The chats that were answered, with their answers."""
    whole, encode = [], encoder(preparation.model)
    for (name, messages), answer in zip(chats, answers, strict=True):
        if answer.missing == "unfinished":
            counts.unfinished += 1
            continue
        if answer.missing is not None:
            counts.unanswered += 1
            continue
        chat = (name, [*messages, {"role": "assistant", "content": answer.text}])
        try:
            next(encode([[chat]]))
        except ValueError as error:
            counts.unanswered += 1
            counts.not_encoded = counts.not_encoded or str(error)
            continue
        whole.append(chat)
    return whole


def check_prompts(preparation: Preparation, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows a model with this tokenizer would answer; `ValueError` naming the first that its chat template, or
    that of the data's model, refuses."""
    count = 0
    for name, messages in _conversations(preparation, answered=False):
        count += 1
        try:
            for reader in (preparation.model.tokenizer, tokenizer):
                chat_text(reader, messages)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return count


def _is_left_out(preparation: Preparation, chat: Chat) -> bool:
    """Whether a row repeats a benchmark, which is counted, and is to be left out then."""
    name, messages = chat
    prompts = [message["content"] for message in messages if message["role"] == "user"]
    repeating = [benchmark.check(name, prompts) for benchmark in preparation.benchmarks]
    return any(repeating) and preparation.drop_overlap


def _conversations(preparation: Preparation, *, answered: bool | None = None) -> Iterator[Chat]:
    """The rows as conversations; without their answers, where a model answers."""
    columns, answered = preparation.columns, preparation.answers is None if answered is None else answered
    for name, row in itertools.islice(read_rows(preparation.files), preparation.limit):
        try:
            columns = columns or Columns.of(row, answered=answered)
            messages = columns.messages(row)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        yield name, messages
