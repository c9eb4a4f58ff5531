"""Files of conversations to a folder of training samples, row by row: encoded, filtered, counted, compared."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.folder import ModelFolder
from mbd_core.files import folder_beside
from mbd_core.multitf.data.benchmark_overlap import Benchmark
from mbd_core.multitf.data.chats import Chat, prompt_text
from mbd_core.multitf.data.conversation_rows import Columns
from mbd_core.multitf.data.encoding import EncodedChat, EncodedRow, encode_rows, fill_token, tokenizer_fingerprint
from mbd_core.multitf.data.prepared import DATA_KIND, write_record, write_samples
from mbd_core.multitf.data.row_summary import RowSummary
from mbd_core.multitf.data.turns import ColumnRefused, Notes
from mbd_core.row_files.rows import read_file

CHUNK = 256
"""The number of conversations that are tokenised together."""

EncodeChats = Callable[[Iterable[list[Chat]]], Iterator[list[EncodedRow]]]
"""Tokenises chunks of conversations in their order: here (`encoder`), or on a cluster."""

MOST_SHOWN = 20
"""The number of bad rows that a refusal names."""
SKIPPED = "skipped.txt"
"""The file in a data folder that lists the rows left out as bad, and the reasons."""


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to a row, or the reason why there is none.

    The reasons: it did not end within its tokens, it is empty, or the prompt does not fit into the model.
    """

    text: str
    missing: Literal["unfinished", "unanswered"] | None = None


class AnswerSource(Protocol):
    """A source of answers that replace rows' own answers, for chats that end with the user's message."""

    rows_at_once: int

    def answer(self, chats: Sequence[Chat]) -> list[ModelAnswer]: ...
    def record(self) -> dict[str, Any]: ...


@dataclass
class RowCounts:
    """The fates of the rows, counted.

    Answers of a model that cannot be encoded count as `unanswered`; `not_encoded` is the reason for the first. `bad`
    rows cannot be trained on. `left_by_weight` rows are left out by their file's weight.
    """

    num_read: int = 0
    num_kept: int = 0
    bad: int = 0
    left_by_weight: int = 0
    too_long: int = 0
    repeating: int = 0
    unfinished: int = 0
    unanswered: int = 0
    not_encoded: str = ""

    def __str__(self) -> str:
        missing = self.unfinished + self.unanswered
        return (
            f"{self.num_read} rows: {self.num_kept} kept, {self.too_long} too long, {self.repeating} left out for "
            "repeating a benchmark"
            + (f", {self.bad} bad ({SKIPPED} says why)" if self.bad else "")
            + (f", {self.left_by_weight} left out by their files' weights" if self.left_by_weight else "")
            + (f", {self.unfinished} whose answer did not end, {self.unanswered} without an answer" if missing else "")
            + (f"; an answer cannot be encoded: {self.not_encoded}" if self.not_encoded else "")
        )


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A preparation: rows of `files`, for the tokenizer of `model`, in at most `max_length` tokens with their EOS.

    `columns` choose the columns; by default each file has its conversations under usual names. `weights`, one for each
    file: of a file with weight w, row n appears floor(w (n + 1)) - floor(w n) times. `every`: train all answers of a
    conversation, not the last alone. `skip_bad`: leave out rows that cannot be trained on. A prompt that a model
    answers must pass the chat templates of all `readers`. Rows whose prompts repeat a problem of one of `benchmarks`
    are reported, and with `drop_overlap` left out. `limit` bounds the number of rows. With `answers`, a model's answer
    replaces a row's own. Raises `ValueError` for a model without a chat template.
    """

    files: Sequence[str]
    model: ModelFolder
    max_length: int
    columns: Columns | None = None
    benchmarks: Sequence[Benchmark] = ()
    drop_overlap: bool = False
    limit: int | None = None
    answers: AnswerSource | None = None
    weights: Sequence[float] | None = None
    every: bool = False
    skip_bad: bool = False
    readers: Sequence[PreTrainedTokenizerBase] = ()

    def __post_init__(self) -> None:
        if not self.model.tokenizer.chat_template:
            raise ValueError(
                f"{self.model.path} has no chat template, which makes a text of a conversation: write one into its "
                "chat_template.jinja"
            )


class BadRows:
    """The rows that cannot be trained on: counted and written into a file. The first of them are kept."""

    def __init__(self, file: Path | None, counts: RowCounts) -> None:
        self._file, self._counts = file, counts
        self._first: list[str] = []

    def add(self, name: str, reason: str) -> None:
        """Takes a row's name, and the reason."""
        self._counts.bad += 1
        line = f"{name}: {reason}"
        if len(self._first) < MOST_SHOWN:
            self._first.append(line)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def add_unread(self, name: str, reason: str) -> None:
        """Takes a line that is no row. It was read, but is not counted yet."""
        self._counts.num_read += 1
        self.add(name, reason)

    @property
    def first(self) -> str:
        """The first row with its reason; "" if there is none."""
        return self._first[0] if self._first else ""

    def refuse(self) -> None:
        """Raises `ValueError` with the first bad rows if there are any."""
        total = self._counts.bad
        if total == 1:
            raise ValueError(f"{self._first[0]}; correct the row, or leave it out with --skip-bad")
        if total:
            more = f"\n... and {total - len(self._first)} more" if total > len(self._first) else ""
            lines = "".join(f"\n{line}" for line in self._first)
            raise ValueError(f"{total} rows are bad; correct them, or leave them out with --skip-bad:{lines}{more}")


