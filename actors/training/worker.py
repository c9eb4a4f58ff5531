"""MultiTF training on Ray: the plain `Trainer` on every worker, its checkpoints in the run's folder.

Ray starts the workers, and starts all anew when one is lost; the newest checkpoint that is whole is found in the
folder, as without Ray (`mbd_core.multitf.run`).
"""

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.training.run import TrainingRun, fetched, record_recipe, recorded_precision
from cluster.storage import Folder
from cluster.topology import Resources, Topology, plan_topology
from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.multitf.config import Precision
from mbd_core.multitf.recipes.recipe import TrainingRecipe, start_line, with_precision
from mbd_core.multitf.run.checkpoints import Checkpoints, Curve
from mbd_core.multitf.run.log import LOSSES, RunLog
from mbd_core.multitf.run.loop import start, train
from mbd_core.multitf.run.preparation import base_files, check_room, export, join_export
from mbd_core.multitf.step.compute import device_peak
from mbd_core.multitf.step.workers import Workers
from mbd_core.ops.machine import free_host_memory

PROGRESS_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Where the model lies, and after which update the last start of the workers went on (0: from the beginning)."""

    model: Folder
    resumed_after: int


def plan_workers(run: TrainingRun, *, runs: int = 1) -> Topology:
    """The workers of `runs` such runs on the connected cluster.

    Raises `ClusterTooSmall` if not all find room: Ray would wait for ever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return plan_topology(nodes, processes=runs * run.num_workers, device=run.device, noun="workers")


def plan_run(run: TrainingRun, *, runs: int = 1) -> TrainingRun:
    """The run with its weights replicated or sharded, as one of the cluster's devices has room; prints the plan.

    `runs` such runs find room beside each other. Raises `ClusterTooSmall` as `plan_workers` does, and `ValueError` for
    a training that takes more memory.
    """
    workers = plan_workers(run, runs=runs)
    if workers.num_gpus:
        available = ray.get(ray.remote(gpu_memory).options(num_cpus=1, num_gpus=workers.num_gpus).remote())
    else:
        available = workers.share(nodes_memory())
    device = "GPU" if workers.num_gpus else "CPU"
    sharding, lines = check_room(
        fetched(run.recipe), run.sharding, available, num_workers=run.num_workers, device=device
    )
    print("\n".join(lines))
    return replace(run, sharding=sharding)


def gpu_memory() -> int:
    """Bytes of the GPU that this task was given."""
    return torch.cuda.get_device_properties(0).total_memory


def nodes_memory() -> list[tuple[Resources, int]]:
    """The resources of each node of the cluster that has CPUs, and the bytes that are free in its memory."""
    ask = ray.remote(free_host_memory)
    asked = [
        (node["Resources"], NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0)
    ]
    free = ray.get([ask.options(num_cpus=0, scheduling_strategy=there).remote() for _, there in asked])
    return [(resources, available) for (resources, _), available in zip(asked, free, strict=True)]


def fit(run: TrainingRun) -> TrainingResult:
    """Train on the connected cluster until the recipe's last step.

    Goes on from the newest checkpoint in the run's folder. Raises `ClusterTooSmall`, and Ray's `TrainingFailedError`
    once a worker was lost more than `max_failures` times.
    """
    workers = plan_workers(run)
    storage_path, filesystem = run.storage.for_ray()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"run": run},
        scaling_config=ScalingConfig(
            num_workers=workers.processes, use_gpu=workers.num_gpus > 0, resources_per_worker=workers.bundle
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=storage_path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=run.max_failures),
        ),
    )
    return TrainingResult(model=run.out, resumed_after=trainer.fit().return_value)


