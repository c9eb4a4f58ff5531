"""The first stage of a sweep: every row of a table is decoded by the engine of its model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import decode_text
from mbd_core.decoding.decoding_config import DecodingConfig, from_fields
from mbd_core.decoding.request import Output, Request
from mbd_core.decoding.rollout import Rollout
from mbd_core.engine.admission import RequestRefused
from mbd_core.engine.engine import Engine
from mbd_core.evaluation.answer_ends import Stops, before_stop, fitted, generate_until
from mbd_core.evaluation.prompts import prompt_ids
from mbd_core.evaluation.sample_tables import DECODED_COLUMNS
from mbd_core.evaluation.sweep_parts import in_turns


@dataclass(frozen=True)
class DecodingModel:
    """An engine, and the tokenizer of its model."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Failure:
    """Why a request has no output."""

    error: str


def sample_requests(model: DecodingModel, rows: Sequence[Mapping[str, Any]]) -> list[Request]:
    """A request for each row of `PLANNED_COLUMNS`; its id is the row's number. It asks for fewer tokens than the plan
    where the model holds no more, and the plan allows it."""
    positions = model.engine.admission.model.max_positions
    requests = []
    for row, prompt in zip(rows, prompt_ids(model.tokenizer, [row["input"] for row in rows]), strict=True):
        request = Request(
            request_id=str(row["sample"]),
            prompt=tuple(prompt),
            max_tokens=row["max_tokens"],
            decoding=from_fields(DecodingConfig, json.loads(row["config"])),
        )
        requests.append(fitted(request, positions) if row["may_shorten"] else request)
    return requests


def sample_stops(rows: Sequence[Mapping[str, Any]]) -> Stops:
    """The stop strings of each row's request, by its id."""
    return {str(row["sample"]): json.loads(row["stop"]) for row in rows}


def _replay(tokens: Sequence[int], rollout: Rollout, piece: Callable[[int], str]) -> dict[str, Any]:
    """The columns `REPLAY` of an answer."""
    edits = [{"index": edit.index, "step": edit.step, "piece": piece(edit.token)} for edit in rollout.edits]
    return {"pieces": list(map(piece, tokens)), "steps": list(rollout.steps), "edits": edits or None}


class ModelRefused(ValueError):
    """A model cannot be loaded with the engine's configuration, for example without memory for a KV page."""


class DecodeStage:
    """Decodes tables of samples. Rows with different decoding configurations run together.

    `load` loads a model by the name in the rows; its `ValueError` becomes a `ModelRefused`. One engine is in memory at
    a time: it is closed before another model is loaded, and after a failure before it is loaded again. It forgets the
    prefixes of one table before the next, so that a row's numbers depend on its table alone, not on what ran before.
    """

    def __init__(self, load: Callable[[str], DecodingModel]) -> None:
        self._load = load
        self._loaded: tuple[str, DecodingModel] | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table (`PLANNED_COLUMNS`) with texts and counts (`DECODED_COLUMNS`)."""
        rows = table.to_pylist()
        for name in dict.fromkeys(row["model"] for row in rows):
            self._model(name).engine.forget_prefixes()
            self._decode(name, in_turns([row for row in rows if row["model"] == name]))
        return pa.Table.from_pylist(rows, schema=DECODED_COLUMNS)

    def close(self) -> None:
        """Close and drop the engine. The next table loads it again."""
        if self._loaded is not None:
            (_, model), self._loaded = self._loaded, None
            model.engine.close()

    def _model(self, name: str) -> DecodingModel:
        """The model with that name. The caller must not keep its engine while another one may be loaded."""
        if self._loaded is None or self._loaded[0] != name:
            self.close()
            try:
                self._loaded = (name, self._load(name))
            except ValueError as error:
                raise ModelRefused(f"model '{name}': {error}") from error
        return self._loaded[1]

    def _decode(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add text and counts to rows of one model, or the error."""
        model = self._model(name)
        tokenizer, stops = model.tokenizer, sample_stops(rows)
        requests = [replace(request, replay=True) for request in sample_requests(model, rows)]
        del model  # the engine may be closed from here on
        piece = lru_cache(maxsize=None)(lambda token: decode_text(tokenizer, [token], special=True))
        for row, request in zip(rows, requests, strict=True):
            row["max_tokens"] = request.max_tokens
        results = self._results(name, requests, stops)
        for row in rows:
            result = results[str(row["sample"])]
            if isinstance(result, Failure):
                row["error"] = result.error
            else:
                text = before_stop(decode_text(tokenizer, result.tokens), stops[str(row["sample"])])
                row.update(asdict(result.counts), text=text, finish_reason=result.finish_reason)
                assert result.rollout is not None
                row.update(_replay(result.tokens, result.rollout, piece))

    def _results(self, name: str, requests: Sequence[Request], stops: Stops) -> dict[str, Output | Failure]:
        """An output or a failure for every request, by its id."""
        results: dict[str, Output | Failure] = {}
        for request in requests:
            try:
                self._model(name).engine.admission.check(request)
            except RequestRefused as error:
                results[request.request_id] = Failure(str(error))
        return results | self._run(name, [request for request in requests if request.request_id not in results], stops)

    def _run(self, name: str, requests: Sequence[Request], stops: Stops) -> dict[str, Output | Failure]:
        """Run admitted requests together. If that fails, run each alone, so that only the cause of it fails."""
        if not requests:
            return {}
        outputs = self._generate(name, requests, stops)
        if not isinstance(outputs, Failure):
            return {output.request_id: output for output in outputs}
        if len(requests) == 1:
            return {requests[0].request_id: outputs}
        results: dict[str, Output | Failure] = {}
        for request in requests:
            results |= self._run(name, [request], stops)
        return results

    def _generate(self, name: str, requests: Sequence[Request], stops: Stops) -> list[Output] | Failure:
        """The outputs, or a `Failure` for any exception of the engine, which is then closed: its state is unknown.

        The engine is dropped after the `except` clause, because inside it the traceback still refers to the engine and
        keeps its memory.
        """
        model = self._model(name)
        try:
            return generate_until(model.engine, requests, stops, partial(decode_text, model.tokenizer))
        except Exception as error:
            failure = Failure(f"{type(error).__name__}: {error}")
        self.close()
        return failure
