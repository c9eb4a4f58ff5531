"""Plans a sweep from its loaded inputs: refusals, each model's configurations, notes for a reader."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mbd_core.batch.inputs import NUM_DRAWS
from mbd_core.batch.rows import LIKELIHOOD
from mbd_core.checkpoint.folder import edit_note
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import MULTI, NAMED_METHODS, SINGLE
from mbd_core.evaluation.sweep.endpoints.endpoint import ENDPOINT_DEFAULT, Endpoint
from mbd_core.evaluation.sweep.grid import Variant, plan_variants
from mbd_core.evaluation.sweep.loading import SweepInputs, SweptModel
from mbd_core.evaluation.sweep.sweep import Sweep
from mbd_core.evaluation.tasks.asking import AskedTask, check_positions
from mbd_core.evaluation.tasks.kinds import function_calls


def plan_sweep(inputs: SweepInputs) -> Sweep:
    """The sweep of loaded inputs. Raises `ValueError`, one sentence, for inputs that cannot be honoured.

    It computes on values alone: first what is refused, then the notes, then every model's configurations.
    """
    options = inputs.options
    _check_draws(inputs)
    _check_scores(inputs)
    _check_names(inputs)
    names = {model.name: _method_names(inputs, model.contents.config.prefix_methods) for model in inputs.models}
    names |= {endpoint.name: _method_names(inputs) for endpoint in options.endpoints}
    notes = {endpoint.name: endpoint_notes(endpoint, inputs.tasks) for endpoint in options.endpoints}
    notes |= {model.name: check_positions(model.name, model.positions, inputs.tasks) for model in inputs.models}
    variants = {model.name: _model_variants(model, inputs, names[model.name]) for model in inputs.models}
    variants |= {
        endpoint.name: _endpoint_variants(endpoint, inputs, names[endpoint.name]) for endpoint in options.endpoints
    }
    for model in inputs.models:
        decodings = [variant.decoding for variant in variants[model.name] if variant.decoding]
        edits = (edit_note(model.name, model.contents.defaults, decoding) for decoding in decodings)
        notes[model.name] += dict.fromkeys(note for note in edits if note is not None)
    decodings = [variant.decoding for variant in itertools.chain.from_iterable(variants.values()) if variant.decoding]
    num_slots = max((decoding.buffer_size for decoding in decodings), default=options.engine.num_slots)
    return Sweep(
        models={model.name: model.place for model in inputs.models},
        endpoints={endpoint.name: endpoint for endpoint in options.endpoints},
        variants=variants,
        tasks=inputs.tasks,
        grid=options.grid,
        methods={
            name: inputs.methods[name]
            for name in dict.fromkeys(itertools.chain.from_iterable(names.values()))
            if name in inputs.methods
        },
        recipe=inputs.recipe,
        seed=options.seed,
        engine=replace(options.engine, buffer_size=num_slots),
        tensor_parallel=options.tensor_parallel,
        notes=[note for name in variants for note in notes[name]],
        samples=options.samples,
        sampling=inputs.sampling,
    )


def _check_draws(inputs: SweepInputs) -> None:
    """Raises `ValueError` for several greedy answers to a problem, and for a temperature that a task does not take."""
    options, temperature = inputs.options, inputs.sampling.temperature
    if options.samples > 1 and not inputs.sampling.draws:
        raise ValueError(f"--samples {options.samples} at temperature 0 are all alike; give --temperature above 0")
    for task in inputs.tasks:
        if task.temperature not in (0.0, temperature):
            raise ValueError(
                f"task '{task.name}' draws at temperature {task.temperature}; give --temperature {task.temperature}"
            )


def _check_scores(inputs: SweepInputs) -> None:
    """Raises `ValueError` for an option that tasks of log-likelihoods do not take, and for an option that only they
    take."""
    options, scored_tasks = inputs.options, [task for task in inputs.tasks if task.inputs.scores]
    if not scored_tasks:
        if options.mc_num != NUM_DRAWS:
            raise ValueError("--mc-num is for tasks that compare log-likelihoods, and no task here does: leave it out")
        return
    refusals = {
        "--endpoint": "an endpoint gives no log-likelihoods of a diffusion model" if options.endpoints else "",
        "--samples": "nothing is drawn" if options.samples > 1 else "",
        "--tensor-parallel": "these need a model on a single rank" if options.tensor_parallel > 1 else "",
    }
    if len(scored_tasks) == len(inputs.tasks) and (options.methods or options.definitions or options.grid):
        refusals["--methods, --method and --grid"] = "no decoder changes them"
    for option, reason in refusals.items():
        if reason:
            raise ValueError(
                f"task '{scored_tasks[0].name}' compares log-likelihoods, and {reason}: leave {option} out"
            )


def _check_names(inputs: SweepInputs) -> None:
    """Raises `ValueError` for a name that two models have, a model without the chat template that prompts need, and
    methods that no endpoint takes."""
    options = inputs.options
    if ENDPOINT_DEFAULT in (options.methods or ()) and options.models:
        raise ValueError(f"method '{ENDPOINT_DEFAULT}' is an endpoint's; --models are decoded here, by other methods")
    places: dict[str, str] = {}
    needs_chat = any(task.inputs.prompt.wording.needs_chat for task in inputs.tasks)
    for given, model in zip(options.models, inputs.models, strict=True):
        if model.name in places:
            raise ValueError(
                f"two models are named '{model.name}': {places[model.name]} and {given}; rename one folder"
            )
        places[model.name] = model.place
        if needs_chat and not model.contents.tokenizer.chat_template:
            raise ValueError(f"model '{model.name}' has a tokenizer without a chat template, which the prompts need")
    for endpoint in options.endpoints:
        if endpoint.name in places:
            raise ValueError(f"--endpoint {endpoint.name}: two models are named so; give it another name")
        places[endpoint.name] = endpoint.url
    asks_methods = {*(options.methods or ()), *options.definitions, *inputs.grid} - {ENDPOINT_DEFAULT}
    if not inputs.models and asks_methods and not any(endpoint.is_ours for endpoint in options.endpoints):
        raise ValueError(
            f"endpoint '{options.endpoints[0].name}' takes no decoding fields, so its only method is "
            f"{ENDPOINT_DEFAULT}; leave out --methods, --method and --grid"
        )


def endpoint_notes(endpoint: Endpoint, tasks: Sequence[AskedTask]) -> list[str]:
    """Notes for a reader on an endpoint's numbers. Raises `ValueError` if it cannot hold a task's answers."""
    for task in tasks:
        if task.name.startswith(f"{function_calls.FREE}:"):
            raise ValueError(
                f"task '{task.name}' asks for calls without a grammar, and endpoint '{endpoint.name}' decides itself "
                f"whether it uses a grammar: give {task.name.replace(function_calls.FREE, function_calls.NAME)}"
            )
        if endpoint.positions is not None and task.inputs.max_tokens >= endpoint.positions:
            raise ValueError(
                f"endpoint '{endpoint.name}' holds {endpoint.positions} positions, prompt and answer together, and an "
                f"answer of {task.name} may have {task.inputs.max_tokens} tokens; give --max-tokens"
            )
    note = "" if endpoint.is_ours else "; it says neither forwards nor TPF, and decodes as it likes"
    has_temperature = "temperature" not in endpoint.form.left_out
    asked = "asked at the sweep's temperature" if has_temperature else "asked without a temperature"
    return [
        f"model '{endpoint.name}' is '{endpoint.model}' at {endpoint.url}, {asked}{note}",
        *(f"endpoint '{endpoint.name}' {difference}" for difference in endpoint.form.notes()),
    ]


def _method_names(inputs: SweepInputs, prefix_methods: Sequence[str] = ()) -> Sequence[str]:
    """The methods of a model: the methods asked for, else the model's own methods and the defined methods."""
    if inputs.options.methods is not None:
        return inputs.options.methods
    defined_methods = [name for name in inputs.methods if name not in NAMED_METHODS]
    return [*(prefix_methods or (SINGLE, MULTI)), *defined_methods]


