"""The settings in a report: what a reader needs to judge the numbers or to repeat the sweep."""

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.evaluation.sweep_plan import Sweep

# Those on which tokens, grades and their speed depend.
VERSIONS = ("mbd-cluster", "torch", "ray", "transformers", "math-verify", "numpy")


def sweep_settings(
    sweep: Sweep, *, engine: EngineConfig, num_actors: int, num_cpus: float, on_gpu: bool
) -> dict[str, Any]:
    """The settings by name. `engine` configures each of `num_actors` engines, on GPUs or not, on a cluster with
    `num_cpus` CPUs."""
    endpoints = {
        name: {"url": one.url, "model": one.model, "ours": one.is_ours} for name, one in sweep.endpoints.items()
    }
    return {
        "models": {
            name: _model_settings(model_folder(folder), on_gpu=on_gpu) for name, folder in sweep.models.items()
        },
        **({"endpoints": endpoints} if endpoints else {}),
        "methods": {name: json.dumps(fields) for name, fields in sweep.methods.items()},
        "grid": sweep.grid,
        "tasks": {
            problem_set.task.name: {
                "rule": problem_set.task.rule,
                "source": problem_set.source,
                "n": len(problem_set.problems),
                "sha256": problem_set.sha256,
                **sweep.asked[problem_set.task.name].record,
            }
            for problem_set in sweep.problem_sets
        },
        "seed": sweep.seed,
        "recipe": f"{sweep.recipe.name} ({sweep.recipe.source})",
        **({"recipe_remark": sweep.recipe.remark} if sweep.recipe.remark else {}),
        "engine": asdict(engine),
        "actors": num_actors,
        "tensor_parallel": sweep.tensor_parallel,
        "notes": sweep.notes,
        "machines": [machine_text(num_cpus, ranks=sweep.tensor_parallel)],
        "versions": {name: version(name) for name in VERSIONS},
    }


def machine_text(num_cpus: float, *, ranks: int) -> str:
    """The machine of the job, on a cluster with `num_cpus` CPUs."""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores; Ray sees {num_cpus:g} CPUs, "
        f"each engine runs on {ranks}"
    )


def _model_settings(folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    """A model's size, training and dtype, without which its accuracy says little: a CPU computes in float32."""
    contents = read_folder(folder)
    stored = str(contents.stored_dtype).removeprefix("torch.")
    computed = stored if on_gpu else "float32"
    return {
        "parameters": f"{contents.config.num_parameters / 1e6:.3g}M",
        "block_size": contents.config.block_size,
        "trained": contents.defaults.get("trained_with", "unknown"),
        "dtype": computed if computed == stored else f"{computed} (stored as {stored})",
    }
