"""The updates of a run from where it stands to its last, with checkpoints; the same under any launcher."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.folder import model_digest
from mbd_core.checkpoint.loading import fill_parts
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.multitf.config import Sharding
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.checkpoints import Checkpoints, Curve
from mbd_core.multitf.run.preparation import prepare
from mbd_core.multitf.step.adapter import base_tensors, fill_adapter
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.multitf.step.workers import Workers


def start(
    recipe: TrainingRecipe, workers: Workers, sharding: Sharding, checkpoints: Checkpoints | None
) -> tuple[Trainer, PreTrainedTokenizerBase, Curve]:
    """The trainer where it stands, the tokenizer, and the curve so far: from the newest checkpoint, or the beginning.

    A sharded model is loaded part by part: no worker holds all of its weights. Raises `ValueError` as `prepare` does.
    """
    in_parts = sharding == "sharded" and workers.size > 1 and recipe.base is not None
    model, tokenizer, examples = prepare(recipe, workers=workers, on_meta=in_parts)
    trainer = Trainer(
        model,
        examples,
        recipe.states,
        recipe.train,
        rank=workers.rank,
        world_size=workers.size,
        mean=workers.mean,
        device=workers.device,
        sharding=sharding,
    )
    if checkpoints is not None and workers.is_first and recipe.train.lora is not None and recipe.base is not None:
        checkpoints.base = model_digest(model_folder(recipe.base))
    record = None if checkpoints is None else checkpoints.newest()
    if in_parts:
        assert recipe.base is not None
        fill_parts(base_tensors(model), model.config, model_folder(recipe.base))
        fill_adapter(model, seed=recipe.train.seed)
    if checkpoints is None or record is None:
        return trainer, tokenizer, []
    checkpoints.load(trainer, record)
    return trainer, tokenizer, list(record.curve)


def train(
    trainer: Trainer,
    workers: Workers,
    curve: Curve,
    *,
    checkpoints: Checkpoints | None = None,
    every: int = 1,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    before_checkpoint: Callable[[], None] = lambda: None,
) -> None:
    """Do the remaining updates; `curve` grows by a point with each, averaged over the workers.

    A checkpoint is begun every `every` steps and after the last one. `before_step`, `after_step` and
    `before_checkpoint` are called on every worker.
    """
    steps = trainer.config.steps
    while trainer.step_number < steps:
        before_step()
        curve.append(workers.mean_metrics(trainer.step()).point())
        after_step()
        if checkpoints is not None:
            checkpoints.poll()
        if checkpoints is not None and (trainer.step_number % every == 0 or trainer.step_number == steps):
            before_checkpoint()
            checkpoints.save(trainer, curve)
    if checkpoints is not None:
        checkpoints.wait()
