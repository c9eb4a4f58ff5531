"""Every decoder compared with a plain loop of the same method: tokens, forwards, wall time.

A method is an entry of `METHODS` with a few changed fields: thresholds near the papers' at which small models accept
several tokens a step. The plain loop decodes one request after another without an engine; the engine decodes the same
requests one after another, and all at once. The three take turns and the medians count, so that a busy machine slows
them alike.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import interleaved, markdown, median_times, timed
from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.causal.planned import planned_decoder
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.json_text import merge_fields
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.plain_loops import PlainRun, multi_bd, prefix_rows, run_planned
from mbd_core.tasks import gsm_mini

SHIPPED_MODELS = ("tiny-bd", "tiny-mbd")
FAMILIES = {  # a fixture's name without its seed, and the shape of its family
    "sdar": "tiny-sdar",
    "llada2": "tiny-llada2",
    "fastdllm2": "tiny-fast-dllm-v2",
    "llada": "tiny-llada",
    "dream": "tiny-dream",
    "nemotron": "tiny-nemotron",
}
BLOCK_SIZE = 8  # of the families' models, which have random weights
CANVAS_BLOCK_LENGTH = 16
BRANCH_LENGTHS = (4, 8, 16, 32)
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
    "engine_1_over_plain_processor": "@1 / plain, processor|.2f",
    "engine_1_over_plain_forward": "a forward|.2f",
    "engine_n_seconds": "engine@N s|.3f",
    "engine_n_tps": "engine@N tok/s|.0f",
    "engine_n_over_plain": "@N / plain|.2f",
    "same_tokens": "same tokens",
}
BATCH_COLUMNS = {
    "model": "model",
    "method": "method",
    "requests": "canvases",
    "batch_seconds": "own batch s|.3f",
    "engine_seconds": "engine s|.3f",
    "engine_over_batch": "engine / own batch|.2f",
    "engine_over_batch_processor": "engine / own batch, processor|.2f",
    "same_tokens": "same tokens",
}


@dataclass(frozen=True, kw_only=True)
class MethodCase:
    """A decoder: its name in `METHODS`, its label in the table, its config; `static`: run with `static_shapes`."""

    name: str
    label: str
    decoding: DecodingConfig
    static: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model, its prompts, and the methods to decode them with."""

    label: str
    model: Decoder
    prompts: list[tuple[int, ...]]
    methods: list[MethodCase] = field(default_factory=list)


def block_methods(block_size: int) -> list[MethodCase]:
    """The methods for block-causal models."""

    def case(name: str, label: str, *, static: bool = False, **fields: Any) -> MethodCase:
        return _method_case(name, label, {"tau_m2t": 0.9, **fields}, block_size=block_size, static=static)

    return [
        case("single", "SingleBD"),
        case("multi-bd", "MultiBD, dynamic (Alg. 4)"),
        case("multi-bd", "MultiBD, Block Buffer (Alg. 5)", static=True),
        case("t2t", "T2T, single", t2t={"tau": 0.9}),
        case("multi-bd-t2t", "T2T, multi", buffer_size=4, t2t={"tau": 0.9}),
        case("dmax", "DMax, single", buffer_size=2, tau_add=1.0),
        case("multi-bd-dmax", "DMax, multi", buffer_size=4, tau_stable=None),
    ]