def train_worker(config: dict[str, Any]) -> int:
    """One worker's whole life, the same code on each; the first rank also prints, and writes record, losses and model.

    Returns the number of updates that were done before this start.
    """
    run: TrainingRun = config["run"]
    assert run.sharding != "auto"
    context = ray.train.get_context()
    workers = Workers(context.get_world_rank(), context.get_world_size(), get_device())
    recipe = with_precision(run.recipe, common_precision(run, workers))
    here = fetched(recipe)
    base = base_files(here) if workers.is_first else None
    if workers.is_first:
        run.out.check_writable()  # from this node, which is not the job's
        record_recipe(run, recipe)
        say(start_line(recipe, device=workers.device, num_workers=workers.size))
    checkpoints = Checkpoints(run.folder.location, workers, recipe=run.recipe, options=run.folder.options)
    trainer, tokenizer, curve = start(here, workers, run.sharding, checkpoints)
    resumed_after = trainer.step_number
    if workers.is_first and resumed_after:
        say(f"resumed after step {resumed_after}")
    log = Log(run, recipe, curve, workers) if workers.is_first else None
    train(
        trainer,
        workers,
        curve,
        checkpoints=checkpoints,
        every=run.checkpoint_every,
        before_step=log.begin if log else nothing,
        after_step=log.add if log else nothing,
        before_checkpoint=log.flush if log else nothing,
    )
    if log is not None:
        log.close()
        # Where no step was left to do, an earlier start of this run may have written the model already.
        overwrite = run.overwrite or resumed_after == recipe.train.steps
        with run.out.staged(MODEL_KIND, overwrite=overwrite) as folder:
            export(folder, recipe, trainer.model, tokenizer, base, overwrite=overwrite)
        say(f"wrote {run.out} and {run.folder / LOSSES}")
    else:
        join_export(trainer.model)
    return resumed_after


def common_precision(run: TrainingRun, workers: Workers) -> Precision:
    """The precision of all workers: the recipe's, else the one that the run began in, else what every device computes.

    Every worker calls it: none goes on before all have read the record.
    """
    asked = run.recipe.train.precision
    return workers.precision(recorded_precision(run) if asked == "auto" else asked)


def nothing() -> None:
    """What workers but the first log."""


class Log:
    """What the first worker writes and prints as updates are done."""

    def __init__(self, run: TrainingRun, recipe: TrainingRecipe, curve: Curve, workers: Workers) -> None:
        self.curve = curve
        self.log = RunLog(
            run.folder.location,
            curve,
            recipe,
            peak=device_peak(workers.device, recipe.train.precision),
            num_workers=workers.size,
            targets=run.log_targets,
            options=run.folder.options,
        )
        say(self.log.describe())
        self.begin, self.close = self.log.begin, self.log.close
        self.progress = Progress(recipe.train.steps)

    def add(self) -> None:
        """Log the update that was just done."""
        self.log.add()
        self.progress.show(self.curve, last=len(self.curve) == self.progress.steps)

    def flush(self) -> None:
        """Bring remote storage up to date, before a checkpoint says that these updates are done."""
        self.log.flush()


def say(line: str) -> None:
    """A line for the job's log. Ray Train gives `print` a second way there, and every line would stand twice."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Progress:
    """A line every few seconds: means over the steps since the line before, the speed, the time left."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.since = time.monotonic()
        self.shown: int | None = None

    def show(self, curve: list[dict[str, float]], *, last: bool) -> None:
        """Print the line if it is due; `curve` ends with the step just done."""
        first = self.shown is None
        if self.shown is None:
            self.shown = len(curve) - 1
        elapsed = time.monotonic() - self.since
        if not (first or last or elapsed >= PROGRESS_SECONDS):
            return
        recent = curve[self.shown :]
        loss, accuracy = (sum(point[name] for point in recent) / len(recent) for name in ("loss", "accuracy"))
        speed = sum(point["tokens"] for point in recent) / elapsed
        left = (self.steps - len(curve)) * elapsed / len(recent)
        say(
            f"step {len(curve)}/{self.steps}  loss {loss:.4f}  masked-token accuracy {accuracy:.3f}  "
            f"lr {curve[-1]['lr']:.2e}  {speed:,.0f} tokens/s  ETA {left // 60:.0f} min {left % 60:02.0f} s"
        )
        self.since, self.shown = time.monotonic(), len(curve)
