"""A sweep of a run's checkpoint, as a task on the cluster: a GPU if one is free, else a CPU.

The task makes a model folder from the checkpoint, decodes a few problems with the engine, and grades them.
"""

import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from actors.evaluation.sweep import loader
from actors.training.run import TrainingRun
from cluster.failures import task_sentence
from mbd_core.batch.executor import LocalExecutor
from mbd_core.batch.timed_cases import Timing
from mbd_core.decoding.blocks.methods import MULTI
from mbd_core.engine.config import EngineConfig
from mbd_core.errors import error_sentence
from mbd_core.evaluation.measures.rates import summarize
from mbd_core.evaluation.sweep.gathered_samples import graded_sample
from mbd_core.evaluation.sweep.grading.part_grading import Grading
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.run import SweepRun
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.multitf.config import Sweeping
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.export import export_checkpoint
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.workers import ALONE

KV_SHARE = 0.05
"""The fraction of a machine's memory for the pages of an engine that runs on CPUs beside the run's workers."""


class RaySweeper:
    """Sweeps of a run's checkpoints on the connected cluster; a sweep without room fails at once."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._task: Any = None

    def begin(self, step: int) -> Future[dict[str, float]]:
        free = ray.available_resources()
        if free.get("CPU", 0) < 1:
            raise RuntimeError("the cluster has no free CPU for it")
        num_gpus = int(free.get("GPU", 0) >= 1)
        # outside of the placement group that the run's workers fill
        options = {"num_cpus": 1, "num_gpus": num_gpus, "max_retries": 0, "scheduling_strategy": "DEFAULT"}
        self._task = ray.remote(sweep_checkpoint).options(**options).remote(self.run, step, on_gpu=num_gpus > 0)
        future: Future[dict[str, float]] = self._task.future()
        return future

    def reason(self, error: BaseException) -> str:
        return task_sentence(error) if isinstance(error, RayError) else error_sentence(error)

    def end(self) -> None:
        ray.cancel(self._task, force=True)


def sweep_checkpoint(run: TrainingRun, step: int, *, on_gpu: bool) -> dict[str, float]:
    """Sweep the checkpoint that the run wrote at a step. Returns `sweep_accuracy` and `sweep_tpf`."""
    checkpoints = Checkpoints(run.folder, ALONE, recipe=run.recipe)
    with tempfile.TemporaryDirectory(prefix="mbd-sweep-") as place:
        folder = Path(place) / "model"
        export_checkpoint(folder, StartingPoint.read(run.recipe, fetch=run.paths.fetch), checkpoints, step)
        data = run.sweeping.sweep_data
        sweeping = run.sweeping if data is None else replace(run.sweeping, sweep_data=run.paths.fetch(data))
        return sweep_model(folder, sweeping, on_gpu=on_gpu)


def sweep_model(folder: Path, sweeping: Sweeping, *, on_gpu: bool) -> dict[str, float]:
    """Accuracy (a fraction) and mean TPF of a model folder under MultiBD, with its own thresholds."""
    engine = EngineConfig() if on_gpu else replace(EngineConfig(), kv_memory_fraction=KV_SHARE)
    sweep = plan_sweep(
        load_inputs(
            SweepOptions(
                models=(str(folder),),
                tasks=(sweeping.task,),
                data=() if sweeping.sweep_data is None else (f"{sweeping.task}={sweeping.sweep_data}",),
                limit=sweeping.limit,
                methods=(MULTI,),
                engine=engine,
            )
        )
    )
    parts = SweepRun.of(sweep, shard=SweepShard(), timing=Timing(problems=0)).parts
    load = loader(sweep.models, tensor_parallel=1)
    executor = LocalExecutor(load, sweep.engine, Grading(), concurrency=1, on_gpu=on_gpu)
    tables = executor.decode([(part.number, part.table()) for part in parts])
    rows = [row for _, table in tables for row in table.to_pylist()]
    if all(row["error"] is not None for row in rows):
        raise RuntimeError(f"no problem could be decoded: {rows[0]['error']}")
    summary = summarize([graded_sample(row) for row in rows])
    assert summary.tpf is not None
    return {"sweep_accuracy": summary.accuracy / 100, "sweep_tpf": summary.tpf}
