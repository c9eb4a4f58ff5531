"""A model's answers to the prompts of a data set. They are kept part by part, so that a killed job can continue.

    answers.json        the answering model and its settings; a job with other settings cannot continue the folder
    part_000003.jsonl   64 rows: the row's name, its prompt's digest, the answer's text, how it ended, its counts

Rows keep their order. A part is decoded in one batch that shares nothing with earlier parts, and its file appears
whole. So a run that was killed and continued writes the same bytes as an uninterrupted run. If the data set has grown,
its last part is decoded again. If it has shrunk, the first lines of the last part are used.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mbd_core.batch.answer_ends import fit_request
from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.literal_text import token_ids
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.files import PartsFolder, durable_file, write_json
from mbd_core.json_text import differing_fields, parse_json
from mbd_core.multitf.data.chats import Chat, prompt_text
from mbd_core.multitf.data.preparation import ModelAnswer

ANSWERS_KIND = "decoded answers"  # the folder's kind in its manifest
SETTINGS, LOCK = "answers.json", ".mbd-answers.lock"
FILES = (SETTINGS, LOCK, "part_*.jsonl")
PART = 64
"""The number of rows in a part. They are decoded together, and their file appears whole."""
REFUSED = "refused"
VERSIONS = ("mbd-cluster", "torch", "transformers")  # the packages on which tokens and texts depend


@dataclass(frozen=True, kw_only=True)
class Answering:
    """Who answers and how.

    `max_tokens` bounds an answer. An answer that does not end within it is left out, or kept as it is with
    `keep_unfinished`. A drawn answer's seed is `sampling.seed` plus the row's number.

    `model` is the model's name as given, `digest` the digest of its files. `max_rows` is the number of rows decoded at
    once, which can decide a token if the batch size changes how numbers are rounded.
    """

    model: str
    digest: str
    decoding: DecodingConfig
    sampling: Sampling
    max_tokens: int
    keep_unfinished: bool = False
    max_rows: int = 16

    def record(self) -> dict[str, Any]:
        """The data folder's record of its answers, in JSON's types: everything that decides their bytes."""
        record = json.loads(json.dumps({**asdict(self), "versions": {name: version(name) for name in VERSIONS}}))
        assert isinstance(record, dict)
        return record


AnswerRecord = dict[str, Any]
"""A row's answer as its part's file has it, without the row's name."""

Parts = Sequence[tuple[int, Sequence[Chat]]]
"""Numbered parts of the rows."""


class DecodeParts(Protocol):
    """Decodes parts, each by itself. The results may come in any order."""

    def __call__(self, parts: Parts) -> Iterator[tuple[int, list[AnswerRecord]]]: ...
    def close(self) -> None: ...


class ModelAnswers:
    """Answers chats in their order. `decode` makes the answers that `folder` does not hold yet.

    A caller should give `rows_at_once` rows (whole parts) to each call of `answer`. `num_rows`, the number of all
    rows, is for the progress bar. Raises `ValueError` if the folder holds something else, or answers of other
    settings.
    """

    def __init__(
        self,
        answering: Answering,
        decode: DecodeParts,
        folder: Path,
        *,
        rows_at_once: int = PART,
        num_rows: int | None = None,
    ) -> None:
        self.answering, self.folder, self.rows_at_once = answering, folder, rows_at_once
        self._decode, self._next, self._num_rows = decode, 0, num_rows
        self._bar: tqdm[Any] | None = None
        self._parts = PartsFolder(folder, ANSWERS_KIND, FILES, lock=LOCK)
        try:
            self._check_settings()
        except ValueError:
            self._parts.close()
            raise

    def record(self) -> dict[str, Any]:
        """The data folder's record of its answers."""
        return self.answering.record()

    def answer(self, chats: Sequence[Chat]) -> list[ModelAnswer]:
        """The answers to chats that end with the user's message. In all calls but the last, `chats` are whole
        parts."""
        groups = [chats[start : start + PART] for start in range(0, len(chats), PART)]
        parts = dict(enumerate(groups, start=self._next))
        self._next += len(parts)
        missing_parts = [(number, part) for number, part in parts.items() if not self._keeps(number, part)]
        if missing_parts:
            bar = self._progress(missing_parts[0][0] * PART)
            for number, lines in self._decode(missing_parts):
                rows = [name | line for name, line in zip(_names(parts[number]), lines, strict=True)]
                with durable_file(self._file(number)) as new_file:
                    new_file.write_text("".join(json.dumps(line) + "\n" for line in rows), encoding="utf-8")
                bar.update(len(lines))
        return [self._answer(line) for number, part in parts.items() for line in self._stored_lines(number, part)]

    def close(self) -> None:
        """End the progress bar, and let another process write in the folder."""
        self._parts.close()
        if self._bar is not None:
            self._bar.close()

    def _check_settings(self) -> None:
        file, settings = self.folder / SETTINGS, self.record()
        settings.pop("keep_unfinished")  # it decides which stored answers are used, not their bytes
        if not file.exists():
            write_json(file, settings)
            return
        if fields := differing_fields(parse_json(file.read_bytes(), str(file)), settings):
            raise ValueError(
                f"{self.folder} holds answers that were decoded with other settings ({SETTINGS}): {fields}; give "
                "the earlier settings or another --answers, or remove the folder"
            )

    def _file(self, number: int) -> Path:
        return self.folder / f"part_{number:06d}.jsonl"

    def _keeps(self, number: int, chats: Sequence[Chat]) -> bool:
        """Whether all answers of a part are there."""
        return self._file(number).exists() and len(self._stored_lines(number, chats)) == len(chats)

    def _stored_lines(self, number: int, chats: Sequence[Chat]) -> list[AnswerRecord]:
        """The first lines of a part's file, one for each of `chats`. Raises `ValueError` if the lines belong to other
        rows."""
        file, names = self._file(number), _names(chats)
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][: len(names)]
        if [{key: line[key] for key in ("row", "prompt")} for line in lines] != names[: len(lines)]:
            raise ValueError(f"{file} holds answers to other rows; give another --answers, or remove {self.folder}")
        return lines

    def _progress(self, num_done: int) -> "tqdm[Any]":
        """The bar, which begins with the first part that is decoded now."""
        if self._bar is None:
            self._bar = tqdm(initial=num_done, total=self._num_rows, unit="answers", desc="answers")
        return self._bar

    def _answer(self, line: AnswerRecord) -> ModelAnswer:
        if line["finish_reason"] == REFUSED or not line["text"].strip():
            return ModelAnswer("", "unanswered")
        if line["finish_reason"] != "stop" and not self.answering.keep_unfinished:
            return ModelAnswer("", "unfinished")
        return ModelAnswer(line["text"])


