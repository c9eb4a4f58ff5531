"""One worker of a small training over gloo: `training_pair.py MODE OUT`, with torchrun's environment variables.

The first worker writes what the tests compare to OUT/MODE.json.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mbd_core.checkpoint.loading import load_model
from mbd_core.multitf.checkpoints import MARKER, Checkpoints, Curve
from mbd_core.multitf.curve_file import CurveFile
from mbd_core.multitf.data import TinyData
from mbd_core.multitf.example import IGNORE
from mbd_core.multitf.export import export, join_export
from mbd_core.multitf.memory_plan import Setting, plan_memory
from mbd_core.multitf.recipes import RECIPES
from mbd_core.multitf.sharding import Sharding, own_part
from mbd_core.multitf.states import StateConfig
from mbd_core.multitf.trainer import TrainConfig
from mbd_core.multitf.training_loop import start, train
from mbd_core.multitf.training_recipe import TrainingRecipe
from mbd_core.multitf.workers import Workers, torchrun_workers

STEPS = 8


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


def losses(curve: Curve) -> list[float]:
    return [point["loss"] for point in curve]


def trained(recipe: TrainingRecipe, workers: Workers, sharding: Sharding, folder: str | None = None) -> Curve:
    """The curve of a whole run, with a checkpoint after every third step in `folder`."""
    checkpoints = None if folder is None else Checkpoints(folder, workers, recipe=recipe, keep=9)
    trainer, _, curve = start(recipe, workers, sharding, checkpoints)
    train(trainer, workers, curve, checkpoints=checkpoints, every=3)
    return curve


def compare(workers: Workers, out: Path) -> dict[str, Any]:
    """Replicated and sharded weights, for both optimizers; and what else two workers must do."""
    base, found = out / "model", {"least": workers.least(7 - workers.rank), "precision": workers.precision("float32")}
    for optimizer in ("adamw", "muon"):
        for sharding in ("replicated", "sharded"):
            recipe = recipe_on(base, optimizer=optimizer)
            folder = str(out / f"{optimizer}-{sharding}")
            curve = trained(recipe, workers, sharding, folder)
            found[f"{optimizer}-{sharding}"] = losses(curve)
            found[f"{optimizer}-{sharding}-norms"] = [point["grad_norm"] for point in curve]
    found["from-one"] = losses(trained(recipe_on(base, optimizer="muon"), workers, "sharded", str(out / "one")))
    found["plan"] = held(workers, base)
    found["experts"] = losses(trained(recipe_on(out / "experts", steps=2), workers, "sharded"))
    found["bfloat16"] = losses(trained(recipe_on(base, steps=2, precision="bfloat16"), workers, "sharded"))
    found["without-label"] = without_label(workers, base)
    found["marked"] = marked_while_training(workers, base, out / "marked")
    found["half"] = losses(trained(half_denoised(base), workers, "sharded"))
    write_sharded(workers, base, out)
    return found


def held(workers: Workers, base: Path) -> list[int]:
    """Bytes of weights and optimizer states on this worker, beside the plan's."""
    recipe = recipe_on(base, optimizer="muon")
    trainer, _, _ = start(recipe, workers, "sharded", None)
    trainer.step()
    setting = Setting(
        config=trainer.model.config, states=recipe.states, train=recipe.train, sample_tokens=400,
        num_workers=workers.size, sharding="sharded", precision="float32",
    )  # fmt: skip
    plan = plan_memory(setting)
    states = [own_part(t) for o in trainer.optimizers for s in o.state.values() for t in s.values() if t.ndim]
    weights = [own_part(p) for p in trainer.model.parameters()]
    return [plan.weights, sum(t.nbytes for t in weights), plan.optimizer, sum(t.nbytes for t in states)]


def half_denoised(base: Path) -> TrainingRecipe:
    """Steps in which by chance one worker has positions to roll out and the other has none."""
    states = StateConfig(block_size=4, labels="answer", self_denoising="half", rounding="ceil")
    return replace(recipe_on(base, steps=6, batch_size=2, optimizer="adamw"), states=states)


def marked_while_training(workers: Workers, base: Path, folder: Path) -> list[bool]:
    """After each step, whether the checkpoint of the third one is whole; all its parts are there after the fourth."""
    recipe, seen = recipe_on(base, steps=6), []
    checkpoints = Checkpoints(str(folder), workers, recipe=recipe)
    trainer, _, curve = start(recipe, workers, "replicated", checkpoints)

    def look() -> None:
        if checkpoints._writing is not None:
            checkpoints._writing[1].exception()  # returns when they are written
        seen.append((folder / "step_000003" / MARKER).exists())

    train(trainer, workers, curve, checkpoints=checkpoints, every=3, after_step=look)
    return seen


def without_label(workers: Workers, base: Path) -> list[float]:
    """Losses where one worker's samples have no label at all."""
    trainer, _, _ = start(recipe_on(base, steps=2), workers, "sharded", None)
    whole = trainer.batch

    def batch(step: int) -> Any:
        drawn = whole(step)
        if workers.rank == 1:
            drawn = replace(
                drawn, labels=torch.full_like(drawn.labels, IGNORE), weights=torch.zeros_like(drawn.weights)
            )
        return drawn

    trainer.batch = batch  # type: ignore[method-assign]
    curve: Curve = []
    train(trainer, workers, curve)
    return losses(curve)


def write_sharded(workers: Workers, base: Path, out: Path) -> None:
    """Write a sharded model as it was loaded."""
    trainer, tokenizer, _ = start(recipe_on(base), workers, "sharded", None)
    if workers.is_first:
        export(out / "written", recipe_on(base), trainer.model, tokenizer)
        assert load_model(out / "written").config == trainer.model.config
    else:
        join_export(trainer.model)


def slow(workers: Workers, out: Path) -> dict[str, Any]:
    """A run that leaves time to be killed; it goes on from what a killed one left."""
    recipe = recipe_on(out / "model", steps=24)
    checkpoints = Checkpoints(str(out / "slow"), workers, recipe=recipe)
    trainer, _, curve = start(recipe, workers, "sharded", checkpoints)
    first = trainer.step_number
    file = CurveFile(str(out / "slow"), curve) if workers.is_first else None

    def log() -> None:
        time.sleep(0.1)
        if file is not None:
            file.append()

    train(trainer, workers, curve, checkpoints=checkpoints, every=2, after_step=log)
    return {"losses": losses(curve), "first": first}


def main() -> None:
    mode, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    with torchrun_workers() as workers:
        found = {"compare": compare, "slow": slow}[mode](workers, out)
        if workers.is_first:
            (out / f"{mode}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
