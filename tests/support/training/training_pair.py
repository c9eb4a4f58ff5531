"""One worker of a small training over gloo: `training_pair.py MODE OUT`, with torchrun's environment variables.

The first worker writes what the tests compare to OUT/MODE.json.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import failing_storage  # noqa: F401  (the scheme failing://)
import fsspec
import torch
from torch import distributed
from trainer_state import D2F_STATES

from mbd_core.checkpoint.loading import load_model
from mbd_core.multitf.config import LoraSettings, Sharding, TrainConfig, ValidationOptions
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.checkpoints import MARKER, Checkpoints, RunCurve
from mbd_core.multitf.run.curve_file import CurveFile
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.worker import Run
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.memory import Workload, plan_memory
from mbd_core.multitf.step.sharding import own_part
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.multitf.step.workers import Workers, torchrun_workers
from mbd_core.storage.folder import Folder
from mbd_core.storage.remote import OPTIONS

STEPS = 8
KEPT = 4
"""Files of a checkpoint of two workers: each one's part, DCP's metadata, and the marker."""


def recipe_on(base: Path, *, steps: int = STEPS, **train: Any) -> TrainingRecipe:
    """Random tiny models on generated data, a few samples a step."""
    settings = {
        "batch_size": 8,
        "lr": 2e-3,
        "warmup": 1,
        "precision": "float32",
        "micro_batch": 2,
        "activation_checkpointing": True,
    }
    return replace(
        RECIPES["tiny-mbd"],
        name="pair",
        base=str(base),
        data=TinyData(per_task=24),
        states=StateConfig(block_size=4, max_group=2, num_layouts=2, span="response", rounding="ceil"),
        train=TrainConfig(steps=steps, **(settings | train)),
        max_length=400,
    )


def losses(curve: RunCurve) -> list[float]:
    return [point["loss"] for point in curve]


def trained(
    recipe: TrainingRecipe, workers: Workers, sharding: Sharding, folder: str | None = None, *, keep: int = 9
) -> RunCurve:
    """The curve of a whole run, with a checkpoint after every third step in `folder`."""
    checkpoints = None if folder is None else Checkpoints(Folder.at(folder), workers, recipe=recipe, keep=keep)
    run = run_of(recipe, workers, sharding, checkpoints)
    run.train(every=3)
    return run.curve


def run_of(
    recipe: TrainingRecipe, workers: Workers, sharding: Sharding, checkpoints: Checkpoints | None = None
) -> Run:
    """A run where it stands."""
    return Run(StartingPoint.read(recipe), workers, sharding, checkpoints)


class AfterStep:
    """A log that calls a function after each update."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def add(self, *, beside: float = 0.0) -> None:
        self.call()

    def begin(self) -> None: ...
    def flush(self) -> None: ...


def next_tokens(base: Path, *, alone: bool) -> TrainingRecipe:
    """The AR loss alone, its labels pooled over the workers; or beside the block loss, packed."""
    recipe = recipe_on(base, steps=3, optimizer="adamw", pack=None if alone else 400)
    states = RECIPES["ar"].states if alone else replace(recipe.states, ar_weight=0.5)
    return replace(recipe, states=states)


def distilled(base: Path) -> TrainingRecipe:
    """D2F on a model of whole sequences: an adapter with dropout learns from the network without it."""
    adapter = LoraSettings(rank=3, alpha=6, dropout=0.2)
    train = {"optimizer": "adamw", "lr": 2e-2, "lora": adapter, "distillation": "student_teacher"}
    return replace(recipe_on(base, **train), states=D2F_STATES)


def trained_adapter(recipe: TrainingRecipe, workers: Workers, sharding: Sharding, folder: Path) -> list[float]:
    """The losses of a run, whose model is written beside `folder`, where its checkpoints lie."""
    checkpoints = Checkpoints(Folder.at(folder), workers, recipe=recipe, keep=9)
    run = run_of(recipe, workers, sharding, checkpoints)
    run.train(every=3)
    run.write(folder.with_name(f"{folder.name}-model"))
    return losses(run.curve)