def shifted_methods(block_size: int) -> list[MethodCase]:
    """The methods for block-causal models with shifted logits: Fast-dLLM v2's."""
    labels = {"fast-dllm-v2": "Fast-dLLM v2", "multi-bd-fast-dllm-v2": "Fast-dLLM v2, two slots"}
    fields = {"sub_block": block_size // 2}
    return [_method_case(name, label, fields, block_size=block_size) for name, label in labels.items()]


def causal_methods(block_size: int) -> list[MethodCase]:
    """The methods for models that store their keys by causal rows."""
    labels = {"ar": "token by token", "linear-spec": "self-speculation", "dlm": "diffusion after a causal prefix"}
    return [_method_case(name, label, {}, block_size=block_size) for name, label in labels.items()]


def canvas_methods(max_tokens: int, *, shifted: bool) -> list[MethodCase]:
    """The methods for full-attention models: Dream's if `shifted`, otherwise LLaDA's."""
    block_size = CANVAS_BLOCK_LENGTH // 2

    def canvas(name: str, label: str, **fields: Any) -> MethodCase:
        return _method_case(name, label, {"canvas": fields}, block_size=block_size)

    def in_blocks(name: str, label: str, **fields: Any) -> MethodCase:
        return canvas(name, label, block_length=CANVAS_BLOCK_LENGTH, **fields)

    def pipelined(name: str, label: str, **fields: Any) -> MethodCase:
        return _method_case(name, label, fields, block_size=block_size)

    lengths = [length for length in BRANCH_LENGTHS if length <= max_tokens]
    if shifted:
        vanilla = canvas("dream-entropy", "vanilla Dream (entropy)", steps=max_tokens)
    else:
        vanilla = in_blocks("llada", "vanilla LLaDA", steps=max_tokens)
    return [
        vanilla,
        in_blocks("fast-dllm", "Fast-dLLM, no cache"),
        in_blocks("fast-dllm-prefix", "Fast-dLLM, prefix cache"),
        in_blocks("fast-dllm-dual", "Fast-dLLM, dual cache"),
        in_blocks("fast-dllm-factor", "Fast-dLLM, factor, dual cache"),
        in_blocks("dllm-cache", "dLLM-Cache"),
        in_blocks("local-leap", "LocalLeap"),
        canvas("block-batch", "BlockBatch", branches={"block_lengths": lengths}),
        pipelined("d2f", "D2F, pipelined", buffer_size=4),
        pipelined("d2f-cache-only", "D2F, cache only"),
        pipelined("d2f-block-causal", "D2F, block-causal prompt", buffer_size=4),
    ]


def _method_case(
    name: str, label: str, fields: Mapping[str, Any], *, block_size: int, static: bool = False
) -> MethodCase:
    decoding = decoding_config({}, merge_fields(METHODS[name], fields), block_size=block_size)
    return MethodCase(name=name, label=label, decoding=decoding, static=static)


def model_cases(fixtures: Path | None, *, num_requests: int, max_tokens: int) -> list[ModelCase]:
    """The shipped models, and one of each family from `fixtures` or with random weights.

    Raises `ValueError` for a fixtures folder without a checkpoint.
    """
    folders = (
        {} if fixtures is None else {p.parent.name: p.parent for p in sorted(fixtures.glob("*/model.safetensors"))}
    )
    if fixtures is not None and not folders:
        raise ValueError(f"--fixtures {fixtures} holds no folder with a model.safetensors")
    shipped_cases = [_shipped_case(name, num_requests) for name in SHIPPED_MODELS]
    return shipped_cases + [_family_case(family, folders, num_requests, max_tokens) for family in FAMILIES]


def _shipped_case(name: str, num_requests: int) -> ModelCase:
    folder = model_folder(name)
    model = load_model(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder, model.config)
    problems = itertools.islice(gsm_mini.generate(split="test", seed=0), num_requests)
    prompts = chat_prompts(tokenizer, [question(problem["question"]) for problem in problems])
    methods = block_methods(model.config.block_size)
    if name == "tiny-bd":  # it was not trained on several noisy blocks
        methods = methods[:1]
    return ModelCase(label=name, model=model, prompts=[tuple(ids) for ids in prompts], methods=methods)


def _family_case(family: str, folders: Mapping[str, Path], num_requests: int, max_tokens: int) -> ModelCase:
    name = next((name for name in folders if name.rsplit("-", 1)[0] == family), None)
    model = _random_model(family) if name is None else load_model(folders[name], dtype=torch.float32)
    model.config = config = replace(model.config, block_size=BLOCK_SIZE)
    if config.attention == "full":
        methods = canvas_methods(max_tokens, shifted=config.shift_logits)
    elif config.attention == "causal":
        methods = causal_methods(config.block_size)
    elif config.shift_logits:
        methods = shifted_methods(config.block_size)
    else:
        methods = block_methods(config.block_size)
    prompts = _random_prompts(config, num_requests)
    return ModelCase(label=name or f"{family} (random)", model=model, prompts=prompts, methods=methods)


def _random_prompts(config: ModelConfig, count: int) -> list[tuple[int, ...]]:
    """Prompts of 13 to 28 ordinary tokens."""
    generator = torch.Generator().manual_seed(0)
    special = min(config.mask_token_id, *config.eos_token_ids)
    return [
        tuple(torch.randint(special, (13 + 5 * (number % 4),), generator=generator).tolist())
        for number in range(count)
    ]


def _random_model(family: str) -> Decoder:
    """Random weights, scaled so that confidences lie on both sides of the thresholds."""
    model = random_model(SHAPES[FAMILIES[family]], device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    model.lm_head.weight.mul_(3.0)
    return model


def chosen_cases(
    cases: list[ModelCase], models: Sequence[str] | None, methods: Sequence[str] | None
) -> list[tuple[ModelCase, MethodCase]]:
    """The models whose names begin with one of `models`, with their methods whose names contain one of `methods`.
    Raises `ValueError` if no method is left."""
    begins = tuple(models or [""])
    parts = [name.lower() for name in methods or [""]]
    pairs = [
        (model, method)
        for model in cases
        if model.label.startswith(begins)
        for method in model.methods
        if any(part in name.lower() for part in parts for name in (method.name, method.label))
    ]
    if not pairs:
        raise ValueError(f"no model and method match --models {models} --methods {methods}")
    return pairs


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
    engine_1, engine_n = (engine_of(model, method, max_rows=n) for n in (1, len(requests)))
    runs: dict[str, Callable[[], list[Any]]] = {
        "plain": lambda: [plain_run(model.model, r) for r in requests],
        "engine_1": lambda: [output for r in requests for output in engine_1.generate([r])],
        "engine_n": lambda: engine_n.generate(requests),
    }
    results = {name: run() for name, run in runs.items()}  # to compare, and to warm up
    plain: list[PlainRun] = results["plain"]
    tokens = {name: [list(r.tokens) for r in result] for name, result in results.items()}
    forwards = {name: [_num_forwards(r) for r in result] for name, result in results.items()}
    is_same = tokens["plain"] == tokens["engine_1"] == tokens["engine_n"]
    total = sum(map(len, tokens["plain"]))
    timers = {name: timed(run) for name, run in runs.items()}
    times = median_times(interleaved(timers, repeats=repeats, after=tick))
    row: dict[str, Any] = {
        "model": model.label,
        "method": method.label,
        "static": method.static,
        "requests": len(requests),
        "tokens": total,
        "nfe": sum(r.num_forwards for r in plain),
        "tpf": sum(len(r.tokens) / r.num_forwards for r in plain) / len(plain),
        "same_tokens": is_same,
        "same_tokens_float64": is_same or same_in_float64(model, method, requests),
        "same_forwards": forwards["plain"] == forwards["engine_1"] == forwards["engine_n"],
    }
    for name, value in times.items():
        row |= {f"{name}_seconds": value.wall, f"{name}_tps": total / value.wall}
        if name != "plain":
            row[f"{name}_over_plain"] = times["plain"].wall / value.wall
            row[f"{name}_over_plain_processor"] = times["plain"].processor / value.processor
    more_forwards = sum(forwards["engine_1"]) / sum(forwards["plain"])
    row["engine_1_over_plain_forward"] = row["engine_1_over_plain_processor"] * more_forwards
    return row


def plain_run(model: Decoder, request: Request) -> PlainRun:
    """Decode one request by the plain loop of its method."""
    config, decoding = model.config, request.decoding
    if decoding.in_buffer:
        return multi_bd(model, list(request.prompt), request.max_tokens, decoding)
    vocab = Vocab(config.mask_token_id, config.vocab_size)
    decoder = planned_decoder(request, eos_token_ids=config.eos_token_ids, vocab=vocab, shift=config.shift_logits)
    return run_planned(model, decoder, prefix=prefix_rows(request))


def same_in_float64(model: ModelCase, method: MethodCase, requests: Sequence[Request]) -> bool:
    """Whether the tokens agree in float64. In float32, rounding in the last bit can change a token."""
    exact = replace(model, model=copy.deepcopy(model.model).double())
    expected = [plain_run(exact.model, r).tokens for r in requests]
    engine_1, engine_n = (engine_of(exact, method, max_rows=n) for n in (1, len(requests)))
    outputs = [[engine_1.generate([r])[0] for r in requests], engine_n.generate(requests)]
    return all([list(output.tokens) for output in answers] == expected for answers in outputs)


def engine_of(model: ModelCase, method: MethodCase, *, max_rows: int) -> Engine:
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


def print_rows(rows: list[dict[str, Any]], batches: list[dict[str, Any]]) -> int:
    """Print the tables, and which rows have other tokens than the plain loop; returns the exit code. `batches` are the
    rows of `canvas_batch.measure_batch`."""
    names = {f"{row['model']} {row['method']}": row for row in rows}
    methods = [name for name, row in names.items() if row["same_tokens_float64"] and not row["same_tokens"]]
    wrong = [name for name, row in names.items() if not row["same_tokens_float64"]]
    print(markdown(rows, COLUMNS))
    for kind, static in (("dynamic", False), ("static", True)):
        if least := least_ratios([row for row in rows if row["static"] == static]):
            print(f"\nleast @1 / plain of each model in {kind} shapes, by a forward's processor time: {least}")
    if batches:
        print(f"\n{markdown(batches, BATCH_COLUMNS)}")
    if methods:
        print(f"\nother tokens by rounding alone (the same in float64): {'; '.join(methods)}")
    print(f"\nsame tokens: {'no: ' + '; '.join(wrong) if wrong else 'yes'}")
    return 1 if wrong else 0


def least_ratios(rows: list[dict[str, Any]]) -> str:
    """For each model, the least gain of one request over the plain loop in any method, as text."""
    least: dict[str, float] = {}
    for row in rows:
        ratio = row["engine_1_over_plain_forward"]
        least[row["model"]] = min(ratio, least.get(row["model"], ratio))
    return ", ".join(f"{model} {ratio:.2f}" for model, ratio in least.items())
