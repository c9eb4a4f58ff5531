#!/usr/bin/env python3
"""Train a model by reinforcement learning on answers that it samples itself, on Ray or in this process alone.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- python jobs/train_rl.py --recipe tiny-rl
    mbd rl --recipe tiny-rl --local

An iteration samples groups of answers, rewards them, makes one update, and gives the engines the new weights. The same
command with --resume continues a killed run. Exit codes: 0 done, 1 the training failed or no cluster could be
reached, 2 bad input; each failure is one sentence on stderr.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from cluster.topology import Device
from jobs.api.call_options import IsolationOption
from jobs.api.training import RayOptions
from mbd_core.command_line import Changes, Fields, command, command_options
from mbd_core.engine.config import EngineConfig
from mbd_core.fields import CLUSTER, MODEL, Flag, Ge, changed, configuration, leaves_of
from mbd_core.json_text import merge_fields
from mbd_core.multitf.config import check_schedule
from mbd_core.multitf.recipes.choice import FIELD, read_config, recipe_in_file
from mbd_core.multitf.run.log_targets import chosen_targets, default_targets
from mbd_core.multitf.run.options import RunOptions
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.recipes import RL_RECIPES, rl_recipe_named
from mbd_core.storage.folder import Folder

if TYPE_CHECKING:
    from mbd_core.rl.executor import RLExecutor
    from mbd_core.rl.rollouts import RolloutPlan

OF_TRAIN = ("lr", "warmup", "schedule", "weight_decay", "clip", "optimizer", "precision", "micro_batch", "pack")
"""Fields of `train` that are options, beside the adapter's and the teacher's; `--set` and a file (--config) change the
others."""
FOLLOWS = {"steps": "--iterations", "batch_size": "--prompts and --group", "seed": "--seed"}
"""Fields of `train` that follow other options of a run."""
NOT_LEARNED = ("distillation", "teacher.weight", "lora.quantize_base", "lora.start")
"""Fields of `train` that no learner takes. Rollouts have no labels, so a teacher's weight is always 1."""
CHANGEABLE = [
    item.path
    for item in leaves_of(RLRecipe)
    if item.path not in [f"train.{name}" for name in (*FOLLOWS, *NOT_LEARNED)]
]


@configuration(panel=CLUSTER)
class RLOptions:
    """The options that only this command has."""

    recipe: Annotated[str, Flag(panel=MODEL)] = "tiny-rl"
    """The recipe: its name, or your own recipe as FILE.py:NAME."""
    config: Annotated[Path | None, Flag(panel=MODEL, metavar="FILE", opened_by="job")] = None
    """A YAML or JSON file of changes to the recipe; options override the file."""
    engines: Annotated[int, Ge(1)] = 1
    """Engines that make rollouts."""
    learners: Annotated[int, Ge(1)] = 1
    """Workers of the learner."""
    tensor_parallel: Annotated[int, Ge(1)] = 1
    """Ranks of each engine: GPUs of one node, or processes without GPUs."""
    device: Annotated[Device | None, Flag(default="GPUs, if there are any")] = None
    """The device of engines and learners."""
    share: bool = False
    """An engine and a learner share a device, and the engine sleeps while the learner works."""
    local: bool = False
    """Run in this process alone, without Ray."""


def run(
    own: RLOptions,
    changes: Annotated[dict[str, Any], Changes(RLRecipe, *CHANGEABLE, default="the recipe's")],
    engine: Annotated[EngineConfig, Fields("max_rows", "num_pages")],
    place: Annotated[RayOptions, Fields("storage", "run_name", "resume", "max_failures")],
    log: Annotated[RunOptions, Fields("log_to")],
    *,
    isolation: IsolationOption = "any",
) -> None:
    """Train by reinforcement learning: on the cluster of RAY_ADDRESS, or on a cluster that the command starts.

    The run's folder holds rollouts, rewards, numbers, pages of samples, and at the end the model.
    """
    from actors.training.run import check_name
    from mbd_core.evaluation.sandbox.processes import describe_isolation
    from mbd_core.rl.folder import FAILURE, RunFolder, check_run
    from mbd_core.rl.loop import RLRun
    from mbd_core.rl.rollouts import RolloutPlan
    from mbd_core.storage.errors import TakenOver

    if own.local and place.max_failures != RayOptions.max_failures:
        raise ValueError("--local runs without workers that could be lost; leave --max-failures out")
    recipe = chosen_recipe(own, changes)
    targets = chosen_targets(log.log_to)
    plan = RolloutPlan.of(recipe, engine)
    if isolation == "required":
        describe_isolation("required")
    name = recipe.name if place.run_name is None else place.run_name
    check_name(name)
    storage = Folder.at(os.path.expanduser(place.storage))
    run_folder = storage / name
    if not run_folder.is_shared:
        raise ValueError(
            f"{run_folder} lies in the memory of one process, and ends with it; give a path or another URL"
        )
    check_run(run_folder, recipe, resume=place.resume)
    with ExitStack() as stack:
        executor = stack.enter_context(start_executor(plan, own, storage, isolated=isolation == "required"))
        folder = stack.enter_context(RunFolder(run_folder, recipe, resume=place.resume))
        run_folder.remove(FAILURE)  # of an earlier try
        loop = RLRun(plan, folder, executor, log_targets=default_targets()[0] if targets is None else targets)
        try:
            model = loop.run(max_failures=0 if own.local else place.max_failures)
        except TakenOver:
            raise
        except (RuntimeError, OSError) as error:
            sentence = f"the run failed: {error}; it lies in {run_folder}; go on with the same command and --resume"
            with suppress(OSError):  # it may be the storage that failed
                run_folder.write_text(FAILURE, "".join(traceback.format_exception(error)))
                sentence += f"; the traceback is in {FAILURE} there"
            raise RuntimeError(sentence) from error
    host = "" if own.local or run_folder.is_remote else f" on {socket.gethostname()}"
    print(f"model: {model}\nnumbers, rollouts and samples: {run_folder}{host}")


