"""Checkpoints of a run in a folder or at a URL that fsspec knows: PyTorch's distributed format, each worker's part.

    step_000100/   __0_0.distcp, __1_0.distcp   what each worker holds of weights and optimizer states
                   .metadata                    where each tensor lies (DCP)
                   checkpoint.json              step, recipe, precision, losses so far; written last

A folder without `checkpoint.json` was not written to its end, and is not read. Tensors are stored by name and by their
place in the whole, so that other numbers of workers, and replicated or sharded weights, go on from the same files.
Data order, noise, schedule and dropout depend on (seed, step) alone: the step is all that is stored of them.

Several workers write beside the next steps, from a copy in the host's memory. `jobs/convert_checkpoint.py` makes a
model folder of a checkpoint.
"""

import json
import pickle
import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import fsspec
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from mbd_core.checkpoint.dcp import in_one_process
from mbd_core.multitf.trainer import Trainer
from mbd_core.multitf.training_recipe import TrainingRecipe, as_recorded, same_run
from mbd_core.multitf.workers import Workers

MARKER, OLD = "checkpoint.json", "trainer.pt"
NAME = re.compile(r"step_(\d{6,})")
DAMAGE = (
    OSError, EOFError, AssertionError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, CheckpointException
)  # fmt: skip
"""What reading a checkpoint raises whose files are cut or missing."""
Curve = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """What a checkpoint says of itself; the curve has a point for each update."""

    step: int
    recipe: dict[str, Any]
    precision: str
    curve: Curve


