"""Decodes each row of a table by its model's engine until the answer ends, or scores the row's texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pyarrow as pa

from mbd_core.batch.answer_ends import Stops, fit_request, generate_until
from mbd_core.batch.decoding_model import DecodingModel, ModelRefused
from mbd_core.batch.inputs import prompt_ids
from mbd_core.batch.parts import in_turns
from mbd_core.batch.rows import DECODED_COLUMNS, LIKELIHOOD, DecodedRow, EditCell, PlannedRow, before_stop, with_draws
from mbd_core.batch.scoring import scores_of
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.checkpoint.chat import decode_text
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.config import read_decoding
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.fields import load


@dataclass(frozen=True)
class NoOutput:
    """Why a request has no output."""

    error: str


def sample_requests(model: DecodingModel, rows: Sequence[PlannedRow]) -> list[Request | NoOutput]:
    """A request for each row of `PLANNED_COLUMNS`; its id is the row's number. Where the plan allows it, a request
    asks for no more tokens than the model holds. A chat has no request if the model cannot be given its functions.
    """
    tokenizer, positions = model.tokenizer, model.engine.admission.max_positions
    chats = [ToolChat.of_input(row["input"]) for row in rows]
    other_inputs = [row["input"] for row, chat in zip(rows, chats, strict=True) if chat is None]
    other_prompts = iter(prompt_ids(tokenizer, other_inputs))
    requests: list[Request | NoOutput] = []
    for row, chat in zip(rows, chats, strict=True):
        try:
            prompt = next(other_prompts) if chat is None else chat.prompt(tokenizer)
            grammar = None if chat is None else chat.answer_grammar(tokenizer, prompt)
        except ValueError as error:
            requests.append(NoOutput(str(error)))
            continue
        request = Request(
            request_id=str(row["sample"]),
            prompt=tuple(prompt),
            max_tokens=row["max_tokens"],
            decoding=read_decoding(json.loads(row["config"])),
            sampling=load(Sampling, json.loads(row.get("sampling") or "{}")),
            grammar=grammar,
        )
        requests.append(fit_request(request, positions) if row["may_shorten"] else request)
    return requests


def sample_stops(rows: Sequence[PlannedRow]) -> Stops:
    """The stop strings of each row's request, by its id."""
    return {str(row["sample"]): json.loads(row["stop"]) for row in rows}


def _edits(answer: Piece, text: Callable[[int], str]) -> list[EditCell]:
    return [{"index": edit.index, "step": edit.step, "piece": text(edit.token)} for edit in answer.edits]


