"""Sweep models x methods x thresholds over benchmarks on Ray Data, and report accuracy, TPF, TPS and AUP.

    ray job submit --working-dir . -- python jobs/eval_sweep.py --models tiny-bd,tiny-mbd \\
        --tasks gsm-mini,code-mini --grid "tau_m2t=0.7,0.9;buffer_size=2,4" --out $PWD/results

Every method of mbd_core/decoding/presets.py goes by its name, any other is a name with its decoding fields; the grid
reaches into parts:

    ... --methods single,multi,t2t,dmax --method 'mine={"t2t": {"max_edits": 8}}' --grid "t2t.tau=0.3,0.5"

Uses the cluster of RAY_ADDRESS (which a submitted job has) or a local one of its own. Writes into DIR
`samples/*.parquet` (one row a sample), `plot.png`, `report.md` and, last, `report.json`. A submitted job runs in a
copy of the working directory, so give it an absolute DIR.
"""

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from actors.evaluation import ASKED, COUNTS, Decode, grade_table
from cluster.placement import ClusterTooSmall, gpus_each
from mbd_core.checkpoint.folder import edit_note, read_folder
from mbd_core.checkpoint.loading import load_config, load_generation_defaults
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.decoding.request import Counts
from mbd_core.engine.engine import EngineConfig
from mbd_core.evaluation.grid import METHODS, MULTI, SINGLE, Methods, Variant, parse_grid, parse_methods, plan_variants
from mbd_core.evaluation.problem_set import ProblemSet, load_problems
from mbd_core.evaluation.rates import Sample
from mbd_core.evaluation.sweep_report import AupRow, Row, RunKey, build_aup, build_rows, render_markdown
from mbd_core.evaluation.tasks import find_task
from mbd_core.evaluation.tradeoff_plot import draw_plot

