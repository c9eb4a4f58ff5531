"""MultiTF training on Ray: the plain `Trainer` on every worker, gradients averaged, its state kept in checkpoints."""

import json
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

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import SHIPPED
from mbd_core.multitf.recipes import TrainingRecipe
from mbd_core.multitf.run import export, prepare
from mbd_core.multitf.trainer import StepMetrics, Trainer

STATE, RUN, LOSSES = "trainer.pt", "run.json", "losses.jsonl"
TOKENIZER_PAIRS = 8000
PROGRESS_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A recipe, and where and how it runs.

    Everything of the run lies in `folder`, which all workers must be able to reach. A checkpoint is written every
    `checkpoint_every` steps and after the last one; the run survives `max_failures` lost workers.
    """

    recipe: TrainingRecipe
    name: str
    storage: Path
    out: Path
    num_workers: int = 2
    checkpoint_every: int = 100
    max_failures: int = 3

    def __post_init__(self) -> None:
        batch_size = self.recipe.train.batch_size
        if self.num_workers < 1 or self.checkpoint_every < 1 or self.max_failures < 0:
            raise ValueError(
                f"num_workers={self.num_workers} and checkpoint_every={self.checkpoint_every} must be at least 1, "
                f"max_failures={self.max_failures} at least 0"
            )
        if batch_size % self.num_workers:
            raise ValueError(
                f"batch_size={batch_size} of recipe {self.recipe.name} does not divide over {self.num_workers} workers"
            )
        if not self.name or Path(self.name).name != self.name:
            raise ValueError(f"run name {self.name!r} must be one folder name")
        if not (self.storage.is_absolute() and self.out.is_absolute()):
            raise ValueError(
                f"storage={self.storage} and out={self.out} must be absolute: workers have folders of their own"
            )
        if self.recipe.base is not None:
            read_folder(SHIPPED / self.recipe.base)  # a base that is not whole is told before Ray starts

    @property
    def folder(self) -> Path:
        return self.storage / self.name


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Where the model lies, and after which update the last start of the workers went on (0: from the beginning)."""

    model: Path
    resumed_after: int


def shortened(recipe: TrainingRecipe, steps: int) -> TrainingRecipe:
    """The recipe with `steps` updates: the schedule in proportion, and no more samples than the updates consume.

    A recipe that also trains its tokenizer keeps the samples the tokenizer is learned from.
    """
    warmup = max(1, round(recipe.train.warmup * steps / recipe.train.steps))
    train = replace(recipe.train, steps=steps, warmup=warmup)
    consumed = steps * train.batch_size
    pairs = max(consumed, TOKENIZER_PAIRS) if recipe.base is None else consumed
    data = replace(recipe.data, per_task=min(recipe.data.per_task, -(-pairs // 2)))
    return replace(recipe, train=train, data=data)


def begin(run: TrainingRun, *, resume: bool) -> None:
    """Claim the run's folder, or check that the run to be resumed is this one; `ValueError` says what is wrong."""
    record, settings = run.folder / RUN, json.dumps(asdict(run.recipe), indent=2, default=str) + "\n"
    if not resume:
        if run.folder.exists():
            raise ValueError(f"a run already lies in {run.folder}; go on with --resume, or choose another --run-name")
        run.folder.mkdir(parents=True)
        record.write_text(settings)
    elif not record.exists():
        raise ValueError(f"--resume: there is no run in {run.folder}")
    elif record.read_text() != settings:
        raise ValueError(f"--resume: the run in {run.folder} was started with other settings, see {record}")


def fit(run: TrainingRun) -> TrainingResult:
    """Train on the connected cluster until the recipe's last step.

    Goes on from the newest checkpoint in the run's folder. Raises `ValueError` if the cluster has too few CPUs, and
    Ray's `TrainingFailedError` once a worker was lost more than `max_failures` times.
    """
    resources = ray.cluster_resources()
    if resources.get("CPU", 0) < run.num_workers:
        raise ValueError(f"{run.num_workers} workers need a CPU each, the cluster has {resources.get('CPU', 0):g}")
    on_gpus = resources.get("GPU", 0) >= run.num_workers
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"run": run},
        scaling_config=ScalingConfig(
            num_workers=run.num_workers,
            use_gpu=on_gpus,
            resources_per_worker={"CPU": 1, "GPU": 1} if on_gpus else {"CPU": 1},
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=str(run.storage),
            failure_config=FailureConfig(max_failures=run.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return TrainingResult(model=run.out, resumed_after=trainer.fit().return_value)


def train_worker(config: dict[str, Any]) -> int:
    """One worker's whole life, the same code on each; the first rank also speaks, hands in checkpoints and writes.

    Returns the number of updates it found done.
    """
    run: TrainingRun = config["run"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    recipe, speaks = run.recipe, rank == 0
    if speaks:
        say(
            f"recipe {recipe.name}: {recipe.train.steps} steps of {recipe.train.batch_size} samples on "
            f"{world_size} workers, {recipe.data.per_task} problems of each task"
        )
    model, tokenizer, examples = prepare(recipe)
    model.to(get_device())
    trainer = Trainer(model, examples, recipe.states, recipe.train, rank=rank, world_size=world_size)
    trainer.objective = prepare_model(trainer.objective)
    curve: list[dict[str, float]] = []
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / STATE, weights_only=True, map_location=get_device())
        trainer.load_state_dict(state["trainer"])
        curve = state["curve"]
        if speaks:
            say(f"resumed after step {trainer.step_number}")

    resumed_after = trainer.step_number
    progress = Progress(recipe.train.steps)
    while trainer.step_number < recipe.train.steps:
        curve.append(asdict(mean_over_workers(trainer.step(), world_size=world_size)))
        last = trainer.step_number == recipe.train.steps
        if speaks:
            progress.show(curve, last=last)
        if last or trainer.step_number % run.checkpoint_every == 0:
            state = {"trainer": trainer.state_dict(), "curve": curve}
            with saved(state if speaks else None) as kept:
                name = f"step_{trainer.step_number:06d}"
                ray.train.report(curve[-1], checkpoint=kept, checkpoint_dir_name=name)
    if speaks:
        export(run.out, recipe, model, tokenizer)
        (run.folder / LOSSES).write_text("".join(json.dumps(point) + "\n" for point in curve))
        say(f"wrote {run.out} and {run.folder / LOSSES}")
    return resumed_after


def say(line: str) -> None:
    """A line for the job's log. Ray Train gives `print` a second way there, and every line would stand twice."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def mean_over_workers(metrics: StepMetrics, *, world_size: int) -> StepMetrics:
    """The step's loss and accuracy averaged over the workers, its tokens summed."""
    if world_size == 1:
        return metrics
    numbers = torch.tensor([metrics.loss, metrics.accuracy, metrics.tokens], dtype=torch.float64, device=get_device())
    distributed.all_reduce(numbers)
    loss, accuracy, tokens = numbers.tolist()
    return replace(metrics, loss=loss / world_size, accuracy=accuracy / world_size, tokens=int(tokens))


@contextmanager
def saved(state: dict[str, Any] | None) -> Iterator[Checkpoint | None]:
    """The state as a checkpoint for as long as it takes to report it; `None` from the ranks that hand in nothing."""
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
