"""MultiTF training on Ray: the plain `Trainer` on every worker, gradients averaged, its state kept in checkpoints."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import distributed

from actors.training_run import LOSSES, CurveFile, TrainingRun, fetched, record_recipe, recorded_precision
from cluster.storage import Folder
from cluster.topology import Topology, plan_topology
from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.multitf.export import export
from mbd_core.multitf.precision import Precision, compute_precision
from mbd_core.multitf.preparation import prepare
from mbd_core.multitf.trainer import StepMetrics, Trainer
from mbd_core.multitf.training_recipe import start_line, with_precision

STATE = "trainer.pt"
PROGRESS_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Where the model lies, and after which update the last start of the workers went on (0: from the beginning)."""

    model: Folder
    resumed_after: int


def plan_workers(run: TrainingRun) -> Topology:
    """The workers on the connected cluster; `ClusterTooSmall` if not all find room: Ray would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return plan_topology(nodes, processes=run.num_workers, device=run.device, noun="workers")


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
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return TrainingResult(model=run.out, resumed_after=trainer.fit().return_value)


def train_worker(config: dict[str, Any]) -> int:
    """One worker's whole life, the same code on each; the first rank also prints, hands in checkpoints and writes.

    Returns the number of updates that were done before this start.
    """
    run: TrainingRun = config["run"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    is_first = rank == 0
    recipe = with_precision(run.recipe, common_precision(run, world_size=world_size))
    if is_first:
        run.out.check_writable()  # from this node, which is not the job's
        record_recipe(run, recipe)
        say(start_line(recipe, device=get_device(), num_workers=world_size))
    model, tokenizer, examples = prepare(fetched(recipe))
    model.to(get_device())
    mean = mean_tensor if world_size > 1 else None
    trainer = Trainer(model, examples, recipe.states, recipe.train, rank=rank, world_size=world_size, mean=mean)
    trainer.objective = prepare_model(trainer.objective)
    curve = restore(trainer)
    resumed_after = trainer.step_number
    if is_first and resumed_after:
        say(f"resumed after step {resumed_after}")
    train(trainer, run, curve, is_first=is_first, world_size=world_size)
    if is_first:
        # Where no step was left to do, an earlier start of this run may have written the model already.
        overwrite = run.overwrite or resumed_after == recipe.train.steps
        with run.out.staged(MODEL_KIND, overwrite=overwrite) as folder:
            export(folder, recipe, model, tokenizer, overwrite=overwrite)
        say(f"wrote {run.out} and {run.folder / LOSSES}")
    return resumed_after


def common_precision(run: TrainingRun, *, world_size: int) -> Precision:
    """The precision of all workers: the recipe's, else the one that the run began in, else what every device computes.

    Every worker calls it: the least of them decides for `auto`, and none goes on before all have read the record.
    """
    asked = run.recipe.train.precision
    if asked == "auto":
        asked = recorded_precision(run)
    in_bfloat16 = torch.tensor(compute_precision(asked, get_device()) == "bfloat16", dtype=torch.int32)
    in_bfloat16 = in_bfloat16.to(get_device())
    if world_size > 1:
        distributed.all_reduce(in_bfloat16, op=distributed.ReduceOp.MIN)
    return "bfloat16" if in_bfloat16.item() else "float32"


def restore(trainer: Trainer) -> list[dict[str, float]]:
    """Take over the newest checkpoint, if there is one; the curve up to it."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / STATE, weights_only=True, map_location=get_device())
    trainer.load_state_dict(state["trainer"])
    return state["curve"]


def train(
    trainer: Trainer, run: TrainingRun, curve: list[dict[str, float]], *, is_first: bool, world_size: int
) -> None:
    """The remaining updates; `curve` grows by a point with each, the first rank reports both in checkpoints."""
    steps = run.recipe.train.steps
    progress = Progress(steps)
    file = CurveFile(run.folder, curve) if is_first else None
    while trainer.step_number < steps:
        curve.append(asdict(mean_over_workers(trainer.step(), world_size=world_size)))
        is_last = trainer.step_number == steps
        if file is not None:
            file.append()
            progress.show(curve, last=is_last)
        if is_last or trainer.step_number % run.checkpoint_every == 0:
            if file is not None and run.folder.is_remote:
                file.flush()
            state = {"trainer": trainer.state_dict(), "curve": curve} if is_first else None
            with checkpoint_of(state) as checkpoint:
                name = f"step_{trainer.step_number:06d}"
                ray.train.report(curve[-1], checkpoint=checkpoint, checkpoint_dir_name=name)


def say(line: str) -> None:
    """A line for the job's log. Ray Train gives `print` a second way there, and every line would stand twice."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def mean_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's mean over the workers, on each of them."""
    total = tensor.clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


def mean_over_workers(metrics: StepMetrics, *, world_size: int) -> StepMetrics:
    """The step's loss and accuracy averaged over the workers, its tokens summed."""
    if world_size == 1:
        return metrics
    numbers = torch.tensor([metrics.loss, metrics.accuracy, metrics.tokens], dtype=torch.float64, device=get_device())
    distributed.all_reduce(numbers)
    loss, accuracy, tokens = numbers.tolist()
    return replace(metrics, loss=loss / world_size, accuracy=accuracy / world_size, tokens=int(tokens))


@contextmanager
def checkpoint_of(state: dict[str, Any] | None) -> Iterator[Checkpoint | None]:
    """The state as a checkpoint for as long as the block lasts; `None` for a rank that hands in none."""
    if state is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / STATE)
        yield Checkpoint.from_directory(folder)


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