def prepare_data(
    preparation: Preparation,
    folder: Path,
    *,
    overwrite: bool = False,
    encode: EncodeChats | None = None,
    summary: RowSummary | None = None,
) -> RowCounts:
    """Writes the folder, whole or not at all. The same rows give the same bytes, whoever tokenises (`encode`).

    `summary` collects how the rows were read. Raises `ValueError` naming rows that are malformed, have no answer, or
    that the template refuses, unless they are skipped. Raises it too if no row is left.
    """
    model, counts = preparation.model, RowCounts()
    eos = fill_token(model.tokenizer, model.config)
    with folder_beside(folder, DATA_KIND, overwrite=overwrite) as new_folder:
        bad = BadRows(new_folder / SKIPPED, counts)
        encode = encode or encoder(model, every=preparation.every, max_length=preparation.max_length)
        summary = summary or RowSummary()
        written = write_samples(new_folder, _samples(preparation, encode, counts, bad, summary))
        if not preparation.skip_bad:
            bad.refuse()
        if not counts.num_kept:
            raise ValueError(_none_left(preparation, counts, bad))
        write_record(new_folder, record(preparation, counts, eos) | written)
    return counts


def preview(preparation: Preparation, summary: RowSummary) -> RowCounts:
    """Reads rows until `summary` is full, and writes nothing; raises as `prepare_data`."""
    counts = RowCounts()
    bad = BadRows(None, counts)
    encode = encoder(preparation.model, every=preparation.every, max_length=preparation.max_length)
    for _ in _samples(preparation, encode, counts, bad, summary):
        if summary.is_full:
            break
    if not preparation.skip_bad:
        bad.refuse()
    if not counts.num_kept:
        raise ValueError(_none_left(preparation, counts, bad))
    return counts


def _none_left(preparation: Preparation, counts: RowCounts, bad: BadRows) -> str:
    why = f"; the first: {bad.first}" if bad.first else ""
    return f"{', '.join(preparation.files)}: no row is left of {counts}{why}"


def record(preparation: Preparation, counts: RowCounts, eos_token_id: int) -> dict[str, Any]:
    """The data folder's record of its preparation; the sizes of the result are added later."""
    model, answers = preparation.model, preparation.answers
    return {
        "files": list(preparation.files),
        "weights": None if preparation.weights is None else list(preparation.weights),
        "every_answer": preparation.every,
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
        "eos_token_id": eos_token_id,
        "mask_token_id": model.config.mask_token_id,
        "max_length": preparation.max_length,
        "rows": asdict(counts),
        "overlap": {benchmark.name: benchmark.report() for benchmark in preparation.benchmarks},
        "answers": None if answers is None else answers.record(),
    }


def encoder(model: ModelFolder, *, every: bool = False, max_length: int | None = None) -> EncodeChats:
    """An `EncodeChats` in this process, as `encode_rows` works."""
    eos = fill_token(model.tokenizer, model.config)

    def encode(chunks: Iterable[list[Chat]]) -> Iterator[list[EncodedRow]]:
        for chunk in chunks:
            yield encode_rows(model.tokenizer, chunk, eos_token_id=eos, every=every, max_length=max_length)

    return encode


