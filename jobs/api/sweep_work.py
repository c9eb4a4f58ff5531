"""The work of a sweep: its models and endpoints, the executor that decodes, and the report it returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jobs.api.call_options import Say, ray_address, silent
from jobs.api.rows import table_of
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.choice.best import By
from mbd_core.evaluation.sweep.endpoints.endpoint import (
    Endpoint,
    EndpointAddress,
    find_endpoint,
    read_keys,
    try_decoding,
)
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import UrlWeights, check_url_weights, fetch_model

if TYPE_CHECKING:
    from mbd_core.batch.decoding_model import DecodingModel
    from mbd_core.batch.executor import Executor
    from mbd_core.evaluation.report.summary import SweepSummary
    from mbd_core.evaluation.sweep.run import SweepRun
    from mbd_core.evaluation.sweep.sweep import Sweep


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A sweep's report.

    folder     the path or URL of samples and report
    report     the content of report.json; empty for a shard without parts
    headlines  the main tables as Markdown
    notes      remarks for a reader of the numbers
    best       one sentence for each configuration that was written into a model's folder
    """

    folder: str
    report: Mapping[str, Any] = field(repr=False)
    headlines: str = field(repr=False)
    notes: tuple[str, ...] = ()
    best: tuple[str, ...] = ()

    @property
    def table(self) -> Any:
        """One row per model, task and configuration: a pandas table if pandas is installed, else a list.

        The configuration's fields that differ among the rows are columns.
        """
        rows = self.report.get("rows", [])
        configs = [row["config"] or {} for row in rows]
        differing = [
            name
            for name in dict.fromkeys(name for config in configs for name in config)
            if len({json.dumps(config.get(name)) for config in configs}) > 1
        ]
        named = ("model", "method", "task")
        return table_of(
            [
                {
                    **{name: row[name] for name in named},
                    **{name: config.get(name) for name in differing},
                    **{n: v for n, v in row.items() if n not in named and not isinstance(v, dict | list)},
                }
                for row, config in zip(rows, configs, strict=True)
            ]
        )

    def __str__(self) -> str:
        return self.headlines


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """The models of a sweep.

    fetched    the folder of each named model
    endpoints  the endpoints, which all answered
    keys       API keys by an endpoint's name
    """

    fetched: dict[str, str]
    endpoints: Sequence[Endpoint]
    keys: dict[str, str]

    @classmethod
    def find(
        cls,
        models: Sequence[str],
        endpoints: Sequence[str],
        keys: Sequence[str],
        sampling: Sampling | None = None,
        *,
        url_weights: UrlWeights = "cache",
    ) -> Self:
        """Fetch the models and ask the endpoints.

        Raises `ValueError` if a model or an endpoint is not there, or if neither is named.
        """
        if not models and not endpoints:
            raise ValueError("nothing is to be swept: give --models, or --endpoint")
        check_url_weights(models, url_weights)
        addresses = [EndpointAddress.parse(text) for text in endpoints]
        key_of = read_keys(keys, [address.name for address in addresses])
        return cls(
            fetched={model: fetch_model(model, url_weights=url_weights) for model in models},
            endpoints=[find_endpoint(address, key_of.get(address.name), sampling=sampling) for address in addresses],
            keys=key_of,
        )

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each fetched folder."""
        return {path: model for model, path in self.fetched.items() if path != model}

    def model_folders(self, sweep: Sweep) -> dict[str, Path | None]:
        """The user's own folder of each model, `None` for a model at a URL or an endpoint."""
        folders = {name: None if path in self.urls else model_folder(path) for name, path in sweep.models.items()}
        return folders | dict.fromkeys(sweep.endpoints)

    def try_decoding(self, sweep: Sweep) -> None:
        """Raise `ValueError` for a configuration that an endpoint refuses."""
        for name, endpoint in sweep.endpoints.items():
            configs = [json.loads(variant.config) for variant in sweep.variants[name]]
            try_decoding(endpoint, self.keys.get(name), configs)


def run_work(
    out: Folder,
    work: SweepRun,
    subjects: Subjects,
    *,
    num_actors: int = 1,
    cluster: str | None,
    isolated: bool = False,
    write_best: By | None = None,
    overwrite: bool = False,
    say: Say = silent,
) -> SweepResult:
    """Check the folder and the requested work, compute the missing rows, and write the report."""
    from mbd_core.evaluation.report.best_choice import best_points, check_choice, written_best
    from mbd_core.evaluation.report.summary import write_summary
    from mbd_core.evaluation.sweep.endpoints.endpoint import EndpointStage
    from mbd_core.evaluation.sweep.folder import FILES, KIND, REPORT, check_sweep_folder

    planned, record = work.sweep, work.record
    subjects.try_decoding(planned)
    targets = subjects.model_folders(planned)
    if write_best is not None:
        check_choice(planned, write_best, folders=targets, shard=record.shard, timing=record.timing)
    concurrency = record.timing.concurrency
    address = None if cluster is None else ray_address(cluster)

    def start() -> AbstractContextManager[Executor]:
        if cluster is None:
            return local_executor(planned, concurrency=concurrency, isolated=isolated)
        from actors.evaluation.sweep import ray_executor  # importing Ray takes seconds: bad input first

        return ray_executor(
            planned,
            address=address,
            num_engines=num_actors,
            concurrency=concurrency,
            urls=subjects.urls,
            isolated=isolated,
            say=say,
        )

    notes = list(planned.notes)
    with (
        EndpointStage(planned.endpoints, subjects.keys, concurrency=concurrency) as stage,
        out.mirrored(KIND, FILES) as mirror,
    ):
        check_sweep_folder(mirror.path, record, overwrite=overwrite)
        if not record.parts:
            notes.append(f"shard {record.shard} has none of the sweep's parts, and so no report of its own")
        for note in notes:
            say(f"note: {note}")
        if not record.parts:
            return SweepResult(folder=str(out), report={}, headlines="", notes=tuple(notes))
        summary: SweepSummary = work.run(
            mirror.path,
            start,
            stage=stage,
            report=write_summary,
            overwrite=overwrite,
            publish=mirror.publish,
            name=str(out),
        )
        best = [] if write_best is None else best_points([mirror.path], list(targets), write_best)
    written = []
    for point in best:
        folder = targets[point.model]
        assert folder is not None, "check_choice refused it"
        written.append(written_best(folder, point))
    report = json.loads(summary.files[REPORT])
    return SweepResult(
        folder=str(out), report=report, headlines=summary.headlines, notes=tuple(notes), best=tuple(written)
    )


@contextmanager
def local_executor(planned: Sweep, *, concurrency: int, isolated: bool) -> Iterator[Executor]:
    """One engine in this process, without Ray."""
    import torch

    from mbd_core.batch.decoding_model import DecodingModel
    from mbd_core.batch.executor import LocalExecutor
    from mbd_core.evaluation.sweep.grading.part_grading import Grading
    from mbd_core.serving.tokens.load import load_engine

    def load(name: str, engine: EngineConfig) -> DecodingModel:
        folder = model_folder(planned.models[name])
        loaded = load_engine(folder, engine, tensor_parallel=planned.tensor_parallel)
        loaded.prepare()
        return DecodingModel(loaded.engine, loaded.tokenizer)

    on_gpu = torch.cuda.is_available()
    yield LocalExecutor(load, planned.engine, Grading(isolated=isolated), concurrency=concurrency, on_gpu=on_gpu)
