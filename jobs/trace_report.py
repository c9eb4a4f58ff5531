"""Report on decode traces: numbers, the pictures of Figure 2, and a replay page.

    python jobs/trace_report.py NAME=TRACE... --out DIR [--tokenizer MODEL]
    python jobs/trace_report.py --model tiny-mbd [--prompt TEXT...] --out DIR

The first form reads traces that were recorded elsewhere, files or folders of parts. The second decodes prompts under
SingleBD and MultiBD, records both in detail, and reports on them. DIR gets report.md, report.json, PNG files, and,
where tokens were recorded, replay.html: it works without a server or network.
"""

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.config_files import load_config
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer_files import load_tokenizer
from mbd_core.decoding.request import Request
from mbd_core.tasks import gsm_mini
from mbd_core.trace.measures import RequestTrace, Run, read_run
from mbd_core.trace.recorder import TraceRecorder
from mbd_core.trace.replay import make_side, used_tokens, write_replay
from mbd_core.trace.trace_report import write_trace_report

NUM_PROMPTS = 16


@dataclass(kw_only=True)
class Traced:
    """Runs to report on, and what the replay page may tell of them."""

    runs: list[Run]
    request_id: str | None = None
    note: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None
    eos_token_ids: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="[NAME=]TRACE", help="trace files, or folders of parts")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes")
    parser.add_argument("--block-size", type=int, help="B, for traces recorded without tokens that do not say it")
    parser.add_argument("--tokenizer", metavar="MODEL", help="the traces' model, for the texts of the replay page")
    parser.add_argument("--request", help="request to replay (default: the first that all detailed traces share)")
    parser.add_argument("--model", help="record traces of this model instead of reading any")
    parser.add_argument("--prompt", action="append", help="what the user asks (default: 16 questions of gsm-mini)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens an answer, at most (default: 128)")
    parser.add_argument("--buffer-size", type=int, help="MultiBD's slots (default: the model's, if more than 1, or 4)")
    parser.add_argument("--decoding", default="{}", metavar="JSON", help='decoding fields, as {"tau_m2t": 0.8}')
    args = parser.parse_args(argv)
    if bool(args.traces) == bool(args.model):
        parser.error("give traces to read, or --model to record some, and not both")
    for name, allowed in (("prompt", args.model), ("buffer_size", args.model), ("request", args.traces)):
        if getattr(args, name) is not None and not allowed:
            parser.error(f"--{name.replace('_', '-')} has no meaning {'with' if args.model else 'without'} --model")
    if args.model and (args.tokenizer or args.block_size):
        parser.error("--tokenizer and --block-size have no meaning with --model, which has its own")
    return args


def read_traces(args: argparse.Namespace) -> Traced:
    """Runs of trace files; `ValueError` names what is wrong with one."""
    named = [_named(text) for text in args.traces]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise ValueError(f"two traces are named alike ({', '.join(names)}); name them with NAME=TRACE")
    traced = Traced(runs=[read_run(path, name=name, block_size=args.block_size) for name, path in named])
    traced.settings = {"traces": ", ".join(str(path) for _, path in named)}
    if args.tokenizer:
        folder = model_folder(args.tokenizer)
        config = load_config(folder)
        traced.tokenizer, traced.eos_token_ids = load_tokenizer(folder, config), config.eos_token_ids
    detailed = [run for run in traced.runs if _detailed(run)]
    ids = [[r.request_id for r in run.requests] for run in detailed]
    if args.request is not None:
        for run, known in zip(detailed, ids, strict=True):
            if args.request not in known:
                raise ValueError(f"{run.name} has no request '{args.request}'; it has {', '.join(known[:5])} ...")
        if not detailed:
            raise ValueError(f"request '{args.request}' cannot be replayed: no trace was recorded with tokens")
        traced.request_id = args.request
    elif detailed:
        traced.request_id = next((i for i in ids[0] if all(i in known for known in ids)), None)
    return traced


