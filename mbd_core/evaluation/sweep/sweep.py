"""A sweep: every model's configurations on every task's problems, its rows, and its settings in a report."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mbd_core.batch.rows import LIKELIHOOD, DrawnColumns, PlannedRow
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.endpoints.endpoint import Endpoint
from mbd_core.evaluation.sweep.grid import Methods, Variant
from mbd_core.evaluation.tasks.asking import AskedTask
from mbd_core.evaluation.tasks.recipes import Recipe
from mbd_core.storage.models import fetch_model

# The packages on which tokens, grades and their speed depend.
REPORTED_VERSIONS = ("mbd-cluster", "torch", "ray", "transformers", "math-verify", "numpy")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All samples of a sweep: every model's variants on every task's problems.

    models    name -> folder, an argument of `model_folder`
    endpoints name -> endpoint, for the models that are asked over HTTP
    tasks     the problems, and the models' input for each
    methods   the decoding fields of each method in the sweep
    notes     remarks for a reader of the numbers
    """

    models: dict[str, str]
    endpoints: dict[str, Endpoint]
    variants: dict[str, list[Variant]]
    tasks: Sequence[AskedTask]
    grid: str
    methods: Methods
    recipe: Recipe
    seed: int
    engine: EngineConfig
    tensor_parallel: int
    notes: list[str]
    samples: int = 1
    sampling: Sampling = Sampling()

    @property
    def draws(self) -> dict[str, Any]:
        """The fields in records that say how answers are drawn; none for a greedy sweep."""
        if not self.sampling.draws:
            return {}
        return {"samples": self.samples, "temperature": self.sampling.temperature, "top_p": self.sampling.top_p}

    @property
    def draft_folder(self) -> Path | None:
        """The folder of the model that drafts for all other models, `None` without a draft model."""
        draft = self.engine.draft_model
        return None if draft is None else model_folder(fetch_model(draft))

    @property
    def num_samples(self) -> int:
        return self.samples * sum(
            len(task.problems) * len(self.variants_on(model, task))
            for model, task in itertools.product(self.variants, self.tasks)
        )

    def variants_on(self, model: str, task: AskedTask) -> list[Variant]:
        """The configurations of a model on a task: the configuration of log-likelihoods, or all other
        configurations."""
        return [variant for variant in self.variants[model] if (variant.method == LIKELIHOOD) == task.inputs.scores]

    def rows(self) -> Iterator[PlannedRow]:
        """One row for each sample (`PLANNED_COLUMNS`), ordered by model, problem, configuration and draw."""
        sample = 0
        for model, task in itertools.product(self.variants, self.tasks):
            variants = self.variants_on(model, task)
            for number, problem in enumerate(task.problems):
                for variant, draw in itertools.product(variants, range(self.samples)):
                    yield {
                        "sample": sample,
                        "model": model,
                        "method": variant.method,
                        "task": task.name,
                        "problem_id": problem.problem_id,
                        "prompt": problem.prompt,
                        "reference": problem.reference,
                        "entry_point": problem.entry_point,
                        "config": variant.config,
                        **task.inputs.columns(number),
                        "seed": self.seed,
                        **self._draw_fields(task.name, problem.problem_id, variant.config, draw),
                    }
                    sample += 1

    def _draw_fields(self, task: str, problem: str, config: str, draw: int) -> DrawnColumns:
        """The columns `DRAWN_COLUMNS` of a row. A row's noise depends only on the row, not on other rows."""
        if not self.sampling.draws:
            return {}
        subject = json.dumps([self.seed, task, problem, config, draw])
        seed = int.from_bytes(hashlib.sha256(subject.encode()).digest()[:4], "little")
        fields = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "seed": seed}
        return {"draw": draw, "sampling": json.dumps(fields)}

    def settings(self, *, engine: EngineConfig, num_actors: int, on_gpu: bool, machine: str) -> dict[str, Any]:
        """The facts that a reader needs to judge the numbers or to repeat the sweep, by name. `engine` configures each
        of the `num_actors` engines; `machine` says where they run."""
        endpoints = {
            name: {"url": endpoint.url, "model": endpoint.model, "ours": endpoint.is_ours}
            for name, endpoint in self.endpoints.items()
        }
        draft = self.draft_folder
        return {
            "models": {
                name: _model_settings(model_folder(folder), on_gpu=on_gpu) for name, folder in self.models.items()
            },
            **({} if draft is None else {"draft model": {draft.name: _model_settings(draft, on_gpu=on_gpu)}}),
            **({"endpoints": endpoints} if endpoints else {}),
            "methods": {name: json.dumps(fields) for name, fields in self.methods.items()},
            "grid": self.grid,
            "tasks": {task.name: task.record for task in self.tasks},
            "seed": self.seed,
            **self.draws,
            "recipe": f"{self.recipe.name} ({self.recipe.source})",
            **({"recipe_remark": self.recipe.remark} if self.recipe.remark else {}),
            "engine": asdict(engine),
            "actors": num_actors,
            "tensor_parallel": self.tensor_parallel,
            "notes": self.notes,
            "machines": [machine],
            "versions": {name: version(name) for name in REPORTED_VERSIONS if name != "ray" or find_spec(name)},
        }


def _model_settings(folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    """A model's size, training and dtype, without which its accuracy says little: a CPU computes in float32."""
    contents = read_folder(folder)
    dtype = str(contents.stored_dtype).removeprefix("torch.")
    compute_dtype = dtype if on_gpu else "float32"
    return {
        "parameters": f"{contents.config.num_parameters / 1e6:.3g}M",
        "block_size": contents.config.block_size,
        "trained": contents.defaults.get("trained_with", "unknown"),
        "dtype": compute_dtype if compute_dtype == dtype else f"{compute_dtype} (stored as {dtype})",
    }
