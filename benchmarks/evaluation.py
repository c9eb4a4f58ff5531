"""The overhead of a sweep on Ray over calls of the engine, and the sandbox's overhead for a program without work."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from benchmarks.measuring import markdown, run_seconds
from jobs.command_line import ModelName
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import Fields, command, refuse_given
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sandbox.processes import Limits, describe_isolation
from mbd_core.evaluation.sandbox.programs import Call, RunVerdict, run_calls, run_tests
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.fields import CLUSTER, DATA, DECODING, ENGINE, Flag, Ge, Le
from mbd_core.storage.folder import Folder

if TYPE_CHECKING:
    from mbd_core.batch.decoding_model import DecodingModel
    from mbd_core.batch.rows import PlannedRow
    from mbd_core.evaluation.sweep.sweep import Sweep

MOST_SECONDS = 86_400
TRIAL = 32  # problems of a trial that estimates the seconds per problem
MOST_RATIO = 1.10  # goal: the largest ratio on a run of 5 minutes
LEAST_GAIN = 1.7  # goal: the speed of two engines over one, if both have cores
COLUMNS = {"what": "what", "seconds": "seconds|.1f"}

TextBySample = Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class SweepCost:
    """Seconds of the runs. A sweep's seconds include the start of its workers, grading, writing and the report;
    `ray_start` is separate.

    several_engines  seconds of the same sweep with `num_actors` engines, `None` if it was not run
    """

    num_samples: int
    num_differing: int
    load: float
    decode: float
    ray_start: float
    sweep: float
    num_actors: int = 1
    several_engines: float | None = None

    @property
    def ratio(self) -> float:
        return self.sweep / (self.load + self.decode)

    @property
    def ratio_with_start(self) -> float:
        return (self.ray_start + self.sweep) / (self.load + self.decode)

    @property
    def text(self) -> str:
        rows = [
            {"what": "engine called directly: load", "seconds": self.load},
            {"what": "engine called directly: decode", "seconds": self.decode},
            {"what": "start of Ray", "seconds": self.ray_start},
            {"what": "sweep: workers, load, decode, grade, write, report", "seconds": self.sweep},
        ]
        gain = ""
        if self.several_engines is not None:
            rows.append({"what": f"the same sweep with {self.num_actors} engines", "seconds": self.several_engines})
            gain = f"\n{self.num_actors} engines / 1: {self.sweep / self.several_engines:.2f}"
            gain += f" times as fast (goal: at least {LEAST_GAIN:.2f} with 2 engines that have cores of their own)"
        return (
            f"{self.num_samples} samples, of which {self.num_differing} have another text in the sweep\n\n"
            f"{markdown(rows, COLUMNS)}\n\n"
            f"sweep / direct: {self.ratio:.3f}, with the start of Ray {self.ratio_with_start:.3f} (goal: at most "
            f"{MOST_RATIO:.2f} on a run of 5 minutes){gain}"
        )


def run_sweep(
    model: ModelName = "tiny-mbd",
    *,
    tasks: Annotated[tuple[str, ...], Flag("Generated tasks.", DATA, commas=True)] = ("gsm-mini", "code-mini"),
    grid: Annotated[str, Flag("As eval_sweep's.", DECODING, metavar="FIELD=VALUE,...;...")] = "tau_m2t=0.7,0.9",
    seconds: Annotated[
        float,
        Ge(1),
        Le(MOST_SECONDS),
        Flag("Approximate length of the direct run; a trial finds the number of problems.", DATA),
    ] = 300.0,
    limit: Annotated[int | None, Ge(1), Flag("Problems a task.", DATA, default="by --seconds")] = None,
    engine: Annotated[EngineConfig, Fields("max_rows")],
    actors: Annotated[int, Ge(1), Flag("Run the sweep again with this many engines; 1: do not.", CLUSTER)] = 1,
    threads: Annotated[int, Ge(1), Flag("Torch's threads of the direct run; a sweep's engine has one.", ENGINE)] = 1,
) -> None:
    """Decode one plan by the engine in this process, all samples at once, and by a sweep with one engine on Ray.

    python -m benchmarks sweep --tasks gsm-mini --seconds 300 --actors 2

    The direct run only decodes; the sweep also grades, writes every part, and reports. Both include the engine's
    loading; Ray's start is apart. No configuration is timed (--timed 0), and nothing else should run on the machine.
    Programs are graded by other processes, which slow the engine if they have no core of their own.
    """
    import torch

    from mbd_core.batch.decoding_model import DecodingModel
    from mbd_core.evaluation.sweep.loading import load_inputs
    from mbd_core.evaluation.sweep.options import SweepOptions
    from mbd_core.evaluation.sweep.plan import plan_sweep
    from mbd_core.serving.tokens.load import load_engine

    if limit is not None:
        refuse_given(run_sweep, "with --limit", seconds=seconds)
    torch.set_num_threads(threads)
    options = SweepOptions(
        models=(model,),
        tasks=tasks,
        grid=grid,
        limit=TRIAL if limit is None else limit,
        engine=engine,
    )
    sweep = plan_sweep(load_inputs(options))
    start = time.perf_counter()
    loaded_model = load_engine(model_folder(model), sweep.engine)
    with loaded_model:
        loaded_model.prepare()
        load = time.perf_counter() - start
        decode_rows = partial(decode_all, DecodingModel(loaded_model.engine, loaded_model.tokenizer))
        trial_rows = list(plan_sweep(load_inputs(replace(options, limit=min(TRIAL, limit or TRIAL)))).rows())
        decode_rows(trial_rows)  # warms up
        if limit is None:
            trial, _ = decode_rows(trial_rows)
            sweep = plan_sweep(load_inputs(replace(options, limit=problems_in(seconds, trial=trial))))
        decode, texts = decode_rows(list(sweep.rows()))
    print(sweep_cost(sweep, texts, load=load, decode=decode, num_actors=actors).text)


def sweep_cost(sweep: Sweep, texts: TextBySample, *, load: float, decode: float, num_actors: int) -> SweepCost:
    """The sweep on Ray beside the direct run that gave these texts, and again with several engines."""
    ray_start, sweep_seconds, sweep_texts = time_sweep(sweep)
    return SweepCost(
        num_samples=len(texts),
        num_differing=num_differences(texts, sweep_texts),
        load=load,
        decode=decode,
        ray_start=ray_start,
        sweep=sweep_seconds,
        num_actors=num_actors,
        several_engines=time_sweep(sweep, num_actors=num_actors)[1] if num_actors > 1 else None,
    )


def problems_in(seconds: float, *, trial: float) -> int:
    """The problems per task for a run of about `seconds`, given that `TRIAL` problems took `trial` seconds."""
    return max(TRIAL, round(TRIAL * seconds / trial))


def decode_all(model: DecodingModel, rows: Sequence[PlannedRow]) -> tuple[float, TextBySample]:
    """The seconds in which an engine decodes all rows at once, and their texts by the number of the sample."""
    from mbd_core.batch.answer_ends import generate_until
    from mbd_core.batch.decoding import sample_requests, sample_stops
    from mbd_core.batch.rows import before_stop
    from mbd_core.checkpoint.chat import decode_text
    from mbd_core.decoding.blocks.request import Request

    model.engine.forget_prefixes()
    start = time.perf_counter()
    stops, decode = sample_stops(rows), partial(decode_text, model.tokenizer)
    requests = [request for request in sample_requests(model, rows) if isinstance(request, Request)]
    outputs = generate_until(model.engine, requests, stops, decode)
    texts = {
        int(output.request_id): before_stop(decode(output.tokens), stops[output.request_id]) for output in outputs
    }
    return time.perf_counter() - start, texts


def time_sweep(sweep: Sweep, *, num_actors: int = 1) -> tuple[float, float, TextBySample]:
    """Ray's start in seconds, the sweep on it in seconds, and the sweep's texts."""

    from actors.evaluation.sweep import ray_executor
    from cluster.local import connect, disconnect
    from mbd_core.evaluation.report.summary import write_summary
    from mbd_core.evaluation.sweep.endpoints.endpoint import EndpointStage
    from mbd_core.evaluation.sweep.folder import FILES, KIND, read_samples
    from mbd_core.evaluation.sweep.run import SweepRun

    start = time.perf_counter()
    is_ours = connect(num_cpus=max(4, num_actors + 2), worker_logs=False)
    sweep_start = time.perf_counter()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="mbd-bench-sweep-") as place,
            EndpointStage({}, {}, concurrency=1) as stage,
            Folder.at(Path(place) / "sweep").mirrored(KIND, FILES) as mirror,
        ):
            work = SweepRun.of(sweep, shard=SweepShard(), timing=Timing(problems=0))
            executor = partial(ray_executor, sweep, num_engines=num_actors, concurrency=1)
            work.run(mirror.path, executor, stage=stage, report=write_summary)
            end = time.perf_counter()
            texts = {row["sample"]: row["text"] or "" for row in read_samples(mirror.path)}
    finally:
        if is_ours:
            disconnect()
    return sweep_start - start, end - sweep_start, texts


def num_differences(first: TextBySample, second: TextBySample) -> int:
    """How many samples have another text; `RuntimeError` if they are not the same samples."""
    if first.keys() != second.keys():
        raise RuntimeError(f"the sweep has {len(second)} samples, not the {len(first)} of the direct run")
    return sum(first[sample] != second[sample] for sample in first)


PROGRAM = "def same(x):\n    return x\n"
LIMITS = Limits()
TESTS = "def check(candidate):\n    assert candidate(2) == 2\n"


def run_sandbox(
    repeats: Annotated[int, Ge(1), Flag("Runs of each kind.", DATA)] = 20,
) -> None:
    """Time a program that returns its input, when it is called with inputs and when tests run it (two processes).

    It prints the median and the slowest of the repeats in milliseconds, and the machine's load, on which they depend.
    """

    def by_inputs() -> None:
        calls = [Call(arguments=[2], seconds=1.0, longest=1000)]
        _check_passed(run_calls(PROGRAM, "same", calls, lambda _number, out: bool(out.value == 2), limits=LIMITS))

    def by_tests() -> None:
        _check_passed(run_tests(PROGRAM, tests=TESTS, check="check", entry_point="same", limits=LIMITS))

    print(f"Programs run under {describe_isolation()}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {repeats} repeats")
    rows = []
    for name, run_program in (("inputs", by_inputs), ("tests, two processes", by_tests)):
        seconds = [run_seconds(run_program) for _ in range(repeats)]
        rows.append({"kind": name, "median": statistics.median(seconds), "slowest": max(seconds)})
    print(markdown(rows, {"kind": "kind", "median": "median (ms)|.0f", "slowest": "slowest (ms)|.0f"}))


def _check_passed(verdict: RunVerdict) -> None:
    """Raise `RuntimeError` for a program that did not end as it must."""
    if verdict.reason != "passed":
        raise RuntimeError(f"a program that returns its input ended as {verdict.reason}: {verdict.detail}")


sweep = command(run_sweep, "python -m benchmarks sweep")
sandbox = command(run_sandbox, "python -m benchmarks sandbox")
