"""One worker's part of a run, the same under any launcher: model and samples, updates, the trained model's folder.

Ray Train or torchrun starts the workers; a run without either has one worker.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.adapter_saving import save_adapter
from mbd_core.checkpoint.base_files import read_base
from mbd_core.checkpoint.base_values import base_values
from mbd_core.checkpoint.loading import fill_parts
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.checkpoint.saving import checkpoint_tensors
from mbd_core.errors import error_sentence
from mbd_core.multitf.config import (
    NO_SWEEPS,
    NOTHING_HELD_OUT,
    NOTHING_MEASURED,
    Measuring,
    Sharding,
    Sweeping,
    ValidationOptions,
    Written,
)
from mbd_core.multitf.recipes.recipe import RECIPE, start_line
from mbd_core.multitf.run.beginning import prepare
from mbd_core.multitf.run.checkpoints import Checkpoints, RunCurve, best_step
from mbd_core.multitf.run.export import export, recipe_text
from mbd_core.multitf.run.log import Log, RunLog, say
from mbd_core.multitf.run.profile import Profile, check_measuring
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.sweeps import Sweeper, Sweeps
from mbd_core.multitf.run.teachers import load_teacher
from mbd_core.multitf.run.validation import Validation, ValidationFailed, are_conversations, check_held_out
from mbd_core.multitf.step.adapter import adapter_factors, base_tensors, begin_adapter, fill_adapter, merge_adapter
from mbd_core.multitf.step.mfu import device_peak
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.multitf.step.workers import Workers


def train_worker(
    start: StartingPoint,
    workers: Workers,
    sharding: Sharding,
    checkpoints: Checkpoints | None,
    *,
    every: int,
    log_targets: Sequence[str] | None = None,
    changes: Sequence[str] = (),
    measuring: Measuring = NOTHING_MEASURED,
    validation: ValidationOptions = NOTHING_HELD_OUT,
    sweeping: Sweeping = NO_SWEEPS,
    sweeper: Sweeper | None = None,
) -> "Run":
    """Does all remaining updates. The first worker prints, and logs beside the checkpoints.

    The precision is settled (`settle_precision`). `log_targets` are further targets beside `losses.jsonl`; `None` is
    TensorBoard if the first worker has it installed. `changes` are the differences from the named recipe. `sweeper`
    makes the first worker's sweeps. `Run.write` then writes the model.
    """
    check_measuring(measuring, workers.device)
    run = Run(start, workers, sharding, checkpoints, measuring=measuring, validation=validation, sweeping=sweeping)
    if not workers.is_first:
        run.train(every=every)
        return run
    recipe, files = start.recipe, None
    say(start_line(recipe, device=workers.device, num_workers=workers.size))
    if changes:
        say(f"changed in the recipe: {'; '.join(changes)}")
    if run.resumed_after:
        say(f"resumed after step {run.resumed_after}")
    if checkpoints is not None:
        peak = device_peak(workers.device, recipe.train.precision)
        files = RunLog(
            checkpoints.folder,
            run.curve,
            recipe,
            peak=peak,
            num_workers=workers.size,
            targets=log_targets,
        )
        files.write_page(changes, num_workers=workers.size, device=str(workers.device))
        say(files.describe())
    log = Log(run.curve, recipe.train.steps, files)
    sweeps = None
    if sweeping.sweep_every:
        assert sweeper is not None and checkpoints is not None
        sweeps = Sweeps(sweeper, checkpoints, log)
    run.train(every=every, log=log, sweeps=sweeps)
    log.close()
    return run


def settle_precision(start: StartingPoint, workers: Workers, checkpoints: Checkpoints | None) -> StartingPoint:
    """The start of a run in the precision in which the run began, or in which all workers can begin it. Every worker
    calls this.

    Raises `ValueError` if another precision was given than the newest checkpoint's, and as `Checkpoints.newest`.
    """
    choice, record = start.recipe.train.precision, None
    if checkpoints is not None:
        record = checkpoints.newest()
        if record is not None and choice not in ("auto", record.precision):
            raise ValueError(
                f"--precision {choice}: the run in {checkpoints.folder} began in {record.precision}, and a run "
                "keeps its precision; leave --precision out, or give another folder for --checkpoints"
            )
    return start.with_precision(workers.precision(choice) if record is None else record.precision)


class Run:
    """A run at its newest checkpoint, or at its beginning.

    `curve` has a point for each update, averaged over the workers. A sharded model is loaded part by part: no worker
    holds all of its weights. Raises `ValueError` if the base cannot be loaded, and as `Checkpoints.newest`.
    """

    def __init__(
        self,
        start: StartingPoint,
        workers: Workers,
        sharding: Sharding,
        checkpoints: Checkpoints | None = None,
        *,
        measuring: Measuring = NOTHING_MEASURED,
        validation: ValidationOptions = NOTHING_HELD_OUT,
        sweeping: Sweeping = NO_SWEEPS,
    ) -> None:
        recipe, base = start.recipe, start.base
        self.start, self.workers, self.checkpoints, self.measuring = start, workers, checkpoints, measuring
        self.sweep_every = sweeping.sweep_every
        # read before training, because the folder may be gone when the model is written
        self._base_files = None if base is None or not workers.is_first else read_base(base.path)
        in_parts = sharding == "sharded" and workers.size > 1 and base is not None
        model, self.tokenizer, examples = prepare(start, workers=workers, on_meta=in_parts)
        self.validation, share = None, None
        if validation.validation is not None and not are_conversations(validation.validation):
            check_held_out(validation, start, self.tokenizer)
        if validation.share is not None:
            examples, share = examples.split(validation.share)
        if validation.validation is not None:
            self.validation = Validation(validation, start, workers, share)
        if checkpoints is not None:
            checkpoints.held_out = validation.share
            is_swept = validation.keep_best == "sweep_accuracy"
            if sweeping.sweep_every if is_swept else validation.validation is not None:
                checkpoints.keep_best = validation.keep_best
        teacher = None
        if start.teacher is not None:
            teacher = load_teacher(start.teacher, dtype=getattr(torch, recipe.train.precision), device=workers.device)
        self.trainer = Trainer(
            model,
            examples,
            recipe.states,
            recipe.train,
            rank=workers.rank,
            world_size=workers.size,
            mean=workers.mean,
            device=workers.device,
            sharding=sharding,
            teacher=teacher,
        )
        if checkpoints is not None and workers.is_first and recipe.train.lora is not None and base is not None:
            checkpoints.base = model_digest(base.path)
        record = None if checkpoints is None else checkpoints.newest()
        if in_parts:
            assert base is not None
            fill_parts(base_tensors(model), model.config, base.path)
            fill_adapter(model, seed=recipe.train.seed)
        if start.adapter is not None and record is None:
            begin_adapter(model, read_adapter(start.adapter, model.config))
        self.curve: RunCurve = []
        if checkpoints is not None and record is not None:
            checkpoints.check_share(record)
            checkpoints.load(self.trainer, record)
            self.curve = list(record.curve)
        self.resumed_after = self.trainer.step_number
        """The number of updates that were done before this start."""

    def train(self, *, every: int = 1, log: Log | None = None, sweeps: Sweeps | None = None) -> None:
        """Does the remaining updates. A checkpoint begins every `every` steps, at the best validation, for every
        sweep, and at the end."""
        measuring, num_left = self.measuring, self.trainer.config.steps - self.trainer.step_number
        if self.checkpoints is None or not (measuring.profile or measuring.memory_snapshot):
            self._train(every, log, None, sweeps)
            return
        with Profile(measuring, self.checkpoints, self.workers, num_left=num_left) as profile:
            self._train(every, log, profile, sweeps)

    def _train(self, every: int, log: Log | None, profile: Profile | None, sweeps: Sweeps | None) -> None:
        trainer, checkpoints, steps = self.trainer, self.checkpoints, self.trainer.config.steps
        if trainer.step_number == steps:
            sweeps = None
        while trainer.step_number < steps:
            if log is not None:
                log.begin()
            self.curve.append(self.workers.mean_metrics(trainer.step()).point())
            if profile is not None:
                profile.step()
            seconds = self._validate(log)
            if log is not None:
                log.add(beside=seconds)
            if checkpoints is None:
                continue
            checkpoints.poll()
            step = trainer.step_number
            is_swept = bool(self.sweep_every) and step % self.sweep_every == 0
            if sweeps is not None and is_swept and step < steps:
                sweeps.request(step)
            if is_swept or step % every == 0 or step in (steps, best_step(self.curve, checkpoints.keep_best)):
                if log is not None:
                    log.flush()
                checkpoints.save(trainer, self.curve)
            if sweeps is not None:
                sweeps.poll()
        if checkpoints is not None:
            checkpoints.wait()
        if sweeps is not None:
            sweeps.finish(steps)

    def _validate(self, log: Log | None) -> float:
        """Adds a validation's numbers to the update's point, if one is due; returns its seconds."""
        if self.validation is None:
            return 0.0
        step, start = self.trainer.step_number, time.perf_counter()
        if step % self.validation.every and step != self.trainer.config.steps:
            return 0.0
        try:
            values = self.validation.measure(self.trainer, self.workers)
        except Exception as error:  # a failed validation does not end the run
            if self.workers.size > 1 and not isinstance(error, ValidationFailed):
                raise  # the other workers are within an exchange that this worker has left
            if log is not None:
                say(f"validation after step {step} failed: {error_sentence(error)}; the run goes on")
            return time.perf_counter() - start
        self.curve[-1] |= values
        if log is not None:
            numbers = (f"{name.removeprefix('validation_')} {values[name]:.4f}" for name in list(values)[:2])
            best = best_step(self.curve, self.validation.keep_best) == step
            say(f"validation after step {step}: {', '.join(numbers)}{' (the best yet)' * best}")
        return time.perf_counter() - start

    def write(self, folder: Path | None, *, written: Written = "model", overwrite: bool = False) -> None:
        """Writes the trained model (`export`) or its adapter. Every worker calls it; the first worker gives the
        folder."""
        model, recipe = self.trainer.model, self.start.recipe
        if written == "adapter":
            lora, factors = recipe.train.lora, adapter_factors(model)
            assert lora is not None and recipe.base is not None and self.start.base is not None
            if folder is not None:
                save_adapter(
                    folder,
                    model.config,
                    factors,
                    rank=lora.rank,
                    alpha=lora.alpha,
                    dropout=lora.dropout,
                    base=recipe.base,
                    base_values=base_values(self.start.base.path),
                    extra={RECIPE: recipe_text(recipe)},
                    overwrite=overwrite,
                )
        elif self.workers.is_first:
            assert folder is not None
            export(folder, recipe, model, self.tokenizer, self._base_files, overwrite=overwrite)
        elif any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            merge_adapter(model)
            for _ in checkpoint_tensors(model, "per_expert"):  # the first worker's `export` gathers each tensor
                pass
