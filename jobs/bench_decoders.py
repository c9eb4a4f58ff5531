"""Every decoder beside a plain loop of the same method: tokens, forwards, wall time, at one and at several requests.

    python jobs/bench_decoders.py [--fixtures DIR] [--json out/decoders.json]

A row is one method on one model. The plain loop decodes one request after another without an engine; the engine does
the same requests one after another, and all at once. All three take turns and the medians count, so a busy machine
slows them alike. Exit code 1 if the engine's tokens are not the plain loop's (where float32 differs, float64 decides).

Models: the shipped ones for decoding in blocks, and one of each family at the size of the parity fixtures: those in
--fixtures DIR where it has them, else random weights of that size.
"""

import argparse
import copy
import itertools
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from mbd_core.bench.plain_loops import PlainRun, multi_bd, run_canvas
from mbd_core.bench.tables import interleaved, markdown, medians, write_json
from mbd_core.canvas.single_lane import canvas_decoder
from mbd_core.checkpoint.loading import load_model, load_tokenizer
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.canvas_config import Branches, Canvas, Leap, Refresh
from mbd_core.decoding.decoding_config import T2T, DecodingConfig, Soft
from mbd_core.decoding.request import Output, Request
from mbd_core.decoding.sampling import Vocab
from mbd_core.engine.engine import Engine, EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.tasks import gsm_mini

SHIPPED = ("tiny-bd", "tiny-mbd")
FAMILIES = ("sdar", "llada2", "llada", "dream")
BLOCK_SIZE = 8  # of the families' models, which are too small to have been trained with any
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


@dataclass(frozen=True, kw_only=True)
class Method:
    """A decoder by its paper's name; `static` is Block Buffer's fixed shapes."""

    name: str
    decoding: DecodingConfig
    static: bool = False


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, what it is asked, and the methods it can be decoded by."""

    label: str
    model: Decoder
    prompts: list[tuple[int, ...]]
    methods: list[Method] = field(default_factory=list)


def block_methods(size: int, *, buffer_size: int = 4, tau: float = 0.9) -> list[Method]:
    """The methods of models that attend in blocks, at thresholds near the papers'."""
    single = DecodingConfig(block_size=size, tau_m2t=tau)
    multi = DecodingConfig(block_size=size, buffer_size=buffer_size, tau_m2t=tau)
    edit, soft = T2T(tau=0.9), Soft(stop_confidence=0.9)
    return [
        Method(name="SingleBD", decoding=single),
        Method(name="MultiBD, dynamic (Alg. 4)", decoding=multi),
        Method(name="MultiBD, Block Buffer (Alg. 5)", decoding=multi, static=True),
        Method(name="T2T, single", decoding=DecodingConfig(block_size=size, tau_m2t=tau, t2t=edit)),
        Method(
            name="T2T, multi",
            decoding=DecodingConfig(block_size=size, buffer_size=buffer_size, tau_m2t=tau, t2t=edit),
        ),
        Method(
            name="DMax, single",
            decoding=DecodingConfig(block_size=size, buffer_size=2, tau_add=1.0, tau_m2t=tau, soft=soft),
        ),
        Method(
            name="DMax, multi",
            decoding=DecodingConfig(block_size=size, buffer_size=buffer_size, tau_m2t=tau, soft=soft),
        ),
    ]


def canvas_methods(max_tokens: int, *, shifted: bool, block_length: int = 16, tau: float = 0.9) -> list[Method]:
    """The methods of models with full attention; vanilla is LLaDA's, or Dream's for a shifted model."""
    if shifted:
        vanilla = Canvas(block_length=None, steps=max_tokens, accept="schedule", score="neg_entropy")
    else:
        vanilla = Canvas(block_length=block_length, steps=max_tokens, accept="quota")
    in_blocks = partial(Canvas, block_length=block_length)
    size = block_length // 2
    pipelined = partial(DecodingConfig, block_size=size, tau_add=0.1, tau_semi=0.95, tau_m2t=tau)
    lengths = tuple(n for n in (4, 8, 16, 32) if n <= max_tokens)

    def canvas(name: str, settings: Canvas) -> Method:
        return Method(name=name, decoding=DecodingConfig(block_size=size, canvas=settings))

    return [
        canvas("vanilla Dream (entropy)" if shifted else "vanilla LLaDA", vanilla),
        canvas("Fast-dLLM, no cache", in_blocks(tau=tau)),
        canvas("Fast-dLLM, prefix cache", in_blocks(tau=tau, cache="prefix")),
        canvas("Fast-dLLM, dual cache", in_blocks(tau=tau, cache="dual")),
        canvas("Fast-dLLM, factor, dual cache", in_blocks(accept="factor", factor=1.0, cache="dual")),
        canvas("dLLM-Cache", in_blocks(tau=tau, refresh=Refresh(prompt_interval=25, response_interval=5))),
        canvas("LocalLeap", in_blocks(tau=tau, leap=Leap())),
        canvas("BlockBatch", Canvas(tau=tau, branches=Branches(block_lengths=lengths))),
        Method(name="D2F, pipelined", decoding=pipelined(buffer_size=4, prompt_attention="full")),
        Method(name="D2F, cache only", decoding=pipelined(buffer_size=1, prompt_attention="full")),
        Method(name="D2F, block-causal prompt", decoding=pipelined(buffer_size=4)),
    ]