REPORT = "report.json"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All that is run: every model's variants on every benchmark's problems. `models` maps names to where they are.

    `notes` are sentences a reader should have seen before judging.
    """

    models: dict[str, str]
    variants: dict[str, list[Variant]]
    benchmarks: list[ProblemSet]
    engine: EngineConfig
    max_tokens: int
    seed: int
    methods: Methods
    notes: list[str]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a sample; a model's rows stand together, a problem's configurations beside each other."""
        sample = 0
        for model, variants in self.variants.items():
            for benchmark in self.benchmarks:
                for problem in benchmark.problems:
                    for variant in variants:
                        yield {
                            "sample": sample,
                            "model": model,
                            "method": variant.method,
                            "task": benchmark.task.name,
                            **asdict(problem),
                            "config": json.dumps(asdict(variant.decoding)),
                            "max_tokens": self.max_tokens,
                            "seed": self.seed,
                        }
                        sample += 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; lists are comma-separated."""
    parser = argparse.ArgumentParser(description="Sweep models x methods x thresholds over benchmarks.")
    names = "comma-separated names"
    parser.add_argument(
        "--models", required=True, help="comma-separated names of shipped models, or paths of model folders"
    )
    parser.add_argument("--tasks", required=True, help=f"{names} of benchmarks")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for samples and report")
    parser.add_argument(
        "--grid",
        default="",
        help='decoding fields and values, all combined: "tau_m2t=0.7,0.9;t2t.tau=0.3,0.5" (default: none); a '
        "field is varied under the methods it concerns (buffer_size, tau_add, tau_semi: those with several slots)",
    )
    parser.add_argument("--methods", help=f"{names} (default: {SINGLE},{MULTI} and those of --method)")
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='define a method by its decoding fields: \'T2T={"t2t": {"tau": 0.4}}\'; repeatable',
    )
    parser.add_argument("--limit", type=int, help="problems a task (default: 500 generated ones, all of a file)")
    parser.add_argument("--seed", type=int, default=0, help="which problems a generated task draws (default: 0)")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="test", help="of generated tasks")
    parser.add_argument(
        "--data", action="append", default=[], metavar="TASK=PATH", help="a task's file; PATH alone with one task"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens a problem (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences decoded at once (default: %(default)s)")
    parser.add_argument("--actors", type=int, default=1, help="engines in parallel, a CPU a rank (default: 1)")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="cut each engine's model among N GPUs of a node, or N processes without GPUs (default: 1)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a finished report in DIR")
    return parser.parse_args(argv)


def plan_sweep(args: argparse.Namespace) -> Sweep:
    """Everything the arguments name, loaded and checked; `ValueError` says in one sentence what is wrong."""
    for name in ("max_tokens", "actors", "tensor_parallel"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    tasks = [find_task(name) for name in _names(args.tasks, "--tasks")]
    files = _data_files(args.data, [task.name for task in tasks])
    grid, methods = parse_grid(args.grid), parse_methods(args.method)
    own = [name for name in methods if name not in METHODS]
    names = [SINGLE, MULTI, *own] if args.methods is None else _names(args.methods, "--methods")
    models: dict[str, str] = {}
    notes: list[str] = []
    variants: dict[str, list[Variant]] = {}
    for given in _names(args.models, "--models"):
        folder = model_folder(given)
        name = folder.resolve().name
        if name in models:
            raise ValueError(f"two models are named '{name}': {models[name]} and {given}; rename one folder")
        models[name] = given if folder == SHIPPED / given else str(folder.resolve())
        found = read_folder(folder)
        if not found.tokenizer.chat_template:
            raise ValueError(f"model '{name}' has a tokenizer without a chat template, which the prompts need")
        variants[name] = plan_variants(
            grid, names, methods=methods, defaults=found.defaults, block_size=found.config.block_size
        )
        try:
            found.config.sharded(args.tensor_parallel)
        except ValueError as error:
            raise ValueError(
                f"--tensor-parallel {args.tensor_parallel} cannot be honoured: model '{name}': {error}"
            ) from None
        for variant in variants[name]:
            full = variant.decoding.canvas is not None or variant.decoding.prompt_attention == "full"
            if full and found.config.attention != "full":
                raise ValueError(f"method '{variant.method}' needs a full-attention model; '{name}' attends in blocks")
        told = (edit_note(name, found.defaults, v.decoding) for v in variants[name])
        notes += dict.fromkeys(note for note in told if note is not None)
    benchmarks = [
        load_problems(task, split=args.split, seed=args.seed, limit=args.limit, data=files.get(task.name))
        for task in tasks
    ]
    slots = max(v.decoding.buffer_size for of in variants.values() for v in of)
    return Sweep(
        models=models,
        variants=variants,
        benchmarks=benchmarks,
        engine=EngineConfig(max_rows=args.batch, buffer_size=slots),
        max_tokens=args.max_tokens,
        seed=args.seed,
        methods={name: methods[name] for name in names},
        notes=notes,
    )


def check_cpus(num_actors: int, *, ranks: int) -> float:
    """CPUs of the connected cluster. Raises `ClusterTooSmall` where the engines, one a rank, would take all of them.

    Grading needs one too, and Ray Data would wait for it for ever.
    """
    import ray

    num_cpus, needed = ray.cluster_resources().get("CPU", 0.0), num_actors * ranks + 1
    if num_cpus < needed:
        each = "" if ranks == 1 else f" of {ranks} tensor-parallel ranks"
        raise ClusterTooSmall(
            f"--actors {num_actors}{each} needs a cluster of {needed} CPUs; this one has {num_cpus:g}"
        )
    return num_cpus


def run_sweep(sweep: Sweep, *, num_actors: int, ranks: int, num_gpus: int) -> Iterator[pa.Table]:
    """Decode and grade on the connected cluster, `num_gpus` an engine; tables of finished samples as they come."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False  # `collect` shows one bar for the whole sweep
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    asked = pa.Table.from_pylist(list(sweep.rows()), schema=ASKED)
    rows_per_call = min(4 * sweep.engine.max_rows, -(-len(asked) // num_actors))
    parts = [asked.slice(start, rows_per_call) for start in range(0, len(asked), rows_per_call)]
    graded = (
        ray.data.from_arrow(parts)
        .map_batches(
            Decode,
            fn_constructor_kwargs={"models": sweep.models, "engine": sweep.engine, "tensor_parallel": ranks},
            batch_size=rows_per_call,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=num_actors),
            num_cpus=ranks,
            num_gpus=num_gpus,
        )
        .map_batches(grade_table, batch_size=rows_per_call, batch_format="pyarrow", num_cpus=1)
    )
    yield from graded.iter_batches(batch_size=None, batch_format="pyarrow")


def collect(tables: Iterator[pa.Table], sweep: Sweep, *, folder: Path) -> dict[RunKey, list[Sample]]:
    """Write every table as a Parquet shard, showing progress, and gather the samples by what they are of."""
    samples: dict[RunKey, list[Sample]] = {
        RunKey(model, variant.method, benchmark.task.name, json.dumps(asdict(variant.decoding))): []
        for model, variants in sweep.variants.items()
        for variant in variants
        for benchmark in sweep.benchmarks
    }
    total = sum(len(v) for v in sweep.variants.values()) * sum(len(b.problems) for b in sweep.benchmarks)
    with tqdm(total=total, unit="sample", desc="sweep", mininterval=1.0) as bar:
        for number, table in enumerate(tables):
            name = f"part-{number:05d}.parquet"
            _write(folder / name, partial(pq.write_table, table))
            for row in table.to_pylist():
                key = RunKey(row["model"], row["method"], row["task"], row["config"])
                samples[key].append(_sample(row))
            bar.update(len(table))
    done = sum(len(of) for of in samples.values())
    if done != total:
        raise RuntimeError(f"{done} of {total} samples came back; {folder} holds them")
    return samples


def write_report(rows: list[Row], aups: list[AupRow], *, sweep: Sweep, settings: dict[str, Any], out: Path) -> str:
    """Write plot.png, report.md and, last, report.json; returns the Markdown."""
    labels = {b.task.name: b.task.label for b in sweep.benchmarks}
    text = render_markdown(rows, aups, labels=labels, settings=settings)
    content = {
        "rows": [
            {
                "model": row.key.model,
                "method": row.key.method,
                "task": row.key.task,
                "config": json.loads(row.key.config),
                **asdict(row.summary),
            }
            for row in rows
        ],
        "aup": [asdict(aup) for aup in aups],
        "settings": settings,
    }
    _write(out / "plot.png", lambda path: draw_plot(rows, path, labels=labels))
    _write(out / "report.md", lambda path: path.write_text(text))
    _write(out / REPORT, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))
    return text