class PartDecoder:
    """Decodes parts one by one, by an engine that `load` makes for the first part.

    Raises `ValueError` for settings that the engine refuses.
    """

    def __init__(self, answering: Answering, load: Callable[[], DecodingModel]) -> None:
        self.answering, self._load = answering, load
        self._model: DecodingModel | None = None

    def __call__(self, parts: Parts) -> Iterator[tuple[int, list[AnswerRecord]]]:
        for number, chats in parts:
            yield number, self.decode(number, chats)

    def close(self) -> None:
        """Drop the engine."""
        if self._model is not None:
            self._model.engine.close()
            self._model = None

    def decode(self, number: int, chats: Sequence[Chat]) -> list[AnswerRecord]:
        """The records of a part's answers."""
        if self._model is None:
            self._model = self._load()
        engine, tokenizer, settings = self._model.engine, self._model.tokenizer, self.answering
        engine.forget_prefixes()
        requests = []
        for place, prompt in enumerate(_prompts(tokenizer, chats)):
            sampling = replace(settings.sampling, seed=settings.sampling.seed + number * PART + place)
            request = Request(
                request_id=str(place),
                prompt=tuple(prompt),
                max_tokens=settings.max_tokens,
                decoding=settings.decoding,
                sampling=sampling,
            )
            requests.append(fit_request(request, engine.admission.max_positions))
        admitted_requests = [request for request in requests if _is_admitted(engine, request)]
        outputs = (
            {output.request_id: output for output in engine.generate(admitted_requests)} if admitted_requests else {}
        )
        return [_line(tokenizer, outputs.get(request.request_id)) for request in requests]


def _prompts(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> list[list[int]]:
    return token_ids(tokenizer, [prompt_text(tokenizer, chat) for chat in chats])


def _is_admitted(engine: Engine, request: Request) -> bool:
    """Whether the engine has room for the request. Raises `RequestRefused`, a `ValueError`, if the engine refuses it
    for another reason."""
    try:
        engine.admission.check(request)
    except RequestRefused as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    return True


def _line(tokenizer: PreTrainedTokenizerBase, output: Output | None) -> AnswerRecord:
    if output is None:
        return {"text": "", "finish_reason": REFUSED}
    return {
        "text": decode_text(tokenizer, output.tokens),
        "finish_reason": output.finish_reason,
        "num_tokens": output.counts.num_tokens,
        "num_forwards": output.counts.num_forwards,
    }


def _names(chats: Sequence[Chat]) -> list[dict[str, str]]:
    """The identity of a part's rows in its file: their names and the digests of their prompts."""
    return [{"row": chat.name, "prompt": prompt_digest(chat.messages, chat.tools, chat.variables)} for chat in chats]


def prompt_digest(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A digest of a prompt, by which a stored answer is matched to its row."""
    content: list[Any] = [list(messages), list(tools)] if tools else list(messages)
    content = [content, dict(variables)] if variables else content
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
