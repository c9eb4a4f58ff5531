"""Checkpoints of a run in a folder or at a URL that fsspec knows: PyTorch's distributed format, each worker's part.

    step_000100/   __0_0.distcp, __1_0.distcp   each worker's part of weights and optimizer states
                   .metadata                    where each tensor lies (DCP)
                   checkpoint.json              step, recipe, precision, losses so far; written last

A folder without `checkpoint.json` was not written to its end, and is not read. Tensors are stored by name and by their
place in the whole, so a run can continue with another number of workers, and with replicated or sharded weights.
Of a model with an adapter (LoRA) the adapter alone is stored, with a digest of the recipe's base.
Data order, noise, schedule and dropout depend on (seed, step) alone: the step is all that is stored of them.

Workers write during the next steps, from a copy in the host's memory. If one worker fails to write, all workers raise
in the same call.
`jobs/convert_checkpoint.py` makes a model folder of a checkpoint.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from mbd_core.checkpoint.dcp import MARKER, UNPICKLING_ERRORS, in_one_process
from mbd_core.checkpoint.safetensor_files import METADATA
from mbd_core.errors import error_sentence
from mbd_core.fields import configuration, load
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded, other_settings
from mbd_core.multitf.step.adapter import is_of_adapter
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.multitf.step.workers import Workers
from mbd_core.storage.folder import Folder

OLD = "trainer.pt"
NAME = re.compile(r"step_(\d{6,})")
RunCurve = list[dict[str, float]]
Result = TypeVar("Result")


@configuration()
class CheckpointRecord:
    """The content of `checkpoint.json`.

    curve     a point for each update
    base      the digest of an adapter's base
    held_out  the share of the data that is not trained on
    """

    step: int
    recipe: dict[str, Any]
    precision: Literal["float32", "bfloat16"]
    curve: list[dict[str, Any]]
    base: str | None = None
    held_out: float | None = None


def best_step(curve: RunCurve, metric: str | None) -> int | None:
    """The number of updates after which the metric was first at its best; `None` if no point of the curve has it as a
    finite number."""
    if metric is None or not (points := [point for point in curve if math.isfinite(point.get(metric, math.nan))]):
        return None
    sign = 1 if metric.endswith("loss") else -1
    return int(min(points, key=lambda point: sign * point[metric])["step"]) + 1


class Checkpoints:
    """The newest `keep` checkpoints of a run. Every worker calls every method, in the same order.

    Failures of the storage are `OSError`s, on all workers. `base` is the digest of an adapter's base, set on the first
    worker; `held_out` is the share of the data that is not trained on.
    """

    def __init__(
        self,
        folder: Folder,
        workers: Workers,
        *,
        recipe: TrainingRecipe,
        keep: int = 2,
    ) -> None:
        self.folder, self.workers, self.keep = folder, workers, keep
        self.keep_best: str | None = None
        """The metric of the curve by which the best checkpoint is kept too."""
        self.recipe = as_recorded(recipe)
        self.base: str | None = None
        self.held_out: float | None = None
        self.in_use: int | None = None
        """The step whose checkpoint is being read, so that it is not removed; set on the first worker."""
        has_others = workers.size > 1
        if not has_others:  # the writing thread would warn
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._group = distributed.new_group(backend="gloo") if has_others else None
        self._poll_group = distributed.new_group(backend="gloo") if has_others else None  # DCP's threads use the first
        self._writing: tuple[CheckpointRecord, Future[Any]] | None = None
        self._system, self._path = folder.filesystem()

    def newest(self) -> CheckpointRecord | None:
        """The newest checkpoint that was written to its end, as the first worker sees it; `None` if there is none.

        Raises `ValueError`, on every worker, if it is another recipe's, is damaged, or an older version's.
        """
        return self._on_first(self._read_newest, f"the checkpoints in {self.folder} cannot be read")

    def _on_first(self, call: Callable[[], Result], failure: str) -> Result:
        """Calls `call` on the first worker. All workers return its result, or raise `ValueError` or `OSError`."""
        results: list[Any] = [None]
        if self.workers.is_first:
            try:
                results = [call()]
            except ValueError as error:
                results = [error]
            except Exception as error:  # each storage raises types of its own
                results = [OSError(f"{failure}: {error_sentence(error)}")]
        if self._group is not None:
            distributed.broadcast_object_list(results, src=0, group=self._group)
        if isinstance(results[0], ValueError | OSError):
            raise results[0]
        result: Result = results[0]
        return result

    def check_share(self, record: CheckpointRecord) -> None:
        """Raise `ValueError` for a checkpoint of a run that trains on another share of its data."""
        if record.held_out != self.held_out:
            share = "leave --validation SHARE out" if record.held_out is None else f"--validation {record.held_out}"
            raise ValueError(
                f"{self.folder} holds checkpoints of a run that trains on another share of the data: {share}, or "
                "give another folder"
            )

    def load(self, trainer: Trainer, record: CheckpointRecord) -> None:
        """Fill the trainer's weights and optimizer states from that checkpoint, and go on after its step.

        Raises `ValueError` if a file of it is missing or cut.
        """
        state = _state(trainer)
        self._fill(state, record.step)
        set_model_state_dict(trainer.model, state["model"], options=StateDictOptions(strict=not _has_adapter(trainer)))
        set_optimizer_state_dict(trainer.model, trainer.optimizers, state["optimizers"])
        trainer.step_number = record.step

    def load_weights(self, model: Decoder, step: int, *, adapter: bool) -> None:
        """Fill a model, or its adapter alone, from the checkpoint of a step. Raises as `load`."""
        state = {"model": _weights(model, adapter=adapter)}
        self._fill(state, step)
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not adapter))

    def _fill(self, state: dict[str, Any], step: int) -> None:
        reader = FsspecReader(self._folder(step), **self.folder.options)
        try:
            with (
                _storage_failures(f"the checkpoint {self._folder(step)} cannot be read"),
                in_one_process() if self._group is None else nullcontext(),
            ):
                dcp.load(state, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except OSError:
            damage = self._damage(step)
            if damage is None:
                raise
            raise self._damage_error(step, damage) from None

    def save(self, trainer: Trainer, curve: RunCurve) -> None:
        """Begin to write a checkpoint. The checkpoint before it is whole when this returns."""
        self.wait()
        record = CheckpointRecord(
            step=trainer.step_number,
            recipe=self.recipe,
            precision=trainer.precision,
            curve=list(curve),
            base=self.base,
            held_out=self.held_out,
        )
        folder = self._folder(record.step)
        self._on_first(partial(self._forget_unfinished, record.step), _not_written(folder))
        with _storage_failures(_not_written(folder)):
            writer = _ReportingWriter(folder, sync_files=not self.folder.is_remote, **self.folder.options)
            writing = dcp.async_save(
                _state(trainer), storage_writer=writer, process_group=self._group, no_dist=self._group is None
            )
        self._writing = record, cast("Future[Any]", writing)

    def poll(self) -> None:
        """Mark the checkpoint that is being written as whole, if all its parts are written. Does not wait for them.

        The workers agree on it: if a part could not be written, all workers raise here, before their next step.
        """
        if self._writing is not None:
            is_done = torch.tensor(int(self._writing[1].done()))
            if self._poll_group is not None:
                distributed.all_reduce(is_done, op=distributed.ReduceOp.MIN, group=self._poll_group)
            if is_done:
                self.wait()

    def is_writing(self, step: int) -> bool:
        """Whether the checkpoint of a step that was begun is not whole yet."""
        return self._writing is not None and self._writing[0].step == step

    def wait(self) -> None:
        """Return when the checkpoint that is being written is whole."""
        if self._writing is not None:
            (record, writing), self._writing = self._writing, None
            failure = _not_written(self._folder(record.step))
            with _storage_failures(failure), in_one_process() if self._group is None else nullcontext():
                writing.result()
            self._on_first(partial(self._finish, record), failure)

    def _forget_unfinished(self, step: int) -> None:
        """Remove the metadata of an unfinished checkpoint, whose parts are to be written again."""
        metadata = f"{self._path}/{_name(step)}/{METADATA}"
        if self._system.exists(metadata):
            self._system.rm(metadata)

    def _finish(self, record: CheckpointRecord) -> None:
        """Write the marker, and remove the checkpoints that are older than the newest `keep`.

        The best checkpoint and the checkpoint in use stay.
        """
        file = f"{self._path}/{_name(record.step)}/{MARKER}"
        with self._system.open(f"{file}.partial", "w") as file_object:
            json.dump(asdict(record), file_object)
        self._system.mv(f"{file}.partial", file)
        kept_steps = [*self._finished_steps()[: self.keep], best_step(record.curve, self.keep_best), self.in_use]
        for step in self._steps():
            if step not in kept_steps and step < record.step and self._is_ours(step):
                self._system.rm(f"{self._path}/{_name(step)}", recursive=True)

    def _folder(self, step: int) -> str:
        return str(self.folder / _name(step))

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, also of incomplete ones."""
        if not self._system.exists(self._path):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(self._path, detail=False))
        return sorted((int(match[1]) for name in names if (match := NAME.fullmatch(name))), reverse=True)

    def _finished_steps(self) -> list[int]:
        """The steps of the checkpoints that were written to their end, the newest first."""
        return [step for step in self._steps() if self._system.exists(f"{self._path}/{_name(step)}/{MARKER}")]

    def _is_ours(self, step: int) -> bool:
        """Whether the folder holds files of a checkpoint, whole or not."""
        paths = self._system.ls(f"{self._path}/{_name(step)}", detail=False)
        names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        return any(name in (MARKER, METADATA) or name.endswith(".distcp") for name in names)

    def _read_newest(self) -> CheckpointRecord | None:
        """The newest whole checkpoint's record; `ValueError` if the run cannot go on from it."""
        for step in self._steps():
            if self._system.exists(f"{self._path}/{_name(step)}/{OLD}"):
                raise ValueError(
                    f"{self._folder(step)} is a checkpoint of an older version ({OLD}), which is not read; give "
                    "another folder"
                )
        steps = self._finished_steps()
        if not steps:
            return None
        try:
            with self._system.open(f"{self._path}/{_name(steps[0])}/{MARKER}", "r") as file:
                record: CheckpointRecord = load(CheckpointRecord, json.load(file))
            name = record.recipe["name"]
            settings = other_settings(_of_any_precision(record.recipe), _of_any_precision(self.recipe))
        except (ValueError, TypeError, KeyError):
            raise self._damage_error(steps[0], f"{MARKER} is cut or damaged") from None
        if name != self.recipe["name"]:
            raise ValueError(
                f"{self.folder} holds checkpoints of a run of {name}, not of {self.recipe['name']}; give another "
                "folder"
            )
        if None not in (record.base, self.base) and record.base != self.base:
            raise ValueError(
                f"{self.folder} holds checkpoints of an adapter (LoRA) of another base: {self.recipe['base']} has "
                "changed since; give the base as it was, or another folder"
            )
        if settings:
            raise ValueError(
                f"{self.folder} holds checkpoints of a run with other settings ({MARKER} in {_name(steps[0])}): "
                f"{settings}; give these settings, or another folder"
            )
        return record

    def _damage(self, step: int) -> str | None:
        """Which file of a checkpoint is missing or cut; `None` if none is, or the storage does not say."""
        folder = f"{self._path}/{_name(step)}"
        try:
            if not self._system.exists(f"{folder}/{METADATA}"):
                return f"{METADATA} is missing"
            try:
                places = FsspecReader(self._folder(step), **self.folder.options).read_metadata().storage_data
            except UNPICKLING_ERRORS:
                return f"{METADATA} is cut or damaged"
            ends: dict[str, int] = {}
            for place in places.values():
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
            for file, length in sorted(ends.items()):
                if not self._system.exists(f"{folder}/{file}"):
                    return f"{file} is missing"
                if (size := self._system.size(f"{folder}/{file}")) < length:
                    return f"{file} is cut: {size:,} of {length:,} bytes are there"
        except Exception:  # each storage raises types of its own; the error of `load` is raised then
            return None
        return None

    def _damage_error(self, step: int, damage: str) -> ValueError:
        earlier = next((_name(s) for s in self._finished_steps() if s < step), "the beginning")
        return ValueError(
            f"the checkpoint {self._folder(step)} cannot be read: {damage}; remove that folder to go on from {earlier}"
        )


