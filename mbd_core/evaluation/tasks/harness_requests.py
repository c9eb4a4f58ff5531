"""Requests of lm-evaluation-harness's tasks, which a sweep decodes or scores.

`harness:NAME` is a task, or a group's tasks. The harness builds the requests, with the task's own examples; a sweep
decodes them, or scores their continuations where the task compares log-likelihoods. `kinds/harness.py` grades each
answer by the task's own filters and metrics.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from mbd_core.batch.inputs import ScoredTexts
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.evaluation.tasks.asking import AskedTask, TaskInputs
from mbd_core.evaluation.tasks.generation_fields import Generation, read_generation
from mbd_core.evaluation.tasks.kinds.harness import (
    HARNESS_PREFIX,
    harness_objects,
    harness_task,
    named_task,
    own_draws,
)
from mbd_core.evaluation.tasks.kinds.task import Problem
from mbd_core.evaluation.tasks.problems import ProblemSet
from mbd_core.evaluation.tasks.prompts import PromptForm, Wording
from mbd_core.evaluation.tasks.recipes import TaskPrompt

FEW_SHOT_SEED = 1234  # of the harness


def load_harness_problems(
    names: Sequence[str],
    *,
    form: PromptForm,
    include: str | None,
    limit: int | None,
    max_tokens: int | None,
    mc_num: int,
    seed: int,
) -> list[AskedTask]:
    """The named tasks, and the tasks of named groups, with a model's inputs. A log-likelihood has `mc_num` draws, by
    `seed`.

    `include` is a folder of task files. Raises `ValueError` for a task that is not known, cannot be loaded, or asks
    for more than one greedy or drawn answer to a document.
    """
    groups_of: dict[str, list[str]] = {}
    for name in (name.removeprefix(HARNESS_PREFIX) for name in names):
        objects = harness_objects(name, include)
        for task_name in objects["tasks"]:
            groups_of.setdefault(task_name, []).extend([name] if name in objects["groups"] else [])
    asked_tasks = []
    for task_name, groups in groups_of.items():
        task = _built_task(task_name, include, form=form, limit=limit)
        if task.OUTPUT_TYPE == "generate_until":
            asked_tasks.append(_decoded_task(task, groups, form=form, include=include, max_tokens=max_tokens))
        else:
            asked_tasks.append(_scored_task(task, groups, form=form, include=include, draws=mc_num, seed=seed))
    return asked_tasks


def _built_task(name: str, include: str | None, *, form: PromptForm, limit: int | None) -> Any:
    """A task with its requests. Raises `ValueError`, with the reason, if the task is not offered."""
    task, label = harness_task(name, include), f"{HARNESS_PREFIX}{name}"
    if task.OUTPUT_TYPE not in ("generate_until", "multiple_choice", "loglikelihood"):
        raise ValueError(
            f"task '{label}' is of the kind {task.OUTPUT_TYPE}, the perplexity of whole documents, which a diffusion "
            "model does not give here"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"task '{label}' runs programs outside any sandbox; use this project's task instead")
    if task.config.repeats != 1:
        raise ValueError(
            f"task '{label}' asks {task.config.repeats} times and votes by itself; take its single form and --samples"
        )
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": form == "turns", "chat_template": _messages}
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)  # each time: the same examples however often a process plans
    with own_draws():
        task.build_all_requests(limit=limit, tokenizer_name="sweep", **(chat if form != "plain" else {}))
    return task


def _decoded_task(
    task: Any, groups: Sequence[str], *, form: PromptForm, include: str | None, max_tokens: int | None
) -> AskedTask:
    """A task whose answers are decoded, one to a document."""
    arguments = [instance.args for instance in task.instances]
    generation = read_generation(arguments[0][1])
    if generation.decoding:
        raise ValueError(
            f"task '{HARNESS_PREFIX}{task.config.task}' asks for {', '.join(generation.decoding)}, which is no field "
            "of a sweep"
        )
    problem_set = _problem_set(
        task,
        [(instance, context) for instance, (context, _) in zip(task.instances, arguments, strict=True)],
        groups,
        include,
    )
    inputs = TaskInputs(
        prompt=_prompt(task, form, generation),
        inputs=tuple(json.dumps(context) if form == "plain" else context for context, _ in arguments),
        max_tokens=generation.max_tokens if max_tokens is None else max_tokens,
        may_shorten=max_tokens is None,
    )
    return AskedTask(problem_set=problem_set, inputs=inputs, temperature=generation.sampling.temperature)


def _scored_task(
    task: Any, groups: Sequence[str], *, form: PromptForm, include: str | None, draws: int, seed: int
) -> AskedTask:
    """A task that compares log-likelihoods: to each document some continuations, of one context or of several."""
    requests: dict[int, list[Any]] = {}
    for instance in task.instances:
        requests.setdefault(instance.doc_id, []).append(instance)
    firsts, inputs = [], []
    # Greedy decoding takes many forwards, so it is asked for only where the task's numbers depend on it.
    greedy = (
        task.OUTPUT_TYPE == "loglikelihood"
        or "exact_match" in task._metric_fn_list
        or callable(task.config.process_results)
    )
    for instances in requests.values():
        contexts = list(dict.fromkeys(instance.args[0] for instance in instances))
        scored_texts = ScoredTexts(
            contexts=[context if form == "plain" or not context else json.loads(context) for context in contexts],
            pairs=[(contexts.index(instance.args[0]), instance.args[1]) for instance in instances],
            draws=draws,
            seed=seed,
            greedy=greedy,
        )
        firsts.append((instances[0], contexts[0]))
        inputs.append(scored_texts.as_json())
    generation = Generation(max_tokens=0, stop=(), sampling=Sampling(), decoding={})
    task_inputs = TaskInputs(
        prompt=_prompt(task, form, generation), inputs=tuple(inputs), max_tokens=0, may_shorten=False, scores=True
    )
    return AskedTask(problem_set=_problem_set(task, firsts, groups, include), inputs=task_inputs)


def _source(task: Any) -> str:
    return f"lm-evaluation-harness {version('lm_eval')}, task {task.config.task}"


def _problem_set(
    task: Any, asked: Sequence[tuple[Any, str]], groups: Sequence[str], include: str | None
) -> ProblemSet:
    """The documents of the task as problems; each with a request of the harness, and its context."""
    label, source = f"{HARNESS_PREFIX}{task.config.task}", _source(task)
    problems = tuple(
        Problem(
            problem_id=f"{label}/{instance.doc_id}",
            prompt=context,
            reference=json.dumps(
                {
                    "target": str(task.doc_to_target(instance.doc)),
                    "doc_id": instance.doc_id,
                    "include": include,
                    "by": source,
                    **_document(instance.doc),
                    **({"groups": groups} if groups else {}),
                }
            ),
        )
        for instance, context in asked
    )
    return ProblemSet(task=named_task(label), source=source, problems=problems)


def _document(doc: Any) -> dict[str, Any]:
    """The document as JSON, so that every process grades by the same choices, which some tasks shuffle anew. A
    document that is no JSON is read again where it is graded."""
    try:
        return {"doc": doc} if json.loads(json.dumps(doc)) == doc else {}
    except (TypeError, ValueError):
        return {}


def _prompt(task: Any, form: PromptForm, generation: Generation) -> TaskPrompt:
    source = _source(task)
    return TaskPrompt(
        wording=Wording(form=form),
        num_examples=task.config.num_fewshot or 0,
        max_tokens=generation.max_tokens,
        stop=generation.stop,
        source=source,
        extraction="the task's own filters and metrics",
        text_by=source,
    )


def _messages(history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat as a sweep's `input` holds it, for the template of each model."""
    if not add_generation_prompt:
        raise ValueError("the task begins the assistant's turn (gen_prefix), which only plain text can: --form plain")
    return json.dumps([{"role": turn["role"], "content": turn["content"]} for turn in history])
