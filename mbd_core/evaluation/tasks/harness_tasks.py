"""Tasks of lm-evaluation-harness as a sweep's: asked and graded by the harness's own definitions.

`harness:NAME` is a task, or a group's tasks. The harness builds the requests, with the task's own examples; a sweep
decodes them, or scores their continuations where the task compares log-likelihoods; the task's own filters and metrics
grade each answer.
"""

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np

from mbd_core.batch.inputs import ScoredTexts
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.errors import error_line
from mbd_core.evaluation.tasks.asking import TaskInputs
from mbd_core.evaluation.tasks.benchmarks import HARNESS_PREFIX, Problem, Task, find_task
from mbd_core.evaluation.tasks.generation_fields import Generation, read_generation
from mbd_core.evaluation.tasks.problems import ProblemSet
from mbd_core.evaluation.tasks.prompts import Form, Wording
from mbd_core.evaluation.tasks.recipes import TaskPrompt

FEW_SHOT_SEED = 1234  # of the harness, as the next two
RANDOM_SEED, NUMPY_SEED = 0, 1234
Metrics = dict[str, dict[str, Any]]  # by filter and metric


def load_harness_problems(
    names: Sequence[str],
    *,
    form: Form,
    include: str | None,
    limit: int | None,
    max_tokens: int | None,
    mc_num: int,
    seed: int,
) -> list[tuple[ProblemSet, TaskInputs, Generation]]:
    """The tasks of these names, groups taken apart, with what a model is given. Of a log-likelihood there are `mc_num`
    draws, by `seed`.

    `include` is a folder of task files. Raises `ValueError` for a task that is not known, cannot be loaded, or asks
    for more than one greedy or drawn answer to a document.
    """
    groups_of: dict[str, list[str]] = {}
    for name in (name.removeprefix(HARNESS_PREFIX) for name in names):
        objects = _harness_objects(name, include)
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


@functools.lru_cache(maxsize=64)
def _harness_objects(name: str, include: str | None) -> dict[str, Any]:
    """The harness's objects of a name, `tasks` and `groups`, by theirs."""
    try:
        manager = manager_of(include)
    except ImportError:
        raise ValueError(
            f"task '{HARNESS_PREFIX}{name}' needs the package lm_eval (pip install 'mbd-cluster[harness]')"
        ) from None
    if name not in manager.all_tasks:
        raise ValueError(
            f"lm-evaluation-harness has no task '{name}'{f', nor has {include}' if include else ''}; "
            "`lm_eval ls tasks` lists its own, and --include names a folder with others"
        )
    try:
        with _own_draws():
            objects = manager.load([name])
    except Exception as error:  # of whichever step: the file, the data set, the network
        raise ValueError(
            f"task '{HARNESS_PREFIX}{name}' cannot be loaded: {error_line(error)}; where its data set "
            "cannot be reached, give a task file that names local files (dataset_path: json) in --include"
        ) from None
    return dict(objects)


@functools.lru_cache(maxsize=4)
def manager_of(include: str | None) -> Any:
    """The harness's index of tasks, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include)


def _task(name: str, include: str | None) -> Any:
    (task,) = _harness_objects(name, include)["tasks"].values()
    return task


def _built_task(name: str, include: str | None, *, form: Form, limit: int | None) -> Any:
    """A task with its requests; `ValueError` for one that is not offered, with the reason."""
    task, label = _task(name, include), f"{HARNESS_PREFIX}{name}"
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
    with _own_draws():
        task.build_all_requests(limit=limit, tokenizer_name="sweep", **(chat if form != "plain" else {}))
    return task


@contextmanager
def _own_draws() -> Iterator[None]:
    """The global generators as the harness seeds them, for as long as the block lasts: some tasks shuffle by them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _decoded_task(
    task: Any, groups: Sequence[str], *, form: Form, include: str | None, max_tokens: int | None
) -> tuple[ProblemSet, TaskInputs, Generation]:
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
    return problem_set, inputs, generation