class _ReportingWriter(FsspecWriter):
    """Raises the storage's own error, such as a full disk's, if a file cannot be written.

    torch raises another error on top, from closing the file, and passes only the last error to other workers.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # each storage raises types of its own
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise OSError(error_sentence(cause or error)) from error


@contextmanager
def _storage_failures(action: str) -> Iterator[None]:
    """Any failure in the block becomes an `OSError` with `action` and the cause, of the first worker that failed."""
    try:
        yield
    except CheckpointException as report:
        rank, (cause, _) = min(report.failures.items())
        raise OSError(f"{action} by worker {rank}: {error_sentence(cause)}") from cause
    except Exception as error:  # each storage raises types of its own
        raise OSError(f"{action}: {error_sentence(error)}") from error


def _not_written(folder: str) -> str:
    return f"the checkpoint {folder} cannot be written"


def _of_any_precision(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without its precision, because a run keeps the precision that it began in."""
    return {**recipe, "train": {**recipe["train"], "precision": "auto"}}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _has_adapter(trainer: Trainer) -> bool:
    return trainer.config.lora is not None


def _state(trainer: Trainer) -> dict[str, Any]:
    """The stored state: the weights and the optimizers' states. Of a model with an adapter, the adapter's alone."""
    weights = _weights(trainer.model, adapter=_has_adapter(trainer))
    return {"model": weights, "optimizers": get_optimizer_state_dict(trainer.model, trainer.optimizers)}


def _weights(model: Decoder, *, adapter: bool) -> dict[str, Any]:
    weights = get_model_state_dict(model)
    return {name: tensor for name, tensor in weights.items() if is_of_adapter(name)} if adapter else weights