def chosen_recipe(own: RLOptions, changes: dict[str, Any]) -> RLRecipe:
    """The recipe with the changes of file and command line; its model is a shipped name, an absolute path or a URL.

    An adapter's `rank` sets its `alpha`, and its dropout to 0, unless these are given too.
    """
    from actors.training.run import named_base

    recipe = recipe_in_file(own.recipe, RLRecipe) if ".py" in own.recipe else rl_recipe_named(own.recipe)
    values = merge_fields({} if own.config is None else read_config(own.config), changes)
    of_train = values.get("train") or {}
    for name in FOLLOWS:
        if name in of_train:
            raise ValueError(f"train.{name} follows other options: give {FOLLOWS[name]} instead")
    lora = of_train.get("lora")
    if isinstance(lora, Mapping) and "rank" in lora:
        values = merge_fields({"train": {"lora": {"alpha": lora["rank"], "dropout": 0.0}}}, values)
    recipe = changed(recipe, values, noun=FIELD)
    check_schedule(recipe.train, of_train)
    recipe.held_out.check_sweeps(values.get("held_out") or ())
    recipe.check_learners(own.learners)
    return changed(recipe, {"model": named_base(recipe.model)})


@contextmanager
def start_executor(plan: RolloutPlan, own: RLOptions, storage: Folder, *, isolated: bool) -> Iterator[RLExecutor]:
    """The executor of a run: this process alone, or the connected cluster.

    The cluster's machines must find the folder of runs and the model. Raises the errors of `known_paths`.
    """
    recipe = plan.recipe
    if own.local:
        import torch

        from mbd_core.rl.executor import LocalRLExecutor

        given = {"engines": own.engines, "learners": own.learners, "device": own.device}
        usual = {"engines": 1, "learners": 1, "device": None}
        if different := [name for name in given if given[name] != usual[name]]:
            raise ValueError(f"--local is one engine and one learner in this process; leave --{different[0]} out")
        on_gpu = torch.cuda.is_available()
        local = LocalRLExecutor(
            recipe, plan.engine, tensor_parallel=own.tensor_parallel, sleeps=own.share or on_gpu, isolated=isolated
        )
        try:
            yield local
        finally:
            local.close()
        return

    # Ray takes seconds to import: bad input is refused before that
    from actors.paths import known_paths, model_paths, teacher_paths
    from actors.rl.executor import Layout, RayRLExecutor
    from cluster.local import connect, disconnect

    is_ours = connect(num_cpus=max(4, own.engines * own.tensor_parallel + own.learners + 2))
    try:
        layout = Layout.of(
            recipe,
            engines=own.engines,
            learners=own.learners,
            tensor_parallel=own.tensor_parallel,
            device=own.device,
            shares=own.share,
        )
        read = model_paths("--model", recipe.model) + teacher_paths(recipe.train.teacher)
        with (
            known_paths(read, [("--storage", storage)], bundle=layout.bundle) as paths,
            RayRLExecutor(recipe, plan.engine, layout, isolated=isolated, paths=paths) as executor,
        ):
            yield executor
    finally:
        if is_ours:
            disconnect()


SHOWN = [
    item.path
    for item in command_options(run)
    if not item.path.startswith("train.")
    or item.path.startswith(("train.lora.", "train.teacher."))
    or item.path.removeprefix("train.") in OF_TRAIN
]

main = command(
    run,
    shown=SHOWN,
    epilog=f"Recipes: {', '.join(sorted(RL_RECIPES))}.",
    go_on="the same command with --resume goes on from the last checkpoint",
)

if __name__ == "__main__":
    sys.exit(main())