class Checkpoints:
    """The newest `keep` checkpoints of a run. Every worker calls every method, in the same order.

    `options` go to the storage's library. Failures of the storage are `OSError`s.
    """

    def __init__(
        self,
        location: str,
        workers: Workers,
        *,
        recipe: TrainingRecipe,
        keep: int = 2,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.location, self.workers, self.keep = location.rstrip("/"), workers, keep
        self.recipe = as_recorded(recipe)
        self._options = dict(options or {})
        self._group = distributed.new_group(backend="gloo") if workers.size > 1 else None
        self._writing: tuple[CheckpointRecord, Future[Any]] | None = None
        self._system, self._path = fsspec.core.url_to_fs(self.location, use_listings_cache=False, **self._options)

    def newest(self) -> CheckpointRecord | None:
        """The newest checkpoint that was written to its end, as the first worker sees it; `None` if there is none.

        Raises `ValueError`, on every worker, if it is another recipe's, is damaged, or an older version's.
        """
        found: list[CheckpointRecord | ValueError | None] = [None]
        if self.workers.is_first:
            try:
                found = [self._read_newest()]
            except ValueError as error:
                found = [error]
        if self._group is not None:
            distributed.broadcast_object_list(found, src=0, group=self._group)
        if isinstance(found[0], ValueError):
            raise found[0]
        return found[0]

    def load(self, trainer: Trainer, record: CheckpointRecord) -> None:
        """Fill the trainer's weights and optimizer states from that checkpoint, and go on after its step.

        Raises `ValueError` if its files cannot be read.
        """
        state, file = _state(trainer), ".metadata"
        reader = FsspecReader(self._folder(record.step), **self._options)
        try:
            reader.read_metadata()
            file = "a file *.distcp"
            with in_one_process() if self._group is None else nullcontext():
                dcp.load(state, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except DAMAGE as error:
            raise self._damaged(record.step, file) from error
        set_model_state_dict(trainer.model, state["model"])
        set_optimizer_state_dict(trainer.model, trainer.optimizers, state["optimizers"])
        trainer.step_number = record.step

    def save(self, trainer: Trainer, curve: Curve) -> None:
        """Begin to write a checkpoint; the one before is whole when this returns."""
        self.wait()
        record = CheckpointRecord(
            step=trainer.step_number, recipe=self.recipe, precision=trainer.precision, curve=list(curve)
        )
        folder, unfinished = self._folder(record.step), f"{self._path}/{_name(record.step)}/.metadata"
        if self.workers.is_first and self._system.exists(unfinished):
            self._system.rm(unfinished)
        writer = FsspecWriter(folder, sync_files="://" not in self.location, **self._options)
        if self._group is None:
            with in_one_process():
                dcp.save(_state(trainer), storage_writer=writer, no_dist=True)
            self._finish(record)
            return
        writing = dcp.async_save(_state(trainer), storage_writer=writer, process_group=self._group)
        self._writing = record, cast("Future[Any]", writing)

    def poll(self) -> None:
        """Mark the checkpoint that is being written if all its parts are there by now; nobody waits."""
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint that is being written is whole."""
        if self._writing is not None:
            (record, writing), self._writing = self._writing, None
            writing.result()
            if self.workers.is_first:
                self._finish(record)

    def _finish(self, record: CheckpointRecord) -> None:
        """Write the marker, and remove the checkpoints that are older than the newest `keep`."""
        file = f"{self._path}/{_name(record.step)}/{MARKER}"
        with self._system.open(f"{file}.partial", "w") as beside:
            json.dump(vars(record), beside)
        self._system.mv(f"{file}.partial", file)
        kept = self._whole()[: self.keep]
        for step in self._steps():
            if step not in kept and step < record.step and self._is_ours(step):
                self._system.rm(f"{self._path}/{_name(step)}", recursive=True)

    def _folder(self, step: int) -> str:
        return f"{self.location}/{_name(step)}"

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, also of those that were not written to their end."""
        if not self._system.exists(self._path):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(self._path, detail=False))
        return sorted((int(match[1]) for name in names if (match := NAME.fullmatch(name))), reverse=True)

    def _whole(self) -> list[int]:
        """The steps of the checkpoints that were written to their end, the newest first."""
        return [step for step in self._steps() if self._system.exists(f"{self._path}/{_name(step)}/{MARKER}")]

    def _is_ours(self, step: int) -> bool:
        """Whether the folder holds what a checkpoint is made of, to its end or not."""
        paths = self._system.ls(f"{self._path}/{_name(step)}", detail=False)
        names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        return any(name in (MARKER, ".metadata") or name.endswith(".distcp") for name in names)

    def _read_newest(self) -> CheckpointRecord | None:
        """The newest whole checkpoint's record; `ValueError` if the run cannot go on from it."""
        for step in self._steps():
            if self._system.exists(f"{self._path}/{_name(step)}/{OLD}"):
                raise ValueError(
                    f"{self._folder(step)} is a checkpoint of an older version ({OLD}), which is not read; give "
                    "another folder"
                )
        steps = self._whole()
        if not steps:
            return None
        try:
            with self._system.open(f"{self._path}/{_name(steps[0])}/{MARKER}", "r") as file:
                record = CheckpointRecord(**json.load(file))
            name, same = (
                record.recipe["name"],
                same_run(_of_any_precision(record.recipe), _of_any_precision(self.recipe)),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise self._damaged(steps[0], MARKER) from error
        if name != self.recipe["name"]:
            raise ValueError(
                f"{self.location} holds checkpoints of a run of {name}, not of {self.recipe['name']}; give another "
                "folder"
            )
        if not same:
            raise ValueError(
                f"{self.location} holds checkpoints of a run with other settings, see {MARKER} in {_name(steps[0])} "
                "there; give those, or another folder"
            )
        return record

    def _damaged(self, step: int, file: str) -> ValueError:
        before = next((_name(s) for s in self._whole() if s < step), "the beginning")
        return ValueError(
            f"the checkpoint {self._folder(step)} cannot be read: {file} there is missing or damaged; remove that "
            f"folder to go on from {before}"
        )


def _of_any_precision(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without its precision: a run keeps the one it began in, whatever is asked."""
    return {**recipe, "train": {**recipe["train"], "precision": "auto"}}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _state(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(trainer.model),
        "optimizers": get_optimizer_state_dict(trainer.model, trainer.optimizers),
    }
