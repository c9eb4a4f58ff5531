"""MultiTF training on Ray: `mbd_core.multitf.run.worker` on each worker, checkpoints in the run's folder.

Ray starts the workers, and restarts all workers if one is lost. They continue from the newest complete checkpoint in
the folder, as without Ray (`mbd_core.multitf.run`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.paths import known_paths
from actors.sent_home import Home
from actors.training.run import TrainingRun, fetched, record_recipe, recorded_precision
from actors.training.sweeps import RaySweeper
from cluster.topology import Resources, Topology, plan_topology
from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.multitf.recipes.recipe import with_precision
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.log import say
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.worker import settle_precision, train_worker
from mbd_core.multitf.step.memory import fitting, plan_lines
from mbd_core.multitf.step.trainer import Diverged
from mbd_core.multitf.step.workers import Workers
from mbd_core.ops.machine import free_host_memory


def plan_workers(run: TrainingRun, *, runs: int = 1) -> Topology:
    """The workers of `runs` such runs on the connected cluster.

    Raises `ClusterTooSmall` if there is no room for all, because Ray would wait forever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return plan_topology(nodes, processes=runs * run.num_workers, device=run.device, noun="workers")


@contextmanager
def with_paths(run: TrainingRun) -> Iterator[TrainingRun]:
    """The run with its paths, as each node finds them. Raises `ClusterTooSmall`, and the errors of `known_paths`."""
    bundle = plan_workers(run).bundle
    with known_paths(run.opened_by_workers(), [("--storage", run.storage)], bundle=bundle) as paths:
        yield replace(run, paths=paths, home=Home.here())


def plan_run(run: TrainingRun, start: StartingPoint, *, runs: int = 1) -> TrainingRun:
    """Returns the run with its weights replicated or sharded, by the memory of one of the cluster's devices; prints
    the plan.

    The cluster must have room for `runs` such runs at once. Raises the `ClusterTooSmall` of `plan_workers`, and
    `ValueError` if the training needs more memory than there is.
    """
    workers = plan_workers(run, runs=runs)
    if workers.num_gpus:
        device = "GPU"
        available = ray.get(ray.remote(gpu_memory).options(num_cpus=1, num_gpus=workers.num_gpus).remote())
    else:
        device, available = "CPU", workers.share(nodes_memory())
    workloads = start.workloads(run.sharding, num_workers=run.num_workers, device=device)
    workload, plan = fitting(workloads, available, device=device)
    print("\n".join(plan_lines(workload, plan, device=device)))
    return replace(run, sharding=workload.sharding)


def gpu_memory() -> int:
    """Bytes of the GPU that this task was given."""
    return torch.cuda.get_device_properties(0).total_memory


def nodes_memory() -> list[tuple[Resources, int]]:
    """The resources of each node of the cluster that has CPUs, and the bytes that are free in its memory."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0)]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    read_memory = ray.remote(num_cpus=0)(free_host_memory)
    free = ray.get([read_memory.options(scheduling_strategy=place).remote() for place in places])
    return [(node["Resources"], available) for node, available in zip(nodes, free, strict=True)]


def fit(run: TrainingRun) -> int:
    """Trains on the connected cluster until the last step. Returns the number of updates done before the workers' last
    start.

    Goes on from the newest checkpoint in the run's folder. Raises `ClusterTooSmall`, `Diverged`, and Ray's
    `TrainingFailedError` once a worker was lost more than `max_failures` times.
    """
    workers = plan_workers(run)
    storage_path, filesystem = run.storage.for_ray()
    trainer = TorchTrainer(
        train_on_ray,
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
    end: int | Diverged = trainer.fit().return_value
    if isinstance(end, Diverged):
        raise end
    return end


def train_on_ray(config: dict[str, Any]) -> int | Diverged:
    """A worker's training, from its start to its end. The first rank also writes record, log and model.

    Returns the number of updates that were done before this start. Returns the error of a run that diverged, because
    Ray counts what a worker raises as a lost worker, and would begin the run again.
    """
    try:
        return _train(config["run"])
    except Diverged as error:
        return error


def _train(run: TrainingRun) -> int:
    assert run.sharding != "auto"
    run.paths.check_shared()
    context = ray.train.get_context()
    workers = Workers(context.get_world_rank(), context.get_world_size(), get_device())
    recipe = run.recipe
    if recipe.train.precision == "auto":
        recipe = with_precision(recipe, recorded_precision(run))
    checkpoints = Checkpoints(run.folder, workers, recipe=run.recipe)
    start = settle_precision(StartingPoint.read(recipe, fetch=run.paths.fetch), workers, checkpoints)
    if workers.is_first:
        if not run.has_out_at_home:
            run.out.check_writable()  # from this node, which may differ from the job's
        record_recipe(run, start.recipe)  # safe: no worker passes settle_precision before all have read the record
    held_out = fetched(run.validation, run.paths.fetch)
    worker_run = train_worker(
        start,
        workers,
        run.sharding,
        checkpoints,
        every=run.checkpoint_every,
        log_targets=run.log_targets,
        changes=run.changes,
        measuring=run.measuring,
        validation=held_out,
        sweeping=run.sweeping,
        sweeper=RaySweeper(run) if workers.is_first else None,
    )
    if not workers.is_first:
        worker_run.write(None, written=run.written)
        return worker_run.resumed_after
    # If no step was left, an earlier start of this run may have written the model already.
    overwrite = run.overwrite or worker_run.resumed_after == start.recipe.train.steps
    here = Home.here()
    home = run.home if run.home is not None and run.has_out_at_home else here
    with home.staged(run.out, MODEL_KIND, overwrite=overwrite) as folder:
        worker_run.write(folder, written=run.written, overwrite=overwrite)
    say(f"wrote {run.out}{'' if home == here else f' on {home.host}'} and {run.folder / LOSSES}")
    return worker_run.resumed_after
