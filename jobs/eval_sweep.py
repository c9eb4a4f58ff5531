"""Sweep models x methods x thresholds over tasks on Ray Data: the options, the cluster, and the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from cluster.storage import Folder, fetch_model
from jobs.command_line import Fields, IsolationText, Overwrite, command
from jobs.report_sweep import BEST
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.best import By
from mbd_core.evaluation.sweep.endpoint import Endpoint, EndpointAddress, find_endpoint, read_keys, try_decoding
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.parts import SweepShard, Timing
from mbd_core.evaluation.tasks.benchmarks import runs_programs
from mbd_core.options import CLUSTER, DATA, ENGINE, MODEL, OUTPUT, Option

if TYPE_CHECKING:
    from mbd_core.evaluation.sweep.executor import Executor
    from mbd_core.evaluation.sweep.plan import Sweep
    from mbd_core.evaluation.sweep.run import SweepRun


def run(
    options: SweepOptions,
    engine: Annotated[EngineConfig, Fields("max_rows", "num_pages", "kv_memory_fraction")],
    *,
    endpoint: Annotated[
        tuple[str, ...],
        Option(
            "An OpenAI endpoint that is asked instead of an engine, as mine=http://host:8000/v1; repeatable.",
            MODEL,
            metavar="NAME=URL[#MODEL]",
        ),
    ] = (),
    endpoint_key: Annotated[
        tuple[str, ...],
        Option(
            "The environment variable that holds an endpoint's API key; repeatable.", MODEL, metavar="NAME=VARIABLE"
        ),
    ] = (),
    shard: Annotated[
        str, Option("Compute the I-th of N shards; jobs/report_sweep.py joins their folders.", DATA, metavar="I/N")
    ] = "1/1",
    timed: Annotated[
        int,
        Option(
            "Problems a task on which each configuration is timed by itself, after the sweep; 0: none. The p99 of "
            "latency takes 100 timed requests, and is a dash below.",
            DATA,
            at_least=0,
        ),
    ] = Timing.problems,
    concurrency: Annotated[
        int, Option("Requests under way at an endpoint, and where throughput is timed.", ENGINE, at_least=1)
    ] = Timing.concurrency,
    actors: Annotated[int, Option("Engines in parallel, with a CPU a rank.", CLUSTER, at_least=1)] = 1,
    isolation: IsolationText = "any",
    out: Annotated[str, Option("Folder to write, or a URL as s3://bucket/path.", OUTPUT, metavar="DIR|URL")],
    write_best: Annotated[
        By | None,
        Option(f"Write each model's best configuration into its generation_config.json: {BEST}", OUTPUT),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Sweep models x methods x thresholds over tasks on Ray Data, and report accuracy, TPF, AUP and speed.

    A method has a name (decoding/blocks/methods.py) or is defined by its decoding fields; the grid reaches into
    their parts: --method 'mine={"t2t": {"max_edits": 8}}' --methods t2t,mine --grid "t2t.tau=0.3,0.5;buffer_size=2,4"

    It runs on the cluster of RAY_ADDRESS, which a submitted job has (with an absolute --out), or on one of its own.
    The same command again computes what is missing; --overwrite replaces a finished sweep or another.
    """
    from mbd_core.evaluation.sandbox.processes import describe_isolation
    from mbd_core.evaluation.sweep.best_folder import edit_notes
    from mbd_core.evaluation.sweep.plan import plan_sweep
    from mbd_core.evaluation.sweep.run import SweepRun

    place = writable_folder(out)
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    subjects = Subjects.find(options.models, endpoint, endpoint_key, sampling)
    models = list(subjects.fetched.values())
    options = replace(options, models=models, endpoints=subjects.endpoints, engine=engine)
    sweep = plan_sweep(options)
    edits = edit_notes({name: model_folder(model) for name, model in sweep.models.items()})
    sweep = replace(sweep, notes=[*sweep.notes, *edits])
    if any(runs_programs(problem_set.task) for problem_set in sweep.problem_sets):
        print(f"eval_sweep: programs run, on this machine, under {describe_isolation(isolation)}", file=sys.stderr)
    work = SweepRun.of(sweep, shard=SweepShard.parse(shard), timing=Timing(problems=timed, concurrency=concurrency))
    isolated = isolation == "required"
    run_work(place, work, subjects, num_actors=actors, isolated=isolated, write_best=write_best, overwrite=overwrite)


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """The models of a sweep.

    fetched    the folder of each model that was named
    endpoints  those that answered; `keys` has the keys of some of them, by name
    """

    fetched: dict[str, str]
    endpoints: Sequence[Endpoint]
    keys: dict[str, str]

    @classmethod
    def find(
        cls, models: Sequence[str], endpoints: Sequence[str], keys: Sequence[str], sampling: Sampling | None = None
    ) -> Self:
        """Fetch the models and ask the endpoints; `ValueError` for what is not there, or if nothing is named."""
        if not models and not endpoints:
            raise ValueError("nothing is to be swept: give --models, or --endpoint")
        addresses = [EndpointAddress.parse(text) for text in endpoints]
        key_of = read_keys(keys, [address.name for address in addresses])
        return cls(
            fetched={model: fetch_model(model) for model in models},
            endpoints=[find_endpoint(address, key_of.get(address.name), sampling=sampling) for address in addresses],
            keys=key_of,
        )

    @property
    def urls(self) -> dict[str, str]:
        """Where the folders of models that were fetched come from."""
        return {path: model for model, path in self.fetched.items() if path != model}

    def model_folders(self, sweep: Sweep) -> dict[str, Path | None]:
        """The user's own folder of each model, `None` for one that is elsewhere."""
        folders = {name: None if path in self.urls else model_folder(path) for name, path in sweep.models.items()}
        return folders | dict.fromkeys(sweep.endpoints)

    def try_decoding(self, sweep: Sweep) -> None:
        """Raise `ValueError` for a configuration that an endpoint refuses."""
        for name, endpoint in sweep.endpoints.items():
            configs = [json.loads(variant.config) for variant in sweep.variants[name]]
            try_decoding(endpoint, self.keys.get(name), configs)


