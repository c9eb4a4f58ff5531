"""The plan of a sweep, loaded and checked before any computation: models, configurations, problems, engine."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mbd_core.batch.inputs import NUM_DRAWS
from mbd_core.batch.rows import LIKELIHOOD, PROBLEM_COLUMNS
from mbd_core.checkpoint.folder import ModelFolder, edit_note, read_folder, with_method
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import MULTI, NAMED_METHODS, SINGLE
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.best_folder import author_defaults
from mbd_core.evaluation.sweep.endpoint import ENDPOINT_DEFAULT, Endpoint
from mbd_core.evaluation.sweep.grid import Grid, Methods, Variant, parse_grid, parse_methods, plan_variants
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.tasks.asking import TaskInputs, ask_tasks, check_positions
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.harness_requests import load_harness_problems
from mbd_core.evaluation.tasks.kinds.harness import HARNESS_PREFIX
from mbd_core.evaluation.tasks.problems import ProblemSet, load_problems
from mbd_core.evaluation.tasks.recipes import Recipe, find_recipe
from mbd_core.models.model_config import ModelConfig

# The packages on which tokens, grades and their speed depend.
REPORTED_VERSIONS = ("mbd-cluster", "torch", "ray", "transformers", "math-verify", "numpy")

# The configurations with which a sweep asks an endpoint, and what a reader must know of its numbers.


def endpoint_variants(endpoint: Endpoint, grid: Grid, names: Sequence[str], methods: Methods) -> list[Variant]:
    """An endpoint's configurations: those of the methods if it is one of this project, else its default alone.

    Raises `ValueError` as `plan_variants` does, and for a buffer_size that the endpoint does not take.
    """
    default = Variant(method=ENDPOINT_DEFAULT, decoding=None)
    if endpoint.defaults is None:
        return [default]
    own_names = [name for name in names if name != ENDPOINT_DEFAULT]
    variants = [default] if ENDPOINT_DEFAULT in names else []
    if own_names:
        block_size = endpoint.defaults["block_size"]
        variants += plan_variants(grid, own_names, methods=methods, defaults=endpoint.defaults, block_size=block_size)
    for variant in variants:
        if variant.decoding and endpoint.slots and variant.decoding.buffer_size > endpoint.slots:
            raise ValueError(
                f"method '{variant.method}' with buffer_size={variant.decoding.buffer_size} exceeds the "
                f"{endpoint.slots} slots of endpoint '{endpoint.name}'"
            )
    return variants


def check_default_alone(endpoints: Sequence[Endpoint], names: Sequence[str]) -> None:
    """Raise `ValueError` if methods or a grid are asked for and nothing but endpoints without any is there."""
    if set(names) - {ENDPOINT_DEFAULT} and not any(endpoint.is_ours for endpoint in endpoints):
        raise ValueError(
            f"endpoint '{endpoints[0].name}' takes no decoding fields, so its only method is {ENDPOINT_DEFAULT}; "
            "leave out --methods, --method and --grid"
        )


def endpoint_notes(endpoint: Endpoint, inputs: Mapping[str, TaskInputs]) -> Sequence[str]:
    """What a reader must know of numbers from an endpoint; `ValueError` for answers that it cannot hold."""
    for task, of_task in inputs.items():
        if endpoint.positions is not None and of_task.max_tokens >= endpoint.positions:
            raise ValueError(
                f"endpoint '{endpoint.name}' holds {endpoint.positions} positions, prompt and answer together, and an "
                f"answer of {task} may have {of_task.max_tokens} tokens; give --max-tokens"
            )
    note = "" if endpoint.is_ours else "; it says neither forwards nor TPF, and decodes as it likes"
    has_temperature = "temperature" not in endpoint.form.left_out
    asked = "asked at the sweep's temperature" if has_temperature else "asked without a temperature"
    return [
        f"model '{endpoint.name}' is '{endpoint.model}' at {endpoint.url}, {asked}{note}",
        *(f"endpoint '{endpoint.name}' {difference}" for difference in endpoint.form.notes()),
    ]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All samples of a sweep: every model's variants on every task's problems.

    models    name -> folder, an argument of `model_folder`
    endpoints name -> endpoint, for the models that are asked over HTTP
    inputs    what models are given for each task, by its name
    methods   the decoding fields of each method in the sweep
    notes     remarks for a reader of the numbers
    """

    models: dict[str, str]
    endpoints: dict[str, Endpoint]
    variants: dict[str, list[Variant]]
    problem_sets: list[ProblemSet]
    grid: str
    methods: Methods
    recipe: Recipe
    inputs: Mapping[str, TaskInputs]
    seed: int
    engine: EngineConfig
    tensor_parallel: int
    notes: list[str]
    samples: int = 1
    sampling: Sampling = Sampling()

    @property
    def draws(self) -> dict[str, Any]:
        """How answers are drawn, as records say it; nothing of a greedy sweep."""
        if not self.sampling.draws:
            return {}
        return {"samples": self.samples, "temperature": self.sampling.temperature, "top_p": self.sampling.top_p}

    @property
    def num_samples(self) -> int:
        return self.samples * sum(
            len(problem_set.problems) * len(self.variants_on(model, problem_set.task.name))
            for model, problem_set in itertools.product(self.variants, self.problem_sets)
        )

    def variants_on(self, model: str, task: str) -> list[Variant]:
        """The configurations of a model on a task: that of log-likelihoods, or all others."""
        scores = self.inputs[task].scores
        return [variant for variant in self.variants[model] if (variant.method == LIKELIHOOD) == scores]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each sample (`PLANNED_COLUMNS`), ordered by model, problem, configuration and draw."""
        sample = 0
        for model in self.variants:
            for problem_set in self.problem_sets:
                inputs = self.inputs[problem_set.task.name]
                variants = self.variants_on(model, problem_set.task.name)
                for number, problem in enumerate(problem_set.problems):
                    for variant, draw in itertools.product(variants, range(self.samples)):
                        yield {
                            "sample": sample,
                            "model": model,
                            "method": variant.method,
                            "task": problem_set.task.name,
                            **{name: getattr(problem, name) for name in PROBLEM_COLUMNS},
                            "config": variant.config,
                            **inputs.columns(number),
                            "seed": self.seed,
                            **self._draw_fields(problem_set.task.name, problem.problem_id, variant.config, draw),
                        }
                        sample += 1

    def _draw_fields(self, task: str, problem: str, config: str, draw: int) -> dict[str, Any]:
        """The columns `DRAWN_COLUMNS` of a row: its noise depends on what it is, not on what stands beside it."""
        if not self.sampling.draws:
            return {}
        subject = json.dumps([self.seed, task, problem, config, draw])
        seed = int.from_bytes(hashlib.sha256(subject.encode()).digest()[:4], "little")
        fields = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "seed": seed}
        return {"draw": draw, "sampling": json.dumps(fields)}

    def settings(self, *, engine: EngineConfig, num_actors: int, on_gpu: bool, machine: str) -> dict[str, Any]:
        """What a reader needs to judge the numbers or to repeat the sweep, by name. `engine` configures each of
        `num_actors` engines, on GPUs or not, of which `machine` says where they run."""
        endpoints = {
            name: {"url": endpoint.url, "model": endpoint.model, "ours": endpoint.is_ours}
            for name, endpoint in self.endpoints.items()
        }
        return {
            "models": {
                name: _model_settings(model_folder(folder), on_gpu=on_gpu) for name, folder in self.models.items()
            },
            **({"endpoints": endpoints} if endpoints else {}),
            "methods": {name: json.dumps(fields) for name, fields in self.methods.items()},
            "grid": self.grid,
            "tasks": {
                problem_set.task.name: {
                    "rule": problem_set.task.grader.rule,
                    "source": problem_set.source,
                    "n": len(problem_set.problems),
                    "sha256": problem_set.sha256,
                    **self.inputs[problem_set.task.name].record,
                }
                for problem_set in self.problem_sets
            },
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


def plan_sweep(options: SweepOptions) -> Sweep:
    """Load and check everything that the options name; `ValueError` says in one sentence what is wrong."""
    tasks = [find_task(name) for name in options.tasks if not name.startswith(HARNESS_PREFIX)]
    task_names = [task.name for task in tasks]
    files = task_files(options.data, task_names, option="--data")
    examples = task_files(options.examples, task_names, option="--examples")
    recipe = find_recipe(options.recipe)
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    if options.samples > 1 and not sampling.draws:
        raise ValueError(f"--samples {options.samples} at temperature 0 are all alike; give --temperature above 0")
    prompts = [recipe.task_prompt(name) for name in task_names]
    grid, methods = parse_grid(options.grid), parse_methods(options.definitions)
    if ENDPOINT_DEFAULT in (options.methods or ()) and options.models:
        raise ValueError(f"method '{ENDPOINT_DEFAULT}' is an endpoint's; --models are decoded here, by other methods")
    own_methods = [name for name in methods if name not in NAMED_METHODS]
    method_names: list[str] = []

    def names_of(defaults: Sequence[str]) -> Sequence[str]:
        names = [*defaults, *own_methods] if options.methods is None else options.methods
        method_names.extend(name for name in names if name not in method_names)
        return names

    problem_sets = [
        load_problems(task, split=options.split, seed=options.seed, limit=options.limit, data=files.get(task.name))
        for task in tasks
    ]
    inputs = ask_tasks(problem_sets, recipe, examples=examples, max_tokens=options.max_tokens)
    for problem_set, task_inputs, generation in load_harness_problems(
        [name for name in options.tasks if name.startswith(HARNESS_PREFIX)],
        form=options.form,
        include=options.include_path and str(Path(options.include_path).resolve()),
        limit=options.limit,
        max_tokens=options.max_tokens,
        mc_num=options.mc_num,
        seed=options.seed,
    ):
        if generation.sampling.temperature not in (0.0, sampling.temperature):
            raise ValueError(
                f"task '{problem_set.task.name}' draws at temperature {generation.sampling.temperature}; "
                f"give --temperature {generation.sampling.temperature}"
            )
        problem_sets.append(problem_set)
        inputs[problem_set.task.name] = task_inputs
        prompts.append(task_inputs.prompt)
    scores, decodes = _kinds_of_work(options, inputs)
    models: dict[str, str] = {}
    variants: dict[str, list[Variant]] = {}
    notes: list[str] = []
    for model in options.models:
        folder = model_folder(model)
        name = folder.resolve().name
        if name in models:
            raise ValueError(f"two models are named '{name}': {models[name]} and {model}; rename one folder")
        models[name] = model if folder == SHIPPED / model else str(folder.resolve())
        contents = read_folder(folder)
        if any(prompt.wording.needs_chat for prompt in prompts) and not contents.tokenizer.chat_template:
            raise ValueError(f"model '{name}' has a tokenizer without a chat template, which the prompts need")
        contents = replace(contents, defaults=with_method(author_defaults(contents.defaults), contents.config))
        names = names_of(_default_methods(contents.config))
        variants[name] = (
            _model_variants(name, contents, grid, names, methods, options.tensor_parallel) if decodes else []
        )
        if scores:
            variants[name].append(_likelihood_variant(name, contents))
        notes += check_positions(name, options.engine.positions(contents.config.max_positions), inputs)
        model_notes = (
            edit_note(name, contents.defaults, variant.decoding) for variant in variants[name] if variant.decoding
        )
        notes += dict.fromkeys(note for note in model_notes if note is not None)
    num_slots = max(
        (
            variant.decoding.buffer_size
            for variant in itertools.chain.from_iterable(variants.values())
            if variant.decoding
        ),
        default=options.engine.num_slots,
    )
    if not models:
        check_default_alone(options.endpoints, [*(options.methods or ()), *options.definitions, *grid])
    for endpoint in options.endpoints:
        if endpoint.name in variants:
            raise ValueError(f"--endpoint {endpoint.name}: two models are named so; give it another name")
        variants[endpoint.name] = endpoint_variants(endpoint, grid, names_of((SINGLE, MULTI)), methods)
        notes += endpoint_notes(endpoint, inputs)
    return Sweep(
        models=models,
        endpoints={endpoint.name: endpoint for endpoint in options.endpoints},
        variants=variants,
        problem_sets=problem_sets,
        grid=options.grid,
        methods={name: methods[name] for name in method_names if name in methods},
        recipe=recipe,
        inputs=inputs,
        seed=options.seed,
        engine=replace(options.engine, buffer_size=num_slots),
        tensor_parallel=options.tensor_parallel,
        notes=notes,
        samples=options.samples,
        sampling=sampling,
    )


def _kinds_of_work(options: SweepOptions, inputs: Mapping[str, TaskInputs]) -> tuple[bool, bool]:
    """Whether tasks compare log-likelihoods, and whether tasks decode; `ValueError` for options that the former do
    not take, or that they alone take."""
    scored_tasks = [task for task, of_task in inputs.items() if of_task.scores]
    if not scored_tasks:
        if options.mc_num != NUM_DRAWS:
            raise ValueError("--mc-num is the draws of log-likelihoods, which no task here compares: leave it out")
        return False, True
    refusals = {
        "--endpoint": "an endpoint gives none of a diffusion model" if options.endpoints else "",
        "--samples": "nothing is drawn" if options.samples > 1 else "",
        "--tensor-parallel": "they need a model that is not cut among ranks" if options.tensor_parallel > 1 else "",
    }
    decodes = len(scored_tasks) < len(inputs)
    if not decodes and (options.methods or options.definitions or options.grid):
        refusals["--methods, --method and --grid"] = "no decoder changes them"
    for option, reason in refusals.items():
        if reason:
            raise ValueError(f"task '{scored_tasks[0]}' compares log-likelihoods, and {reason}: leave {option} out")
    return True, decodes


def _likelihood_variant(name: str, folder: ModelFolder) -> Variant:
    """The one configuration in which a model scores texts: its own, by which it may also decode them greedily."""
    config = folder.config
    if config.attention not in ("full", "causal") and config.shift_logits:
        raise ValueError(
            f"log-likelihoods of model '{name}', which attends in blocks and shifts logits, are not offered"
        )
    return Variant(method=LIKELIHOOD, decoding=decoding_config(folder.defaults, {}, block_size=config.block_size))


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


def _default_methods(config: ModelConfig) -> tuple[str, ...]:
    """What a model decodes with where no method is named."""
    return config.prefix_methods or (SINGLE, MULTI)


def _model_variants(
    name: str,
    folder: ModelFolder,
    grid: Grid,
    method_names: Sequence[str],
    methods: Mapping[str, Mapping[str, Any]],
    tensor_parallel: int,
) -> list[Variant]:
    """The configurations of one model; `ValueError` if the model does not support them."""
    variants = plan_variants(
        grid, method_names, methods=dict(methods), defaults=folder.defaults, block_size=folder.config.block_size
    )
    try:
        folder.config.sharded(tensor_parallel)
    except ValueError as error:
        raise ValueError(f"--tensor-parallel {tensor_parallel} cannot be honoured: model '{name}': {error}") from None
    for variant in variants:
        assert variant.decoding is not None
        is_full = variant.decoding.canvas is not None or variant.decoding.prompt_attention == "full"
        if is_full and folder.config.attention != "full":
            raise ValueError(
                f"method '{variant.method}' needs a model with full attention; '{name}' has {folder.config.attention}"
            )
        method, fitting = variant.decoding.prefix_method, folder.config.prefix_methods
        if method not in fitting if fitting else method is not None:
            by = f"decodes with {', '.join(fitting)}" if fitting else "stores no keys by causal rows"
            raise ValueError(f"method '{variant.method}' does not fit '{name}', which {by}")
    return variants


def task_files(options: Sequence[str], tasks: Sequence[str], *, option: str) -> dict[str, str]:
    """The path of each task's file, from TASK=PATH, or from PATH alone if there is one task."""
    files: dict[str, str] = {}
    for item in options:
        task, equals, path = item.partition("=")
        if not (equals and task in tasks):
            if equals and "/" not in task:
                find_task(task)
                raise ValueError(f"{option} {item}: the task '{task}' is not among --tasks {','.join(tasks)}")
            if len(tasks) > 1:
                raise ValueError(f"{option} {item}: with several tasks write TASK=PATH")
            task, path = tasks[0], item
        if task in files:
            raise ValueError(f"{option} gives task '{task}' two files: {files[task]} and {path}")
        files[task] = path
    return files
