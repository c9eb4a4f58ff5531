"""The first stage of a sweep: every row of a table is decoded by the engine of its model, to where its answer ends, or
its texts are scored by the model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import decode_text
from mbd_core.decoding.blocks.config import DecodingConfig, read_decoding
from mbd_core.decoding.blocks.request import Output, Request, Rollout, StepOutput
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.canvas_decoder import canvas_max_tokens
from mbd_core.engine.admission import RequestRefused
from mbd_core.engine.engine import Engine
from mbd_core.evaluation.measures.likelihood import Draws, log_likelihood
from mbd_core.evaluation.sweep.grid import LIKELIHOOD
from mbd_core.evaluation.sweep.parts import DECODED_COLUMNS, before_stop, in_turns, with_draws
from mbd_core.evaluation.tasks.prompts import prompt_ids
from mbd_core.evaluation.tasks.scored_texts import ScoredTexts

# Where answers end: at a stop string, which ends the decoding of its request, or at the limit of their tokens.

Decode = Callable[[Sequence[int]], str]
Stops = Mapping[str, Sequence[str]]


def fit_request(request: Request, positions: int) -> Request:
    """The request with as many tokens as a model of `positions` holds behind its prompt, at most its own number. Where
    nothing fits it stays as it is, and the engine refuses it."""
    max_tokens = positions - len(request.prompt)
    if max_tokens < 1:
        return request
    canvas = request.decoding.canvas
    if canvas is None:
        return replace(request, max_tokens=min(request.max_tokens, max_tokens))
    return replace(request, max_tokens=canvas_max_tokens(canvas, preferred=request.max_tokens, most=max_tokens))


def generate_until(engine: Engine, requests: Sequence[Request], stops: Stops, decode: Decode) -> list[Output]:
    """The outputs of `requests`, in their order; raises as `Engine.generate` does.

    A request ends where its text holds one of its stop strings (`stops`, by the request's id). Its reason is then
    `stop`, its tokens and their count end with the token that completes the string, and its forwards are those up to
    the step that committed it. A rollout that was asked for ends with its tokens, and has no tail.
    """
    if not any(stops.get(request.request_id) for request in requests):
        return engine.generate(list(requests))
    engine.check_idle("generate_until")
    for checked_request in [engine.admission.check(request) for request in requests]:
        engine.add_admitted(checked_request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    rollouts: dict[str, Rollout] = {}
    outputs: dict[str, Output] = {}
    with engine.pacer.without_streams():
        while engine.has_work:
            for step in engine.step():
                if step.request_id in outputs:
                    continue  # the step after an abort
                so_far = tokens[step.request_id]
                so_far += step.new_tokens
                if step.rollout is not None:
                    rollouts[step.request_id] = rollouts.get(step.request_id, Rollout()).then(step.rollout)
                output = output_at(step, so_far, stops.get(step.request_id, ()), decode)
                if output is not None:
                    if output is not step.output and step.request_id in rollouts:
                        rollout = rollouts[step.request_id].cut(tuple(so_far), len(output.tokens), room=0)
                        output = replace(output, rollout=rollout)
                    outputs[step.request_id] = output
                    if step.output is None:
                        engine.abort(step.request_id)
    return [outputs[request.request_id] for request in requests]


def output_at(step: StepOutput, tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> Output | None:
    """The output if a request with these tokens ends with this step: at a stop string, or by itself."""

    def has_stop(number: int) -> bool:
        text = decode(tokens[:number])
        return any(s in text for s in stop)

    if not stop or not has_stop(len(tokens)):
        return step.output
    number = len(tokens) - len(step.new_tokens) + 1
    while not has_stop(number):
        number += 1
    return Output(
        request_id=step.request_id,
        tokens=tuple(tokens[:number]),
        finish_reason="stop",
        counts=replace(step.counts, num_tokens=number),
    )


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
    positions = model.engine.admission.max_positions
    requests = []
    for row, prompt in zip(rows, prompt_ids(model.tokenizer, [row["input"] for row in rows]), strict=True):
        request = Request(
            request_id=str(row["sample"]),
            prompt=tuple(prompt),
            max_tokens=row["max_tokens"],
            decoding=read_decoding(json.loads(row["config"])),
            sampling=Sampling(**json.loads(row.get("sampling") or "{}")),
        )
        requests.append(fit_request(request, positions) if row["may_shorten"] else request)
    return requests


def sample_stops(rows: Sequence[Mapping[str, Any]]) -> Stops:
    """The stop strings of each row's request, by its id."""
    return {str(row["sample"]): json.loads(row["stop"]) for row in rows}


def _replay(tokens: Sequence[int], rollout: Rollout, piece: Callable[[int], str]) -> dict[str, Any]:
    """The columns `REPLAY` of an answer."""
    edits = [{"index": edit.index, "step": edit.step, "piece": piece(edit.token)} for edit in rollout.edits]
    return {"pieces": list(map(piece, tokens)), "steps": list(rollout.steps), "edits": edits or None}


def scores_of(model: DecodingModel, row: Mapping[str, Any]) -> list[tuple[float, bool]]:
    """Of each text that a row scores its log-likelihood in nats, and whether greedy decoding gives the same tokens;
    false where that is not asked. Raises `ValueError` for a text that the model does not hold."""
    texts = ScoredTexts.of_input(row["input"])
    assert texts is not None
    engine, draws = model.engine, Draws(number=texts.draws, seed=texts.seed)
    decoding = read_decoding(json.loads(row["config"]))
    scores = []
    for context, continuation in texts.ids(model.tokenizer, prefix_id=engine.model.config.eos_token_ids[0]):
        nats = log_likelihood(engine.model, context, continuation, block_size=engine.block_size, draws=draws)
        scores.append((nats, texts.greedy and is_greedy(engine, context, continuation, decoding)))
    return scores


def is_greedy(engine: Engine, context: Sequence[int], continuation: Sequence[int], decoding: DecodingConfig) -> bool:
    """Whether decoding after the context gives these tokens; of none it is true."""
    if not continuation:
        return True
    request = Request(
        request_id="greedy",
        prompt=tuple(context),
        max_tokens=len(continuation),
        decoding=decoding,
        ignore_eos=True,
    )
    (output,) = engine.generate([request])
    return output.tokens == tuple(continuation)


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
        self._model_in_use: tuple[str, DecodingModel] | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table (`PLANNED_COLUMNS`) with texts and counts (`DECODED_COLUMNS`)."""
        rows = table.to_pylist()
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
        """The model with that name. The caller must not keep its engine while another one may be loaded."""
        if self._model_in_use is None or self._model_in_use[0] != name:
            self.close()
            try:
                self._model_in_use = (name, self._load(name))
            except ValueError as error:
                raise ModelRefused(f"model '{name}': {error}") from error
        return self._model_in_use[1]

    def _score(self, name: str, row: dict[str, Any]) -> None:
        """Add the log-likelihoods of a row's texts, as JSON, or the error. The engine is closed after any exception
        but a refusal, as `_generate` does."""
        model = self._model(name)
        try:
            row.update(text=json.dumps(scores_of(model, row)), finish_reason="scored")
            return
        except ValueError as error:
            row["error"] = str(error)
            return
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        del model
        self.close()

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
