"""Report on block lengths: each alone, all of them under BlockBatch, and what becomes of their caches.

    python jobs/branch_report.py --model DIR --prompts FILE.jsonl --block-lengths 4,8,16,32 --out DIR
    python jobs/branch_report.py --model DIR --task gsm-mini --limit 20 --max-tokens 128 --out DIR

A line of FILE.jsonl is {"prompt": "text"} or {"prompt_ids": [1, 2, 3]}; the latter need no tokenizer. Only the answers
of a --task can be graded. The model must have full attention (LLaDA, Dream, DiffuCoder). No cluster is needed; it runs
on the GPU if there is one. DIR gets report.md, report.json and PNG files.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mbd_core.bench.plain_loops import PlainRun, run_canvas
from mbd_core.canvas.branches import BranchedCanvas
from mbd_core.canvas.canvas_decoder import canvas_decoder
from mbd_core.canvas.plan import CanvasDecoder
from mbd_core.checkpoint.config_files import load_config
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.canvas_config import Canvas
from mbd_core.decoding.decoding_config import decoding_config
from mbd_core.decoding.sampling import Sampling, Vocab
from mbd_core.evaluation.graders import grade
from mbd_core.evaluation.problem_set import ProblemSet, load_problems
from mbd_core.evaluation.tasks import find_task
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.studies.block_length_measures import BranchStudy, Decoded, Sample, record_caches
from mbd_core.studies.block_length_report import write_branch_report
from mbd_core.studies.cache_watch import BranchWatch, SingleWatch, Sketch


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt; `grade` tells how good an output is, where anything does."""

    name: str
    ids: tuple[int, ...]
    grade: Callable[[list[int]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class Methods:
    """The canvases to decode: one for each block length, and BlockBatch over all."""

    single: dict[int, Canvas]
    block_batch: Canvas


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model, and which ids it never predicts."""

    model: Decoder
    config: ModelConfig
    vocab: Vocab

    def decoder(self, prompt: Prompt, max_tokens: int, canvas: Canvas) -> CanvasDecoder:
        return canvas_decoder(
            prompt.ids,
            max_tokens,
            canvas,
            Sampling(),
            eos_token_ids=self.config.eos_token_ids,
            vocab=self.vocab,
            shift=self.config.shift_logits,
        )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a full-attention model's folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with prompt or prompt_ids")
    source.add_argument("--task", help="a benchmark, whose answers are graded (gsm-mini, code-mini, gsm8k, humaneval)")
    parser.add_argument("--data", metavar="FILE", help="the benchmark's file, if it is not a generated one")
    parser.add_argument("--limit", type=int, help="prompts, at most (default: all of a file, 16 of a generated task)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--block-lengths", default="4,8,16,32", metavar="N,N", help="ascending (default: 4,8,16,32)")
    parser.add_argument("--tau", type=float, help="confidence threshold (default: 0.9)")
    parser.add_argument(
        "--decoding",
        default="{}",
        metavar="JSON",
        help='more of the decoding, as {"canvas": {"branches": {"tau_sync": 16}}}',
    )
    parser.add_argument("--watch", type=int, default=4, help="watch the caches of the first N prompts (default: 4)")
    parser.add_argument("--draw", type=int, default=3, help="pictures of the first N prompts (default: 3)")
    parser.add_argument("--sketch", type=int, default=256, help="numbers that a cache is projected to (default: 256)")
    parser.add_argument("--seed", type=int, default=1729, help="seed of that projection (default: 1729)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    return parser.parse_args(argv)


def read_methods(args: argparse.Namespace, config: ModelConfig) -> Methods:
    """The canvases that the command line asks for; `ValueError` names what cannot be."""
    if config.attention != "full":
        raise ValueError(
            f"{args.model} is a {config.architecture}, which attends in blocks: BlockBatch needs full attention "
            "(LLaDA, Dream, DiffuCoder)"
        )
    lengths = _lengths(args.block_lengths, args.max_tokens)
    try:
        fields = json.loads(args.decoding)
    except json.JSONDecodeError as error:
        raise ValueError(f"--decoding {args.decoding!r} is not JSON: {error}") from error
    canvas = fields.pop("canvas", {}) if isinstance(fields, dict) else None
    branches = canvas.pop("branches", {}) if isinstance(canvas, dict) else None
    if not isinstance(canvas, dict) or not isinstance(branches, dict):
        raise ValueError(
            f"--decoding {args.decoding!r} must be a JSON object; canvas, and branches in it, objects as well"
        )
    for owner, given, names in (
        ("canvas", canvas, ("block_length", "cache")),
        ("branches", branches, ("block_lengths",)),
    ):
        for name in names:
            if name in given:
                raise ValueError(f"--decoding has {owner}.{name}, which is what the report varies; leave it out")
    if args.tau is not None:
        if "tau" in canvas:
            raise ValueError("the threshold comes twice, as --tau and as canvas.tau in --decoding; leave one out")
        canvas["tau"] = args.tau

    def built(more: dict[str, Any]) -> Canvas:
        made = decoding_config({}, {**fields, "canvas": {**canvas, **more}}, block_size=config.block_size).canvas
        assert made is not None
        return made

    return Methods(
        block_batch=built({"branches": {**branches, "block_lengths": lengths}}),
        single={n: built({"block_length": n, "cache": "dual"}) for n in lengths},
    )


def _lengths(text: str, max_tokens: int) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--block-lengths {text!r} must be whole numbers with commas between, as 4,8,16") from None
    if len(lengths) < 2 or lengths != sorted(set(lengths)) or lengths[0] < 1:
        raise ValueError(f"--block-lengths {text} must be at least two lengths, ascending, each once")
    if lengths[-1] > max_tokens:
        raise ValueError(f"--block-lengths {text}: {lengths[-1]} exceeds --max-tokens {max_tokens}; leave it out")
    return lengths


def read_prompts(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a prompts file; `ValueError` names the line that is none."""
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
        if not isinstance(row, dict) or ("prompt" in row) == ("prompt_ids" in row):
            raise ValueError(f"{path}, line {number}: must be an object with either prompt or prompt_ids")
        ids = row.get("prompt_ids")
        if ids is None and not (isinstance(row["prompt"], str) and row["prompt"]):
            raise ValueError(f"{path}, line {number}: prompt must be a text that is not empty")
        if ids is not None and not (ids and isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ValueError(f"{path}, line {number}: prompt_ids must be a list of token ids that is not empty")
        rows.append({**row, "name": f"line {number}"})
    if not rows:
        raise ValueError(f"{path} holds no prompts")
    return rows[:limit]


def _prompts_of_file(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    found = []
    for row in rows:
        ids = row.get("prompt_ids")
        if ids is None:
            assert tokenizer is not None
            ids = _text_ids(tokenizer, row["prompt"])
        found.append(Prompt(name=row["name"], ids=tuple(ids)))
    return found


def _prompts_of_task(problems: ProblemSet, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    def grader(number: int) -> Callable[[list[int]], float]:
        problem = problems.problems[number]
        return lambda tokens: float(grade(problems.task, problem, str(tokenizer.decode(tokens))).correct)

    return [
        Prompt(name=problem.problem_id, ids=tuple(_text_ids(tokenizer, problem.prompt)), grade=grader(number))
        for number, problem in enumerate(problems.problems)
    ]


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text as a chat turn, or as it stands for a model without a chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text).input_ids)
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def prepare(args: argparse.Namespace) -> tuple[Subject, Methods, list[Prompt]]:
    """Read all that was named, the weights last; `ValueError` or `OSError` says what is wrong with it."""
    for name in ("limit", "max_tokens", "sketch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name in ("watch", "draw"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 0")
    if args.data is not None and args.task is None:
        raise ValueError(f"--data {args.data} belongs to a --task; there is none")
    folder = model_folder(args.model)
    config = load_config(folder)
    methods = read_methods(args, config)
    tokenizer = None
    rows = None if args.prompts is None else read_prompts(args.prompts, args.limit)
    if rows is None or any("prompt" in row for row in rows) or (folder / "tokenizer.json").exists():
        found = read_folder(folder)
        config, tokenizer = found.config, found.tokenizer
    if rows is not None:
        prompts = _prompts_of_file(rows, tokenizer)
    else:
        assert tokenizer is not None
        task = find_task(args.task)
        limit = args.limit or (16 if task.generate is not None else None)
        prompts = _prompts_of_task(load_problems(task, limit=limit, data=args.data), tokenizer)
    for prompt in prompts:
        if len(prompt.ids) + args.max_tokens > config.max_positions:
            raise ValueError(
                f"{prompt.name}: a prompt of {len(prompt.ids)} and --max-tokens {args.max_tokens} exceed the model's "
                f"{config.max_positions} positions"
            )
        wrong = [i for i in prompt.ids if not 0 <= i < config.vocab_size]
        if wrong:
            raise ValueError(f"{prompt.name}: token id {wrong[0]} lies outside the vocabulary of {config.vocab_size}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, dtype=torch.float32 if device.type == "cpu" else None, device=device)
    vocab = Vocab(config.mask_token_id, config.vocab_size if tokenizer is None else len(tokenizer))
    return Subject(model=model, config=config, vocab=vocab), methods, prompts


def study_prompt(
    subject: Subject,
    methods: Methods,
    prompt: Prompt,
    args: argparse.Namespace,
    *,
    watched: bool,
    tick: Callable[[], Any],
) -> Sample:
    """Decode one prompt by every method and, if it is `watched`, record its caches."""
    length = len(prompt.ids) + args.max_tokens
    sketch = Sketch(subject.model, length=length, size=args.sketch, seed=args.seed) if watched else None
    single: dict[int, Decoded] = {}
    watches: dict[int, SingleWatch] = {}
    for n, canvas in methods.single.items():
        if sketch is not None:
            watches[n] = SingleWatch(
                subject.model, sketch, prompt_length=len(prompt.ids), max_tokens=args.max_tokens, block_length=n
            )
        decoder = subject.decoder(prompt, args.max_tokens, canvas)
        single[n] = _decoded(prompt, run_canvas(subject.model, decoder, watch=watches.get(n)))
        tick()
    together = subject.decoder(prompt, args.max_tokens, methods.block_batch)
    assert isinstance(together, BranchedCanvas)
    branch_watch = None if sketch is None else BranchWatch(sketch, together)
    run = run_canvas(subject.model, together, watch=branch_watch)
    tick()
    assert together.winner is not None
    return Sample(
        name=prompt.name,
        prompt_length=len(prompt.ids),
        single=single,
        block_batch=_decoded(prompt, run),
        winner=list(methods.single)[together.winner],
        branches=together.stats(),
        caches=None
        if branch_watch is None
        else record_caches({n: w.run for n, w in watches.items()}, branch_watch.run),
    )


def _decoded(prompt: Prompt, run: PlainRun) -> Decoded:
    return Decoded(
        tokens=run.tokens,
        num_forwards=run.num_forwards,
        finish_reason=run.finish_reason,
        accuracy=None if prompt.grade is None else prompt.grade(run.tokens),
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        subject, methods, prompts = prepare(args)
        weights = subject.model.lm_head.weight
        with tqdm(total=len(prompts) * (len(methods.single) + 1), desc="runs", file=sys.stderr) as bar:
            samples = [
                study_prompt(subject, methods, p, args, watched=number < args.watch, tick=lambda: bar.update(1))
                for number, p in enumerate(prompts)
            ]
        settings: dict[str, object] = {
            "command": "python jobs/branch_report.py " + shlex.join(sys.argv[1:] if argv is None else argv),
            "model": f"{args.model} ({subject.config.architecture})",
            "prompts": f"{len(prompts)} from {args.task or args.prompts}",
            "max_tokens": args.max_tokens,
            "BlockBatch": str(methods.block_batch.branches),
            "tau": methods.block_batch.tau,
            "device": f"{weights.device.type}, {str(weights.dtype).removeprefix('torch.')}, torch {torch.__version__}",
            "sketch": f"{args.sketch} numbers, seed {args.seed}",
        }
        study = BranchStudy(
            block_lengths=list(methods.single),
            samples=samples,
            graded=all(p.grade is not None for p in prompts),
            rounding=torch.finfo(weights.dtype).eps,
            settings=settings,
        )
        text = write_branch_report(study, args.out, draw=args.draw)
    except (ValueError, OSError) as error:
        print(f"branch_report: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"report: {args.out / 'report.md'}, with report.json and the pictures beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