def _scored_task(
    task: Any, groups: Sequence[str], *, form: Form, include: str | None, draws: int, seed: int
) -> tuple[ProblemSet, TaskInputs, Generation]:
    """A task that compares log-likelihoods: to each document some continuations, of one context or of several."""
    requests: dict[int, list[Any]] = {}
    for instance in task.instances:
        requests.setdefault(instance.doc_id, []).append(instance)
    firsts, inputs = [], []
    # what decoding gives is asked for where the task's numbers depend on it: its forwards are many
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
    return _problem_set(task, firsts, groups, include), task_inputs, generation


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
    return ProblemSet(task=find_task(label), source=source, problems=problems)


def _document(doc: Any) -> dict[str, Any]:
    """The document, by which an answer is graded wherever that happens: some tasks shuffle their choices anew in each
    process. One that is no JSON is read again there."""
    try:
        return {"doc": doc} if json.loads(json.dumps(doc)) == doc else {}
    except (TypeError, ValueError):
        return {}


def _prompt(task: Any, form: Form, generation: Generation) -> TaskPrompt:
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


def harness_metrics(task: Task, problem: Problem, text: str) -> Metrics:
    """The metrics of one answer by every filter of its task, as the harness computes them.

    Of a task that compares log-likelihoods the answer is the JSON of each continuation's: in nats, and whether greedy
    decoding gives it.
    """
    from lm_eval.api.instance import Instance

    reference = json.loads(problem.reference)
    harness_task = _task(task.name.removeprefix(HARNESS_PREFIX), reference["include"])
    doc = reference["doc"] if "doc" in reference else harness_task.eval_docs[reference["doc_id"]]
    decodes = harness_task.OUTPUT_TYPE == "generate_until"
    responses = [text] if decodes else [tuple(response) for response in json.loads(text)]
    instances = []
    for number, response in enumerate(responses):
        instance = Instance(
            request_type="generate_until" if decodes else "loglikelihood",
            doc=doc,
            arguments=(problem.prompt, {}),
            idx=number,
            metadata=(harness_task.config.task, reference["doc_id"], 1),
        )
        instance.resps = [response]
        instances.append(instance)
    harness_task._instances = instances
    harness_task.apply_filters()
    metrics = {
        name: harness_task.process_results(doc, [instance.filtered_resps[name] for instance in instances])
        for name in instances[0].filtered_resps
    }
    return json.loads(json.dumps(metrics, default=_plain))


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's."""
    return value.tolist()


def is_right(metrics: Metrics) -> bool:
    """Whether an answer has full marks, by the accuracy of the task's first filter, else by its first number."""
    by_name = next(iter(metrics.values()))
    numbers = [by_name[name] for name in ("acc", "acc_norm") if name in by_name]
    numbers += [value for value in by_name.values() if isinstance(value, int | float)]
    return bool(numbers) and float(numbers[0]) >= 1.0


def aggregate(name: str, include: str | None, answers: Sequence[Metrics]) -> Metrics:
    """The task's own aggregation of its answers' metrics, by filter and metric."""
    rules = _task(name.removeprefix(HARNESS_PREFIX), include).aggregation()
    return {
        filter_name: {
            metric: float(rules[metric]([answer[filter_name][metric] for answer in answers])) for metric in metrics
        }
        for filter_name, metrics in answers[0].items()
    }


def aggregate_groups(name: str, include: str | None, tasks: Mapping[str, tuple[Metrics, int]]) -> dict[str, Metrics]:
    """The averages of a group, and of the groups in it, by filter and metric, as their `aggregate_metric_list` says.

    `tasks` are the aggregated metrics of the harness's tasks, each with the number of its answers.
    """
    rows = {
        task: {
            "sample_len": num_answers,
            **{
                f"{metric},{filter_name}": value
                for filter_name, all_of in metrics.items()
                for metric, value in all_of.items()
            },
        }
        for task, (metrics, num_answers) in tasks.items()
    }
    averages: dict[str, Metrics] = {}
    for group, rule in _harness_objects(name, include)["groups"].items():
        for key, value in rule.aggregate(rows).items():
            metric, comma, filter_name = key.rpartition(",")
            if comma and not metric.endswith("_stderr"):
                averages.setdefault(group, {}).setdefault(filter_name, {})[metric] = float(value)
    return averages


def group_tasks(name: str, group: str, include: str | None) -> list[str]:
    """The names of a group's tasks, `group` being the group `name` or one in it."""
    return [task.task_name for task in _harness_objects(name, include)["groups"][group].get_all_tasks()]