def writable_folder(out: str) -> Folder:
    """The folder of `--out`; `ValueError` if it cannot be written."""
    folder = Folder.at(out)
    folder.check_writable()
    return folder


def run_work(
    out: Folder,
    work: SweepRun,
    subjects: Subjects,
    *,
    num_actors: int,
    isolated: bool = False,
    write_best: By | None = None,
    overwrite: bool = False,
) -> None:
    """Check what lies in the folder and what is asked for, compute what is missing, and print its tables."""
    from mbd_core.evaluation.report.choice import best_points, check_choice, written_best
    from mbd_core.evaluation.report.summary import write_summary
    from mbd_core.evaluation.sweep.endpoint import EndpointStage
    from mbd_core.evaluation.sweep.folder import FILES, KIND, REPORT, check_sweep_folder

    sweep, record = work.sweep, work.record
    subjects.try_decoding(sweep)
    targets = subjects.model_folders(sweep)
    if write_best is not None:
        check_choice(sweep, write_best, folders=targets, shard=record.shard, timing=record.timing)
    concurrency = record.timing.concurrency

    def start() -> AbstractContextManager[Executor]:
        from actors.evaluation.sweep import ray_executor  # which takes seconds, and bad input none

        return ray_executor(
            sweep, num_engines=num_actors, concurrency=concurrency, urls=subjects.urls, isolated=isolated
        )

    with (
        EndpointStage(sweep.endpoints, subjects.keys, concurrency=concurrency) as stage,
        out.mirrored(KIND, FILES) as mirror,
    ):
        check_sweep_folder(mirror.path, record, overwrite=overwrite)
        print_notes(sweep.notes)
        if not record.parts:
            print_notes([f"shard {record.shard} has none of the sweep's parts, and so no report of its own"])
            return
        summary = work.run(
            mirror.path,
            start,
            stage=stage,
            report=write_summary,
            overwrite=overwrite,
            publish=mirror.publish,
            name=str(mirror.target),
        )
        best = [] if write_best is None else best_points([mirror.path], list(targets), write_best)
    print(f"{summary.headlines}\nThe report is in {out}: report.md, report.html, {REPORT}, plot.png, samples/")
    for point in best:
        folder = targets[point.model]
        assert folder is not None, "check_choice refused it"
        print(written_best(folder, point))


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"eval_sweep: note: {note}", file=sys.stderr)


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