def plain_run(model: Decoder, request: Request) -> PlainRun:
    """One request by the plain loop of its method."""
    config, decoding, prompt = model.config, request.decoding, list(request.prompt)
    if decoding.canvas is not None:
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
    return multi_bd(model, prompt, request.max_tokens, decoding)


def measure(
    subject: Subject, method: Method, *, max_tokens: int, repeats: int, tick: Callable[[], object]
) -> dict[str, Any]:
    """One row: the plain loop, the engine with one request at a time, and with all of them."""
    requests = [
        Request(request_id=str(n), prompt=prompt, max_tokens=max_tokens, decoding=method.decoding)
        for n, prompt in enumerate(subject.prompts)
    ]
    one, many = (_engine(subject, method, requests, max_rows=n) for n in (1, len(requests)))
    runs: dict[str, Callable[[], list[Any]]] = {
        "plain": lambda: [plain_run(subject.model, r) for r in requests],
        "engine_1": lambda: [output for r in requests for output in one.generate([r])],
        "engine_n": lambda: many.generate(requests),
    }
    results = {name: run() for name, run in runs.items()}  # to compare, and to warm up
    plain: list[PlainRun] = results["plain"]
    tokens = {name: [list(r.tokens) for r in result] for name, result in results.items()}
    forwards = {
        name: [r.counts.num_forwards if isinstance(r, Output) else r.num_forwards for r in result]
        for name, result in results.items()
    }
    same = tokens["plain"] == tokens["engine_1"] == tokens["engine_n"]
    total, nfe = sum(map(len, tokens["plain"])), sum(r.num_forwards for r in plain)
    seconds = medians(interleaved({n: partial(_timed, run) for n, run in runs.items()}, repeats=repeats, after=tick))
    row: dict[str, Any] = {
        "model": subject.label,
        "method": method.name,
        "requests": len(requests),
        "tokens": total,
        "nfe": nfe,
        "tpf": sum(len(r.tokens) / r.num_forwards for r in plain) / len(plain),
        "same_tokens": same,
        "same_tokens_float64": same or same_in_float64(subject, method, requests),
        "same_forwards": forwards["plain"] == forwards["engine_1"] == forwards["engine_n"],
    }
    for name, value in seconds.items():
        row |= {f"{name}_seconds": value, f"{name}_tps": total / value}
        if name != "plain":
            row[f"{name}_over_plain"] = seconds["plain"] / value
    return row


def same_in_float64(subject: Subject, method: Method, requests: Sequence[Request]) -> bool:
    """Whether the tokens agree where rounding cannot decide: random weights amplify a last bit into another token."""
    exact = replace(subject, model=copy.deepcopy(subject.model).double())
    wanted = [plain_run(exact.model, r).tokens for r in requests]
    engines = [_engine(exact, method, requests, max_rows=n) for n in (1, len(requests))]
    served = [[engines[0].generate([r])[0] for r in requests], engines[1].generate(requests)]
    return all([list(output.tokens) for output in outputs] == wanted for outputs in served)


