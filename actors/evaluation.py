"""Evaluation's two stages over tables of samples: decode with an engine, then grade. Ray Data runs them as they are.

Every row keeps what it came with and gains columns; a request that fails keeps its row, with the reason in `error`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.decoding_config import DecodingConfig, from_fields
from mbd_core.decoding.request import Output, Request
from mbd_core.engine.engine import EngineConfig
from mbd_core.evaluation.graders import Grade, grade
from mbd_core.evaluation.tasks import Problem, find_task
from mbd_core.multitf.data import chat_prompts
from mbd_core.serving.load import LoadedModel, load_engine

ASKED = pa.schema(
    [("sample", pa.int64())]
    + [(name, pa.string()) for name in ("model", "method", "task", "problem_id", "prompt", "reference")]
    + [("entry_point", pa.string()), ("config", pa.string()), ("max_tokens", pa.int64()), ("seed", pa.int64())]
)
COUNTS = ("num_prompt_tokens", "num_tokens", "num_forwards", "num_store_forwards", "num_prefill_forwards")
DECODED = pa.schema(
    [*ASKED, pa.field("text", pa.string()), pa.field("finish_reason", pa.string())]
    + [pa.field(name, pa.int64()) for name in COUNTS]
    + [pa.field("decode_seconds", pa.float64()), pa.field("error", pa.string())]
)
GRADED = pa.schema(
    [*DECODED, pa.field("correct", pa.bool_())]
    + [pa.field(name, pa.string()) for name in ("reason", "detail", "strict", "flexible")]
    + [pa.field("strict_correct", pa.bool_()), pa.field("flexible_correct", pa.bool_())]
)


@dataclass(frozen=True)
class Failure:
    """Why a request has no output."""

    error: str


class Decode:
    """Answers every row of a table with the engine of its model. An engine is loaded when first asked for and kept.

    `models` maps the names in the rows to what `model_folder` takes. Rows of different configurations run together.
    With `tensor_parallel` ranks one engine is kept at a time: a process belongs to one group.
    """

    def __init__(self, models: Mapping[str, str], engine: EngineConfig, *, tensor_parallel: int = 1) -> None:
        self._models, self._engine, self._ranks = dict(models), engine, tensor_parallel
        self._loaded: dict[str, LoadedModel] = {}

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        for name in dict.fromkeys(row["model"] for row in rows):
            self._answer(name, [row for row in rows if row["model"] == name])
        return pa.Table.from_pylist(rows, schema=DECODED)

    def _answer(self, name: str, rows: list[dict[str, Any]]) -> None:
        model = self._load(name)
        prompts = chat_prompts(model.tokenizer, (row["prompt"] for row in rows))
        requests = [
            Request(
                request_id=str(row["sample"]),
                prompt=tuple(prompt),
                max_tokens=row["max_tokens"],
                decoding=from_fields(DecodingConfig, json.loads(row["config"])),
            )
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        outcomes = self._generate(name, requests)
        for row in rows:
            outcome = outcomes[str(row["sample"])]
            if isinstance(outcome, Failure):
                row["error"] = outcome.error
            else:
                text = model.tokenizer.decode(list(outcome.tokens))
                row.update(asdict(outcome.counts), text=text, finish_reason=outcome.finish_reason)

    def _load(self, name: str) -> LoadedModel:
        if name not in self._loaded:
            if self._ranks > 1:
                self.close()
            folder = model_folder(self._models[name])
            self._loaded[name] = load_engine(folder, self._engine, tensor_parallel=self._ranks)
        return self._loaded[name]

    def close(self) -> None:
        """Let go of all engines; they are loaded again when asked for."""
        while self._loaded:
            self._loaded.popitem()[1].close()

    def _generate(self, name: str, requests: list[Request]) -> dict[str, Output | Failure]:
        outcomes: dict[str, Output | Failure] = {}
        servable = []
        for request in requests:
            try:
                self._load(name).engine.validate(request)
                servable.append(request)
            except ValueError as error:
                outcomes[request.request_id] = Failure(str(error))
        return outcomes | self._run(name, servable)

    def _run(self, name: str, requests: list[Request]) -> dict[str, Output | Failure]:
        """All at once. Should that fail, each alone, so that the one at fault fails alone: any exception of the
        engine is that request's result, and its engine, whose state is not known any more, is thrown away."""
        if not requests:
            return {}
        try:
            return {output.request_id: output for output in self._load(name).engine.generate(requests)}
        except Exception as error:
            self._loaded.pop(name).close()
            if len(requests) == 1:
                return {requests[0].request_id: Failure(f"{type(error).__name__}: {error}")}
            outcomes: dict[str, Output | Failure] = {}
            for request in requests:
                outcomes |= self._run(name, [request])
            return outcomes


def grade_table(table: pa.Table) -> pa.Table:
    """Grade every row. Equal texts to one problem are graded once: configurations often agree."""
    rows = table.to_pylist()
    known: dict[tuple[str, str, str], Grade] = {}
    for row in rows:
        if row["text"] is None:
            row.update(correct=False, reason="undecoded")
            continue
        key = (row["task"], row["problem_id"], row["text"])
        if key not in known:
            problem = Problem(
                problem_id=row["problem_id"],
                prompt=row["prompt"],
                reference=row["reference"],
                entry_point=row["entry_point"],
            )
            known[key] = grade(find_task(row["task"]), problem, row["text"])
        row.update(asdict(known[key]))
    return pa.Table.from_pylist(rows, schema=GRADED)
