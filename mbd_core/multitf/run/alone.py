"""A recipe trained without Ray: in this process alone, or in torchrun's processes."""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.checkpoint.shipped import named_model
from mbd_core.fields import CLUSTER, OUTPUT, Flag, Ge, configuration
from mbd_core.files import check_target_folder
from mbd_core.multitf import config
from mbd_core.multitf.data.prepared import named_data
from mbd_core.multitf.recipes.choice import ChosenRecipe, RecipeChoice, choose_recipe
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.curve_file import Point
from mbd_core.multitf.run.log import say
from mbd_core.multitf.run.log_targets import chosen_targets
from mbd_core.multitf.run.options import RunOptions
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.validation import check_held_out
from mbd_core.multitf.run.worker import settle_precision, train_worker
from mbd_core.multitf.step.memory import fitting, plan_lines
from mbd_core.multitf.step.workers import Workers, torchrun_workers
from mbd_core.ops.machine import free_host_memory
from mbd_core.storage.folder import Folder


@configuration(panel=OUTPUT)
class PlainOptions:
    """The options of this command alone."""

    plan: Annotated[int | None, Ge(1), Flag(panel=CLUSTER)] = None
    """Print the memory that N GPUs would need, and end."""
    out: Annotated[str | None, Flag(metavar="DIR", default="out/RECIPE")] = None
    """Model folder to write."""
    checkpoints: Annotated[str | None, Flag(metavar="DIR|URL")] = None
    """Folder of checkpoints and losses.jsonl; the run continues from the newest checkpoint there."""
    every: Annotated[int, Ge(1)] = 500
    """Steps between two checkpoints."""


@dataclass(frozen=True, kw_only=True)
class TrainedAlone:
    """The written model folder, the trained recipe, its differences from the named recipe, and the numbers of each
    update."""

    model: Path
    recipe: TrainingRecipe
    changes: tuple[str, ...]
    curve: list[Point]


def chosen_here(choice: RecipeChoice, changes: Mapping[str, Any]) -> ChosenRecipe:
    """The recipe of a command's options, its base and its data on this machine."""
    return choose_recipe(choice, changes, named_base=named_model, named_data=lambda folder: named_data(Path(folder)))


def train_alone(
    choice: RecipeChoice, changes: Mapping[str, Any], options: RunOptions, plain: PlainOptions
) -> TrainedAlone:
    """Trains a recipe and writes its model. Every process of torchrun calls it.

    Before any work, raises `ValueError` for options that cannot be honoured.
    """
    chosen = chosen_here(choice, changes)
    recipe = chosen.recipe
    if options.sweeping.sweep_every:
        raise ValueError(
            f"--set sweeping.sweep_every={options.sweeping.sweep_every} needs a Ray cluster, whose engines sweep "
            "beside the run: train with jobs/train_multitf.py, or leave it out"
        )
    config.check_best(options.held_out, options.sweeping)
    log_targets = chosen_targets(options.log_to)
    if options.log_to is not None and plain.checkpoints is None:
        raise ValueError(f"--log-to {options.log_to} needs a folder for the run: name it with --checkpoints")
    if (options.measuring.profile or options.measuring.memory_snapshot) and plain.checkpoints is None:
        raise ValueError(
            "measuring.profile and measuring.memory_snapshot need a folder for the run: name it with --checkpoints"
        )
    if plain.checkpoints is not None:
        check_checkpoints(plain.checkpoints)
    folder = model_target(f"out/{recipe.name}" if plain.out is None else plain.out, overwrite=options.overwrite)
    start = StartingPoint.read(recipe)
    start.check_written(options.write)
    check_held_out(options.held_out, start, None if start.base is None else start.base.tokenizer)
    with ExitStack() as stack:
        workers = stack.enter_context(torchrun_workers())
        if workers.is_first and (note := start.note()):
            print(f"note: {note}")
        checkpoints = None
        if plain.checkpoints is not None:
            place = Folder.at(plain.checkpoints)
            stack.enter_context(_only_writer(place, workers))
            checkpoints = Checkpoints(place, workers, recipe=recipe)
        start = settle_precision(start, workers, checkpoints)
        way = chosen_sharding(start, options.sharding, workers)
        run = train_worker(
            start,
            workers,
            way,
            checkpoints,
            every=plain.every,
            log_targets=log_targets,
            changes=chosen.changes,
            measuring=options.measuring,
            validation=options.held_out,
        )
        run.write(folder if workers.is_first else None, written=options.write, overwrite=options.overwrite)
        if workers.is_first:
            say(f"wrote {folder}")
    return TrainedAlone(model=folder, recipe=start.recipe, changes=chosen.changes, curve=run.curve)


def model_target(out: str, *, overwrite: bool) -> Path:
    """The model folder to write. Raises `ValueError` if it cannot be written, so that no run trains in vain."""
    if not out.strip():
        raise ValueError("--out is empty; name a folder, or leave it out")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", out):
        raise ValueError(f"{out} is a URL: give a folder on this machine; jobs/train_multitf.py writes to URLs")
    check_target_folder(Path(out), MODEL_KIND, overwrite=overwrite)
    return Path(out)


def check_checkpoints(location: str) -> None:
    """Raises `ValueError` for a place that cannot be written; at a URL, a file is written and removed."""
    if not location.strip():
        raise ValueError("--checkpoints is empty; name a folder or a URL, or leave it out")
    if Path(location).is_file():
        raise ValueError(f"{location} is a file; give a folder for checkpoints")
    Folder.at(location).check_writable()


@contextmanager
def _only_writer(place: Folder, workers: Workers) -> Iterator[None]:
    """Locks a folder of checkpoints on this machine; a URL's cannot be locked, nor can those of some file systems. The
    folder itself is locked, so that no lock file stands among the checkpoints.

    Every worker calls it. Raises `ValueError` on all of them while another run writes there: its checkpoints would get
    parts of both.
    """
    handle, is_free = None, True
    if workers.is_first and not place.is_remote:
        place.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(place.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:
            pass  # a file system without locks
    try:
        if not all(workers.all_values(is_free)):
            raise ValueError(f"another run writes in {place}; wait for its end, or give another folder")
        yield
    finally:
        if handle is not None:
            os.close(handle)


def chosen_sharding(start: StartingPoint, choice: config.ShardingChoice, workers: Workers) -> config.Sharding:
    """The sharding of the weights; prints the memory plan. Raises `ValueError` if the weights do not fit."""
    if workers.device.type == "cuda":
        available, device = torch.cuda.get_device_properties(workers.device).total_memory, "GPU"
    else:
        available, device = free_host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "CPU"
    workloads = start.workloads(choice, num_workers=workers.size, device=device)
    workload, plan = fitting(workloads, workers.least(available), device=device)
    if workers.is_first:
        print("\n".join(plan_lines(workload, plan, device=device)))
    return workload.sharding