def _engine(subject: Subject, method: Method, requests: Sequence[Request], *, max_rows: int) -> Engine:
    """An engine as large as it must be, without a prefix cache: a repetition must not find the one before it."""
    config = EngineConfig(
        max_rows=max_rows,
        buffer_size=method.decoding.buffer_size,
        block_size=method.decoding.block_size if subject.model.config.attention == "full" else None,
        num_pages=1024,
        prefix_caching=False,
        static_shapes=method.static,
        overlap=False,
    )
    engine = Engine(subject.model, config)
    for request in requests:
        engine.validate(request)
    return engine


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def subjects(fixtures: Path | None, *, num_requests: int, max_tokens: int) -> list[Subject]:
    """What there is to measure; `ValueError` for a fixtures folder without a checkpoint."""
    found = []
    for name in SHIPPED:
        folder = model_folder(name)
        model = load_model(folder, dtype=torch.float32)
        tokenizer = load_tokenizer(folder, model.config)
        questions = [
            row["question"] for row in itertools.islice(gsm_mini.generate(split="test", seed=0), num_requests)
        ]
        prompts = [
            tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
            )
            for question in questions
        ]
        methods = block_methods(model.config.block_size)
        # tiny-bd was never shown several noisy blocks
        found.append(
            Subject(label=name, model=model, prompts=prompts, methods=methods[:1] if name == "tiny-bd" else methods)
        )
    given = {} if fixtures is None else {p.parent.name: p.parent for p in sorted(fixtures.glob("*/model.safetensors"))}
    if fixtures is not None and not given:
        raise ValueError(f"--fixtures {fixtures} holds no folder with a model.safetensors")
    for family in FAMILIES:
        known = next((n for n in given if n.rsplit("-", 1)[0] == family), None)
        model = _random(family) if known is None else load_model(given[known], dtype=torch.float32)
        model.config = config = replace(model.config, block_size=BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        lengths = [13 + 5 * (n % 4) for n in range(num_requests)]
        highest = min(config.mask_token_id, *config.eos_token_ids)
        prompts = [tuple(torch.randint(highest, (n,), generator=generator).tolist()) for n in lengths]
        full = config.attention == "full"
        methods = canvas_methods(max_tokens, shifted=config.shift_logits) if full else block_methods(config.block_size)
        label = known or f"{family} (random)"
        found.append(Subject(label=label, model=model, prompts=prompts, methods=methods))
    return found


def _random(family: str) -> Decoder:
    """Random weights whose confidences spread over the thresholds."""
    model = random_model(SHAPES[f"tiny-{family}"], device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    model.lm_head.weight.mul_(3.0)
    return model


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixtures", type=Path, metavar="DIR", help="take the families' models from here")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only models whose name begins so")
    parser.add_argument("--methods", nargs="+", metavar="TEXT", help="only methods whose name contains one of these")
    parser.add_argument("--requests", type=int, default=8, help="requests, and how many at once (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens a request, at most (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions whose median counts (default: 5)")
    parser.add_argument("--threads", type=int, help="threads of a tensor operation (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    for name in ("requests", "max_tokens", "repeats", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    return args


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; `ValueError` for what cannot be measured."""
    chosen = [
        (subject, method)
        for subject in subjects(args.fixtures, num_requests=args.requests, max_tokens=args.max_tokens)
        if args.models is None or subject.label.startswith(tuple(args.models))
        for method in subject.methods
        if args.methods is None or any(text.lower() in method.name.lower() for text in args.methods)
    ]
    if not chosen:
        raise ValueError(f"no model and method match --models {args.models} --methods {args.methods}")
    rows = []
    with tqdm(total=len(chosen) * args.repeats * 3, unit="run", desc="decoders", mininterval=1.0) as bar:
        for subject, method in chosen:
            bar.set_postfix_str(f"{subject.label}, {method.name}", refresh=False)
            rows.append(
                measure(subject, method, max_tokens=args.max_tokens, repeats=args.repeats, tick=partial(bar.update, 1))
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        rows = run(args)
        if args.json is not None:
            settings = {
                "command": "python jobs/bench_decoders.py " + shlex.join(sys.argv[1:] if argv is None else argv),
                "requests_at_once": args.requests,
                "repeats": args.repeats,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
            write_json(args.json, {"settings": settings, "rows": rows})
    except (ValueError, OSError) as error:
        print(f"bench_decoders: {error}", file=sys.stderr)
        return 2
    print(f"N = {args.requests} requests at once; medians of {args.repeats}\n")
    print(markdown(rows, COLUMNS))
    rounded = [_name(r) for r in rows if r["same_tokens_float64"] and not r["same_tokens"]]
    wrong = [_name(r) for r in rows if not r["same_tokens_float64"]]
    if rounded:
        print(f"\nother tokens by rounding alone (the same in float64): {'; '.join(rounded)}")
    print(f"\nsame tokens: {'no: ' + '; '.join(wrong) if wrong else 'yes'}")
    return 1 if wrong else 0


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['method']}"


if __name__ == "__main__":
    sys.exit(main())