def record_traces(args: argparse.Namespace) -> Traced:
    """Decode the prompts under SingleBD and under MultiBD, a trace each; `ValueError` for what cannot be decoded."""
    from mbd_core.engine.engine import EngineConfig  # reading traces needs no engine
    from mbd_core.serving.load import load_engine

    folder = model_folder(args.model)
    overrides = _decoding_fields(args.decoding)
    own = load_engine(folder, EngineConfig(max_rows=1, num_pages=2)).decoding({}).buffer_size
    size = args.buffer_size or (own if own > 1 else 4)
    if size < 2:
        raise ValueError(f"--buffer-size {size} is SingleBD itself; give at least 2")
    prompts = args.prompt or [
        row["question"] for row in itertools.islice(gsm_mini.generate(split="test", seed=0), NUM_PROMPTS)
    ]
    traced = Traced(runs=[], request_id="0", note=prompts[0])
    traced.settings = {"model": args.model, "prompts": len(prompts), "max_tokens": args.max_tokens}
    for name, buffer_size in (("SingleBD", 1), ("MultiBD", size)):
        trace = TraceRecorder(detail=True)
        loaded = load_engine(folder, EngineConfig(max_rows=8, buffer_size=buffer_size), trace=trace)
        decoding = loaded.decoding({**overrides, "buffer_size": buffer_size})
        requests = [
            Request(
                request_id=str(number),
                prompt=tuple(_prompt_ids(loaded.tokenizer, prompt)),
                max_tokens=args.max_tokens,
                decoding=decoding,
            )
            for number, prompt in enumerate(prompts)
        ]
        counts = [output.counts for output in loaded.engine.generate(requests)]
        path = args.out / "traces" / f"{name}.parquet"
        trace.write(path)
        traced.runs.append(read_run(path, name=f"{name} (buffer of {buffer_size})" if buffer_size > 1 else name))
        traced.settings[f"{name} useful tokens"] = sum(c.num_tokens for c in counts)
        traced.settings[f"{name} forwards"] = sum(c.num_forwards for c in counts)
        traced.settings[f"{name} mean TPF"] = round(sum(c.tpf for c in counts) / len(counts), 4)
        traced.tokenizer, traced.eos_token_ids = loaded.tokenizer, loaded.config.eos_token_ids
    return traced


def write_page(traced: Traced, path: Path) -> str:
    """The replay page, if there is something to replay; what came of it, in a sentence."""
    detailed = [run for run in traced.runs if _detailed(run)]
    if not detailed:
        return "no replay page: no trace was recorded with tokens (TraceRecorder(detail=True))"
    if traced.request_id is None:
        return "no replay page: the traces have no request in common; name one of a single trace with --request"
    sides = [
        make_side(_request(run, traced.request_id), name=run.name, eos_token_ids=traced.eos_token_ids)
        for run in detailed
    ]
    texts = None
    if traced.tokenizer is not None:
        texts = {t: str(traced.tokenizer.decode([t])) for t in sorted(used_tokens(sides))}
    title = " and ".join(side.name for side in sides) + ": one request, forward by forward"
    write_replay(sides, path, title=title, note=traced.note, texts=texts)
    return f"replay: {path}"


def _named(text: str) -> tuple[str, Path]:
    name, mark, path = text.partition("=")
    if mark and name and not Path(text).exists():
        return name, Path(path)
    return Path(text).resolve().stem, Path(text)


def _detailed(run: Run) -> bool:
    return all(r.tokens_TNB is not None for r in run.requests)


def _request(run: Run, request_id: str) -> RequestTrace:
    return next(r for r in run.requests if r.request_id == request_id)


def _decoding_fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--decoding {text!r} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "buffer_size" in fields:
        raise ValueError(f"--decoding {text!r} must be a JSON object, without buffer_size (that is --buffer-size)")
    return fields


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Sequence[int]:
    """The prompt as a chat turn, or as it stands for a model without a chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt).input_ids)
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        traced = record_traces(args) if args.model else read_traces(args)
        traced.settings["command"] = "python jobs/trace_report.py " + shlex.join(argv or sys.argv[1:])
        text = write_trace_report(traced.runs, args.out, settings=traced.settings)
        page = write_page(traced, args.out / "replay.html")
    except (ValueError, OSError) as error:
        print(f"trace_report: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"report: {args.out / 'report.md'}, with report.json and the pictures beside it\n{page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