def _model_variants(model: SweptModel, inputs: SweepInputs, names: Sequence[str]) -> list[Variant]:
    """The configurations of one model; `ValueError` if the model does not support them."""
    config, defaults = model.contents.config, model.contents.defaults
    variants: list[Variant] = []
    if not inputs.tasks or not all(task.inputs.scores for task in inputs.tasks):
        variants = plan_variants(
            inputs.grid, names, methods=inputs.methods, defaults=defaults, block_size=config.block_size
        )
    for variant in variants:
        assert variant.decoding is not None
        is_full = variant.decoding.canvas is not None or variant.decoding.prompt_attention == "full"
        if is_full and config.attention != "full":
            raise ValueError(
                f"method '{variant.method}' needs a model with full attention; '{model.name}' has {config.attention}"
            )
        if variant.decoding.verify is not None and variant.decoding.verify.draft_model:
            if inputs.options.engine.draft_model is None:
                raise ValueError(f"method '{variant.method}' needs a model that drafts: name it by --draft-model")
            continue
        if variant.decoding.verify is not None and config.attention == "full":
            raise ValueError(
                f"method '{variant.method}' needs a model that attends in blocks; '{model.name}' attends in full"
            )
        method, fitting = variant.decoding.prefix_method, config.ar_methods
        if method not in fitting if config.prefix_methods else method not in (None, *fitting):
            by = f"decodes with {', '.join(fitting)}" if fitting else "stores no keys by causal rows"
            raise ValueError(f"method '{variant.method}' does not fit '{model.name}', which {by}")
    if any(task.inputs.scores for task in inputs.tasks):
        # the model scores texts under its own decoding, and the same decoding checks them greedily
        if config.attention not in ("full", "causal") and config.shift_logits:
            raise ValueError(
                f"log-likelihoods of model '{model.name}', which attends in blocks and shifts logits, are not offered"
            )
        own_decoding = decoding_config(defaults, {}, block_size=config.block_size)
        variants.append(Variant(method=LIKELIHOOD, decoding=own_decoding))
    return variants


def _endpoint_variants(endpoint: Endpoint, inputs: SweepInputs, names: Sequence[str]) -> list[Variant]:
    """An endpoint's configurations. An endpoint of another project has its default alone.

    Raises `ValueError` as `plan_variants` does, and for a buffer_size that the endpoint does not take.
    """
    default = Variant(method=ENDPOINT_DEFAULT, decoding=None)
    if endpoint.defaults is None:
        return [default]
    own_names = [name for name in names if name != ENDPOINT_DEFAULT]
    variants = [default] if ENDPOINT_DEFAULT in names else []
    if own_names:
        block_size = endpoint.defaults["block_size"]
        variants += plan_variants(
            inputs.grid, own_names, methods=inputs.methods, defaults=endpoint.defaults, block_size=block_size
        )
    for variant in variants:
        if variant.decoding and endpoint.slots and variant.decoding.buffer_size > endpoint.slots:
            raise ValueError(
                f"method '{variant.method}' with buffer_size={variant.decoding.buffer_size} exceeds the "
                f"{endpoint.slots} slots of endpoint '{endpoint.name}'"
            )
    return variants