def compare(workers: Workers, out: Path) -> dict[str, Any]:
    """Replicated and sharded weights, for both optimizers; and what else two workers must do."""
    base, results = (
        out / "model",
        {"least": workers.least(7 - workers.rank), "precision": workers.precision("float32")},
    )
    for optimizer in ("adamw", "muon"):
        for sharding in ("replicated", "sharded"):
            recipe = recipe_on(base, optimizer=optimizer)
            folder = str(out / f"{optimizer}-{sharding}")
            curve = trained(recipe, workers, sharding, folder)
            results[f"{optimizer}-{sharding}"] = losses(curve)
            results[f"{optimizer}-{sharding}-norms"] = [point["grad_norm"] for point in curve]
    results["from-one"] = losses(trained(recipe_on(base, optimizer="muon"), workers, "sharded", str(out / "one")))
    results["plan"] = held(workers, recipe_on(base, optimizer="muon"))
    for sharding in ("replicated", "sharded"):
        recipe, folder = distilled(out / "dream"), out / f"adapter-{sharding}"
        results[f"adapter-{sharding}"] = trained_adapter(recipe, workers, sharding, folder)
    results["adapter-plan"] = held(workers, distilled(out / "dream"))
    results["failing"] = failing(workers, base, out, "__1_*")
    results["failing-marker"] = failing(workers, base, out, "checkpoint.json*")
    results["remote"], results["resumed-after"] = remote(workers, base)
    results["packed"] = losses(trained(recipe_on(base, steps=2, pack=160, micro_batch=1), workers, "sharded"))
    results["experts"] = losses(trained(recipe_on(out / "experts", steps=2), workers, "sharded"))
    results["bfloat16"] = losses(trained(recipe_on(base, steps=2, precision="bfloat16"), workers, "sharded"))
    results["without-label"] = without_label(workers, base)
    results["marked"] = marked_while_training(workers, base, out / "marked")
    results["half"] = losses(trained(half_denoised(base), workers, "sharded"))
    results["ar"] = losses(trained(next_tokens(base, alone=True), workers, "sharded"))
    results["ar-beside"] = losses(trained(next_tokens(base, alone=False), workers, "replicated"))
    for sharding in ("replicated", "sharded"):
        results[f"held-out-{sharding}"] = held_out(recipe_on(base), workers, sharding)
    write_sharded(workers, base, out)
    return results


def held_out(recipe: TrainingRecipe, workers: Workers, sharding: Sharding) -> dict[str, float]:
    """The held-out losses before the first update: 13 samples, of which the last is without one beside it."""
    run = Run(StartingPoint.read(recipe), workers, sharding, validation=ValidationOptions(validation="0.27"))
    assert run.validation is not None and len(run.validation.examples) == 13
    return run.validation.measure(run.trainer, workers)


def held(workers: Workers, recipe: TrainingRecipe) -> list[int]:
    """Bytes of weights and optimizer states on this worker, beside the plan's."""
    return held_by(run_of(recipe, workers, "sharded").trainer, recipe, workers)


def held_by(trainer: Trainer, recipe: TrainingRecipe, workers: Workers) -> list[int]:
    """The same of a trainer, which does a step."""
    trainer.step()
    workload = Workload(
        config=trainer.model.config,
        states=recipe.states,
        train=recipe.train,
        sample_tokens=400,
        num_workers=workers.size,
        sharding="sharded",
        precision="float32",
    )
    plan = plan_memory(workload)
    states = [own_part(t) for o in trainer.optimizers for s in o.state.values() for t in s.values() if t.ndim]
    weights = [own_part(p) for p in trainer.model.parameters()]
    return [plan.weights, sum(t.nbytes for t in weights), plan.optimizer, sum(t.nbytes for t in states)]


class SeenLate:
    """The writing of a checkpoint, which one worker finds done only when it has looked twice."""

    def __init__(self, writing: Any) -> None:
        self.writing, self.looked = writing, 0
        self.result = writing.result

    def done(self) -> bool:
        self.looked += 1
        return self.looked > 2 and bool(self.writing.done())