class DecodeStage:
    """Decodes tables of samples. Rows with different decoding configurations run together.

    `load_model` loads a model by the name in the rows; its `ValueError` becomes a `ModelRefused`. One engine is in
    memory at a time: it is closed before another model is loaded, and after a failure. Before each table the engine
    forgets its prefixes, so a row's numbers depend on its table alone.
    """

    def __init__(self, load_model: Callable[[str], DecodingModel]) -> None:
        self._load = load_model
        self._model_in_use: tuple[str, DecodingModel] | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table (`PLANNED_COLUMNS`) with texts and counts (`DECODED_COLUMNS`)."""
        rows: list[DecodedRow] = table.to_pylist()
        for name in dict.fromkeys(row["model"] for row in rows):
            self._model(name).engine.forget_prefixes()
            model_rows = [row for row in rows if row["model"] == name]
            self._decode(name, in_turns([row for row in model_rows if row["method"] != LIKELIHOOD]))
            for row in model_rows:
                if row["method"] == LIKELIHOOD:
                    self._score(name, row)
        return pa.Table.from_pylist(rows, schema=with_draws(DECODED_COLUMNS, rows))

    def close(self) -> None:
        """Close and drop the engine. The next table loads it again."""
        if self._model_in_use is not None:
            (_, model), self._model_in_use = self._model_in_use, None
            model.engine.close()

    def _model(self, name: str) -> DecodingModel:
        """The model with that name. The caller must not keep its engine while another model may be loaded."""
        if self._model_in_use is None or self._model_in_use[0] != name:
            self.close()
            try:
                self._model_in_use = (name, self._load(name))
            except ValueError as error:
                raise ModelRefused(f"model '{name}': {error}") from error
        return self._model_in_use[1]

    def _score(self, name: str, row: DecodedRow) -> None:
        """Add the log-likelihoods of a row's texts, as JSON, or the error. As in `_generate`, the engine is closed
        after any exception but a refusal."""
        model = self._model(name)
        try:
            row["text"], row["finish_reason"] = json.dumps(scores_of(model, row)), "scored"
            return
        except ValueError as error:
            row["error"] = str(error)
            return
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        del model
        self.close()

    def _decode(self, name: str, rows: Sequence[DecodedRow]) -> None:
        """Add text and counts to rows of one model, or the error."""
        model = self._model(name)
        tokenizer, stops = model.tokenizer, sample_stops(rows)
        requests = sample_requests(model, rows)
        del model  # the engine may be closed from here on
        token_text = lru_cache(maxsize=None)(lambda token: decode_text(tokenizer, [token], special=True))
        asked = [replace(request, replay=True) for request in requests if isinstance(request, Request)]
        results = self._results(name, asked, stops)
        for row, request in zip(rows, requests, strict=True):
            if isinstance(request, NoOutput):
                row["error"] = request.error
                continue
            row["max_tokens"] = request.max_tokens
            result = results[request.request_id]
            if isinstance(result, NoOutput):
                row["error"] = result.error
            else:
                if (chat := ToolChat.of_input(row["input"])) is not None:
                    row["text"] = chat.answer(tokenizer, request.prompt, result.tokens)
                else:
                    row["text"] = before_stop(decode_text(tokenizer, result.tokens), stops[str(row["sample"])])
                row["finish_reason"] = result.finish_reason
                row["num_prompt_tokens"], row["num_tokens"] = result.counts.num_prompt_tokens, result.counts.num_tokens
                row["num_forwards"] = result.counts.num_forwards
                row["num_store_forwards"] = result.counts.num_store_forwards
                row["num_prefill_forwards"] = result.counts.num_prefill_forwards
                row["num_drafted_tokens"] = result.counts.num_drafted_tokens
                row["num_confirmed_tokens"] = result.counts.num_confirmed_tokens
                row["num_positions"] = result.counts.num_positions
                row["pieces"] = list(map(token_text, result.tokens))
                row["steps"] = list(result.piece.steps or ())
                row["edits"] = _edits(result.piece, token_text) or None

    def _results(self, name: str, requests: Sequence[Request], stops: Stops) -> dict[str, Output | NoOutput]:
        """An output or a failure for every request, by its id."""
        results: dict[str, Output | NoOutput] = {}
        for request in requests:
            try:
                self._model(name).engine.admission.check(request)
            except RequestRefused as error:
                results[request.request_id] = NoOutput(str(error))
        return results | self._run(name, [request for request in requests if request.request_id not in results], stops)

    def _run(self, name: str, requests: Sequence[Request], stops: Stops) -> dict[str, Output | NoOutput]:
        """Run admitted requests together. If that fails, run each alone, so that only the request that causes the
        failure fails."""
        if not requests:
            return {}
        outputs = self._generate(name, requests, stops)
        if not isinstance(outputs, NoOutput):
            return {output.request_id: output for output in outputs}
        if len(requests) == 1:
            return {requests[0].request_id: outputs}
        results: dict[str, Output | NoOutput] = {}
        for request in requests:
            results |= self._run(name, [request], stops)
        return results

    def _generate(self, name: str, requests: Sequence[Request], stops: Stops) -> list[Output] | NoOutput:
        """The outputs, or a `NoOutput` for any exception of the engine, which is then closed: its state is unknown.

        The engine is dropped after the `except` clause, because inside it the traceback still refers to the engine and
        keeps its memory.
        """
        model = self._model(name)
        try:
            return generate_until(model.engine, requests, stops, partial(decode_text, model.tokenizer))
        except Exception as error:
            failure = NoOutput(f"{type(error).__name__}: {error}")
        self.close()
        return failure