def _samples(
    preparation: Preparation, encode: EncodeChats, counts: RowCounts, bad: BadRows, summary: RowSummary
) -> Iterator[EncodedChat]:
    queue: deque[tuple[Chat, int]] = deque()  # the chats in encoding, with their numbers of copies
    for rows in encode(_chunks(preparation, counts, bad, queue, summary)):
        for row in rows:
            chat, copies = queue.popleft()
            if row.error:
                bad.add(chat.name, row.error)
            elif row.is_too_long:
                counts.too_long += 1
            else:
                counts.num_kept += 1
                summary.add_samples(chat, row.samples, copies)
                for _ in range(copies):
                    yield from row.samples


def _chunks(
    preparation: Preparation, counts: RowCounts, bad: BadRows, queue: deque[tuple[Chat, int]], summary: RowSummary
) -> Iterator[list[Chat]]:
    answers = preparation.answers
    rows = _conversations(preparation, counts, bad, answered=answers is None, summary=summary)
    while chunk := list(itertools.islice(rows, CHUNK if answers is None else answers.rows_at_once)):
        # all rows are answered: answers are kept even if the row is left out now
        chunk_answers = [None] * len(chunk) if answers is None else answers.answer([chat for chat, _ in chunk])
        chats = []
        for (chat, copies), answer in zip(chunk, chunk_answers, strict=True):
            if _is_left_out(preparation, chat):
                counts.repeating += 1
            elif not copies:
                counts.left_by_weight += 1
            elif (result := chat if answer is None else _with_answer(preparation, chat, answer, counts)) is not None:
                chats.append(result)
                queue.append((result, copies))
        yield chats


def _with_answer(preparation: Preparation, chat: Chat, answer: ModelAnswer, counts: RowCounts) -> Chat | None:
    """The chat with its answer, if it was answered."""
    if answer.missing == "unfinished":
        counts.unfinished += 1
        return None
    if answer.missing is not None:
        counts.unanswered += 1
        return None
    conversation = chat._replace(messages=[*chat.messages, {"role": "assistant", "content": answer.text}])
    ((row,),) = encoder(preparation.model)([[conversation]])
    if row.error:
        counts.unanswered += 1
        counts.not_encoded = counts.not_encoded or f"{chat.name}: {row.error}"
        return None
    return conversation


def check_prompts(preparation: Preparation) -> int:
    """The number of rows that a model would answer.

    Raises `ValueError` naming rows whose prompts cannot be read, unless they are skipped.
    """
    counts = RowCounts()
    bad = BadRows(None, counts)
    count = sum(1 for _ in _conversations(preparation, counts, bad, answered=False))
    if not preparation.skip_bad:
        bad.refuse()
    return count


def _is_left_out(preparation: Preparation, chat: Chat) -> bool:
    """Whether a row is left out because it repeats a benchmark; counts the repetition."""
    prompts = [message["content"] for message in chat.messages if message["role"] == "user"]
    repeating = [benchmark.check(chat.name, prompts) for benchmark in preparation.benchmarks]
    return any(repeating) and preparation.drop_overlap


def _conversations(
    preparation: Preparation, counts: RowCounts, bad: BadRows, *, answered: bool, summary: RowSummary | None = None
) -> Iterator[tuple[Chat, int]]:
    """The rows as conversations, each with the number of its copies; without their answers, where a model answers.

    Raises `ValueError` for the first row with a column that is not read, unless bad rows are skipped.
    """
    columns, given = None, preparation.columns or Columns(answered=answered)
    for name, row, place, copies in itertools.islice(_weighted_rows(preparation, bad), preparation.limit):
        counts.num_read += 1
        notes: Notes = []
        try:
            if not place or columns is None:  # each file has its own
                columns = given.found(row)
            chat = columns.conversation(name, row, notes)
            for reader in () if answered else preparation.readers:
                prompt_text(reader, chat)
        except ValueError as error:
            if isinstance(error, ColumnRefused) and not preparation.skip_bad:
                raise ValueError(f"{name}: {error}") from None
            bad.add(name, str(error))
            continue
        if summary is not None:
            summary.add_row(notes)
        yield chat, copies


def _weighted_rows(preparation: Preparation, bad: BadRows) -> Iterator[tuple[str, Mapping[str, Any], int, int]]:
    """Every row with its name, its place in its file, and the number of its copies."""
    weights = preparation.weights or [1.0] * len(preparation.files)
    for file, weight in zip(preparation.files, weights, strict=True):
        for place, row in enumerate(read_file(file, unique=True, bad=bad.add_unread)):
            yield row.name, row.values, place, math.floor(weight * (place + 1)) - math.floor(weight * place)