def failing(workers: Workers, base: Path, out: Path, pattern: str) -> list[str | None]:
    """What each worker says of a checkpoint of which a file cannot be written, and after how many updates."""
    recipe = recipe_on(base, steps=9)
    OPTIONS["failing"] = {"writes": pattern}
    checkpoints = Checkpoints(Folder.at(f"failing://{out}/run"), workers, recipe=recipe)
    run = run_of(recipe, workers, "sharded", checkpoints)
    sentence, sentences = "nothing failed", [None] * workers.size

    def look_late() -> None:
        if checkpoints._writing is not None and workers.rank == 1 and len(run.curve) == 4:
            record, writing = checkpoints._writing
            checkpoints._writing = record, SeenLate(writing)

    try:
        run.train(every=3, log=AfterStep(look_late))
    except OSError as error:
        sentence = f"{len(run.curve)}: {error}"
    distributed.all_gather_object(sentences, sentence)
    return sentences


def remote(workers: Workers, base: Path) -> tuple[list[float], int]:
    """The losses of a run on an S3 server that lost its newest checkpoint, and after which step it went on."""
    recipe, folder = recipe_on(base, optimizer="muon"), "s3://bucket/pair"
    trained(recipe, workers, "sharded", folder, keep=2)
    if workers.is_first:
        fsspec.filesystem("s3").rm(f"bucket/pair/step_{STEPS:06d}/{MARKER}")
    checkpoints = Checkpoints(Folder.at(folder), workers, recipe=recipe)
    run = run_of(recipe, workers, "sharded", checkpoints)
    run.train(every=3)
    return losses(run.curve), run.resumed_after


def half_denoised(base: Path) -> TrainingRecipe:
    """Steps in which by chance one worker has positions to roll out and the other has none."""
    states = StateConfig(block_size=4, labels="answer", self_denoising="half", rounding="ceil")
    return replace(recipe_on(base, steps=6, batch_size=2, optimizer="adamw"), states=states)


def marked_while_training(workers: Workers, base: Path, folder: Path) -> list[bool]:
    """After each step, whether the checkpoint of the third one is whole; all its parts are there after the fourth."""
    recipe, is_marked = recipe_on(base, steps=6), []
    checkpoints = Checkpoints(Folder.at(folder), workers, recipe=recipe)
    run = run_of(recipe, workers, "replicated", checkpoints)

    def look() -> None:
        if checkpoints._writing is not None:
            checkpoints._writing[1].exception()  # returns when they are written
        is_marked.append((folder / "step_000003" / MARKER).exists())

    run.train(every=3, log=AfterStep(look))
    return is_marked


def without_label(workers: Workers, base: Path) -> list[float]:
    """Losses where one worker's samples have no label at all."""
    run = run_of(recipe_on(base, steps=2), workers, "sharded")
    batch_of_step = run.trainer.batch

    def batch(step: int) -> Any:
        batch_here = batch_of_step(step)
        if workers.rank == 1:
            batch_here = replace(
                batch_here,
                labels=torch.full_like(batch_here.labels, IGNORE),
                weights=torch.zeros_like(batch_here.weights),
            )
        return batch_here

    run.trainer.batch = batch  # type: ignore[method-assign]
    run.train()
    return losses(run.curve)


def write_sharded(workers: Workers, base: Path, out: Path) -> None:
    """Write a sharded model as it was loaded."""
    run = run_of(recipe_on(base), workers, "sharded")
    run.write(out / "written")
    if workers.is_first:
        assert load_model(out / "written").config == run.trainer.model.config


def slow(workers: Workers, out: Path) -> dict[str, Any]:
    """A run that leaves time to be killed; it goes on from what a killed one left."""
    recipe = recipe_on(out / "model", steps=24)
    checkpoints = Checkpoints(Folder.at(out / "slow"), workers, recipe=recipe)
    run = run_of(recipe, workers, "sharded", checkpoints)
    file = CurveFile(Folder.at(out / "slow"), run.curve) if workers.is_first else None

    def log() -> None:
        time.sleep(0.1)
        if file is not None:
            file.append()

    run.train(every=2, log=AfterStep(log))
    return {"losses": losses(run.curve), "first": run.resumed_after}


def main() -> None:
    mode, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    with torchrun_workers() as workers:
        results = {"compare": compare, "slow": slow}[mode](workers, out)
        if workers.is_first:
            (out / f"{mode}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