def describe(sweep: Sweep, args: argparse.Namespace, *, num_cpus: float, seconds: float) -> dict[str, Any]:
    """What a reader needs to judge the numbers, or to run them again."""
    return {
        "models": {name: _described(model_folder(where)) for name, where in sweep.models.items()},
        "methods": {name: json.dumps(fields) for name, fields in sweep.methods.items()},
        "grid": args.grid,
        "tasks": {
            b.task.name: {"rule": b.task.rule, "source": b.source, "n": len(b.problems), "sha256": b.sha256}
            for b in sweep.benchmarks
        },
        "seed": sweep.seed,
        "max_tokens": sweep.max_tokens,
        "engine": asdict(sweep.engine),
        "actors": args.actors,
        "tensor_parallel": args.tensor_parallel,
        "notes": sweep.notes,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores; Ray sees {num_cpus:g} CPUs, "
        f"each engine runs on {args.tensor_parallel}",
        "versions": {name: version(name) for name in ("torch", "ray", "transformers")},
        "seconds": round(seconds, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run. Returns 2 with one sentence on stderr for arguments that cannot be honoured."""
    args = parse_args(argv)
    started = time.perf_counter()
    try:
        _check_out(args.out, overwrite=args.overwrite)
        sweep = plan_sweep(args)
    except ValueError as error:
        return _refuse(error)
    for note in sweep.notes:
        print(f"eval_sweep: note: {note}", file=sys.stderr)

    import ray  # takes seconds: bad input is told first

    from cluster.local import connect

    ranks = args.tensor_parallel
    ours = connect(num_cpus=max(4, args.actors * ranks + 2), worker_logs=False)
    try:
        num_cpus = check_cpus(args.actors, ranks=ranks)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_gpus = gpus_each(nodes, processes=args.actors, ranks=ranks)
        tables = run_sweep(sweep, num_actors=args.actors, ranks=ranks, num_gpus=num_gpus)
        samples = collect(tables, sweep, folder=_empty(args.out))
    except ClusterTooSmall as error:
        return _refuse(error)
    finally:
        if ours:
            ray.shutdown()
    rows = build_rows(samples, configs={key.config: json.loads(key.config) for key in samples})
    settings = describe(sweep, args, num_cpus=num_cpus, seconds=time.perf_counter() - started)
    print(write_report(rows, build_aup(rows), sweep=sweep, settings=settings, out=args.out))
    print(f"The report is in {args.out.resolve()}: report.md, {REPORT}, plot.png, samples/")
    return 0


def _refuse(error: ValueError) -> int:
    print(f"eval_sweep: {error}", file=sys.stderr)
    return 2


def _described(folder: Path) -> dict[str, Any]:
    """How big a model is and how it was trained, without which its accuracy says little."""
    config = load_config(folder)
    trained = load_generation_defaults(folder).get("trained_with", "unknown")
    return {"parameters": f"{config.num_parameters / 1e6:.3g}M", "block_size": config.block_size, "trained": trained}


def _names(text: str, option: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{option} names nothing")
    return names


def _data_files(given: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """`TASK=PATH` options by task; with one task a bare path is its own."""
    files: dict[str, str] = {}
    for item in given:
        task, equals, path = item.partition("=")
        if not (equals and task in tasks):
            if equals and "/" not in task:
                find_task(task)
                raise ValueError(f"--data {item}: the task '{task}' is not among --tasks {','.join(tasks)}")
            if len(tasks) > 1:
                raise ValueError(f"--data {item}: with several tasks write TASK=PATH")
            task, path = tasks[0], item
        if task in files:
            raise ValueError(f"--data gives task '{task}' two files: {files[task]} and {path}")
        files[task] = path
    return files


def _sample(row: dict[str, Any]) -> Sample:
    counts = None
    if row["error"] is None:
        counts = Counts(**{name: row[name] for name in COUNTS}, decode_seconds=row["decode_seconds"])
    return Sample(
        correct=row["correct"],
        counts=counts,
        strict_correct=row["strict_correct"],
        flexible_correct=row["flexible_correct"],
    )


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, not a folder")
    if (out / REPORT).exists() and not overwrite:
        raise ValueError(f"--out {out} already holds a finished {REPORT}; choose another folder or give --overwrite")


def _empty(out: Path) -> Path:
    """The samples' folder, without the report and shards of an earlier run."""
    samples = out / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    for path in (out / REPORT, out / "report.md", out / "plot.png", *samples.glob("part-*.parquet")):
        path.unlink(missing_ok=True)
    return samples


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the place and rename, so that a file that is there is whole."""
    beside = path.with_name(f".{path.name}.part")
    write(beside)
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
