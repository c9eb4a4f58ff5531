"""Every decoder compared with a plain loop of the same method: tokens, forwards, wall time.

The plain loop decodes one request after another without an engine; the engine decodes the same requests one after
another, and all at once. The three take turns and the medians count, so that a busy machine slows them alike.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.decoder_cases import MethodCase, ModelCase
from benchmarks.plain_loops import PlainRun, multi_bd, run_canvas
from benchmarks.tables import interleaved, medians
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder

COLUMNS = {
    "model": "model",
    "method": "method",
    "tokens": "tokens",
    "nfe": "NFE",
    "tpf": "TPF|.2f",
    "plain_seconds": "plain s|.3f",
    "plain_tps": "plain tok/s|.0f",
    "engine_1_seconds": "engine@1 s|.3f",
    "engine_1_tps": "engine@1 tok/s|.0f",
    "engine_1_over_plain": "@1 / plain|.2f",
    "engine_n_seconds": "engine@N s|.3f",
    "engine_n_tps": "engine@N tok/s|.0f",
    "engine_n_over_plain": "@N / plain|.2f",
    "same_tokens": "same tokens",
}


def measure_method(
    model: ModelCase, method: MethodCase, *, max_tokens: int, repeats: int, tick: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """One row: the plain loop, the engine with one request at a time, and the engine with all requests.

    `tick` is called after each of the `3 * repeats` timed runs. If float32 tokens differ, a comparison in float64
    shows whether rounding is the only reason (`same_tokens_float64`).
    """
    requests = [
        Request(request_id=str(n), prompt=prompt, max_tokens=max_tokens, decoding=method.decoding)
        for n, prompt in enumerate(model.prompts)
    ]
    one, many = (_engine(model, method, max_rows=n) for n in (1, len(requests)))
    runs: dict[str, Callable[[], list[Any]]] = {
        "plain": lambda: [plain_run(model.model, r) for r in requests],
        "engine_1": lambda: [output for r in requests for output in one.generate([r])],
        "engine_n": lambda: many.generate(requests),
    }
    results = {name: run() for name, run in runs.items()}  # to compare, and to warm up
    plain: list[PlainRun] = results["plain"]
    tokens = {name: [list(r.tokens) for r in result] for name, result in results.items()}
    forwards = {name: [_num_forwards(r) for r in result] for name, result in results.items()}
    same = tokens["plain"] == tokens["engine_1"] == tokens["engine_n"]
    total = sum(map(len, tokens["plain"]))
    seconds = medians(interleaved({n: partial(_timed, run) for n, run in runs.items()}, repeats=repeats, after=tick))
    row: dict[str, Any] = {
        "model": model.label,
        "method": method.label,
        "requests": len(requests),
        "tokens": total,
        "nfe": sum(r.num_forwards for r in plain),
        "tpf": sum(len(r.tokens) / r.num_forwards for r in plain) / len(plain),
        "same_tokens": same,
        "same_tokens_float64": same or same_in_float64(model, method, requests),
        "same_forwards": forwards["plain"] == forwards["engine_1"] == forwards["engine_n"],
    }
    for name, value in seconds.items():
        row |= {f"{name}_seconds": value, f"{name}_tps": total / value}
        if name != "plain":
            row[f"{name}_over_plain"] = seconds["plain"] / value
    return row


def plain_run(model: Decoder, request: Request) -> PlainRun:
    """Decode one request by the plain loop of its method."""
    config, decoding = model.config, request.decoding
    if decoding.canvas is None:
        return multi_bd(model, list(request.prompt), request.max_tokens, decoding)
    decoder = canvas_decoder(
        request.prompt,
        request.max_tokens,
        decoding.canvas,
        request.sampling,
        eos_token_ids=config.eos_token_ids,
        vocab=Vocab(config.mask_token_id, config.vocab_size),
        shift=config.shift_logits,
    )
    return run_canvas(model, decoder)


def same_in_float64(model: ModelCase, method: MethodCase, requests: Sequence[Request]) -> bool:
    """Whether the tokens agree in float64. In float32, rounding in the last bit can change a token."""
    exact = replace(model, model=copy.deepcopy(model.model).double())
    expected = [plain_run(exact.model, r).tokens for r in requests]
    one, many = (_engine(exact, method, max_rows=n) for n in (1, len(requests)))
    outputs = [[one.generate([r])[0] for r in requests], many.generate(requests)]
    return all([list(output.tokens) for output in served] == expected for served in outputs)


def _engine(model: ModelCase, method: MethodCase, *, max_rows: int) -> Engine:
    """An engine of the size needed, without a prefix cache, so that a repetition does not reuse pages."""
    config = EngineConfig(
        max_rows=max_rows,
        buffer_size=method.decoding.buffer_size,
        block_size=method.decoding.block_size if model.model.config.attention == "full" else None,
        num_pages=1024,
        prefix_caching=False,
        static_shapes=method.static,
        overlap=False,
    )
    return Engine(model.model, config)


def _num_forwards(result: PlainRun | Output) -> int:
    return result.counts.num_forwards if isinstance(result, Output) else result.num_forwards


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
