"""One worker of tensor-parallel groups of two, over gloo: `training_groups.py MODE OUT`, started as torchrun does.

The first worker writes what the tests compare to OUT/MODE.json.
"""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from family_models import FAMILIES, random_model
from torch.distributed.device_mesh import init_device_mesh
from training_pair import held, held_by, losses, recipe_on, run_of, trained

from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.checkpoints import RunCurve
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.step.loss import multitf_loss
from mbd_core.multitf.step.loss_buckets import BUCKETS
from mbd_core.multitf.step.parallel import parallelize
from mbd_core.multitf.step.sharding import whole
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.multitf.step.workers import Workers, torchrun_workers

BASES = {"dense": "model", "expert": "experts", "width": "experts"}


def short(base: Path, **train: Any) -> TrainingRecipe:
    """A run of few and small updates, with a checkpoint before the last one and after it."""
    return recipe_on(base, **({"steps": 4, "batch_size": 4, "optimizer": "adamw"} | train))


def grouped(recipe: TrainingRecipe, cut: str = "expert") -> TrainingRecipe:
    """The recipe on groups of two workers."""
    experts = "width" if cut == "width" else "expert"
    return replace(recipe, train=replace(recipe.train, tensor_parallel=2, cut_experts=experts))


def alike(curve: RunCurve) -> dict[str, list[float]]:
    """What must not depend on how the workers share the work."""
    return {
        name: [point.get(name, 0.0) for point in curve] for name in ("loss", "grad_norm", "tokens", "tflop", *BUCKETS)
    }


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the first step, whole."""
    batch = trainer.batch(0)
    loss, _ = trainer.objective(batch, trainer._divisor(batch))
    loss.backward()
    tensors = {name: whole(p.grad).clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    return tensors


def two(workers: Workers, out: Path) -> dict[str, Any]:
    """Each way to cut a model among two workers."""
    results: dict[str, Any] = {}
    for cut, base in BASES.items():
        recipe = grouped(short(out / base), cut)
        results[cut] = alike(trained(recipe, workers, "sharded", str(out / f"{cut}-two")))
        run = run_of(recipe, workers, "sharded")
        run.write(out / f"{cut}-written")
        trainer = run.trainer
        tensors = gradients(trainer)
        if workers.is_first:
            torch.save(tensors, out / f"{cut}-two.pt")
        results[f"{cut}-plan"] = held_by(trainer, recipe, workers)
    results["muon"] = alike(trained(grouped(short(out / "model", optimizer="muon")), workers, "sharded"))
    results["from-one"] = losses(trained(grouped(short(out / "experts")), workers, "sharded", str(out / "one")))
    results["families"] = of_families(trainer.batch(0))
    recipe_in_bfloat16 = grouped(short(out / "experts", steps=1, precision="bfloat16"))
    results["bfloat16"] = losses(trained(recipe_in_bfloat16, workers, "sharded"))
    return results


def of_families(batch: MultiTFBatch) -> dict[str, float]:
    """How far the gradients of cut models of each family are from those of whole ones, the worst of all tensors."""
    distances = {}
    mesh = init_device_mesh("cpu", (2,))
    for name, config in FAMILIES.items():
        model = random_model(replace(config, vocab_size=512, max_positions=512))
        cut = deepcopy(model)
        parallelize(cut, mesh, "width" if name == "sdar-moe" else "expert")
        for half in (model, cut):
            multitf_loss(half, batch)[0].backward()
        expected = dict(model.named_parameters())
        distances[name] = max(
            float((whole(p.grad) - expected[part].grad).norm() / expected[part].grad.norm())
            for part, p in cut.named_parameters()
        )
    return distances


def four(workers: Workers, out: Path) -> dict[str, Any]:
    """Two groups of two: different samples, and what a group holds cut among the groups."""
    results: dict[str, Any] = {}
    for cut, base in BASES.items():
        recipe = grouped(short(out / base), cut)
        results[cut] = alike(trained(recipe, workers, "sharded", str(out / f"{cut}-four")))
        results[f"{cut}-plan"] = held(workers, recipe)
    return results


def main() -> None:
    mode, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    with torchrun_workers() as workers:
        results = {"two": two, "four": four}[mode](workers, out)
        if workers.is_first:
            (out / f"{mode}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
