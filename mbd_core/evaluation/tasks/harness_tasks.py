"""Tasks of lm-evaluation-harness as a sweep's: asked and graded by the harness's own definitions.

`harness:NAME` is a task, or a group's tasks. The harness builds the requests, with the task's own examples; a sweep
decodes them; the task's own filters and metrics grade each answer. Tasks that compare log-likelihoods have nothing
that a decoder changes, and are the model `mbd`'s (`mbd_core/harness`).
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from mbd_core.errors import error_line
from mbd_core.evaluation.tasks.asking import TaskInputs
from mbd_core.evaluation.tasks.benchmarks import HARNESS_PREFIX, Problem, Task, find_task
from mbd_core.evaluation.tasks.generation_fields import Generation, read_generation
from mbd_core.evaluation.tasks.problems import ProblemSet
from mbd_core.evaluation.tasks.prompts import Form, Wording
from mbd_core.evaluation.tasks.recipes import TaskPrompt

FEW_SHOT_SEED = 1234  # of the harness
Metrics = dict[str, dict[str, Any]]  # by filter and metric


def load_harness_problems(
    names: Sequence[str], *, form: Form, include: str | None, limit: int | None, max_tokens: int | None
) -> list[tuple[ProblemSet, TaskInputs, Generation]]:
    """The tasks of these names, groups taken apart, with what a model is given.

    `include` is a folder of task files. Raises `ValueError` for a task that is not known, cannot be loaded, or asks
    for more than one greedy or drawn answer to a document.
    """
    groups_of: dict[str, list[str]] = {}
    for name in (name.removeprefix(HARNESS_PREFIX) for name in names):
        objects = _harness_objects(name, include)
        for task_name in objects["tasks"]:
            groups_of.setdefault(task_name, []).extend([name] if name in objects["groups"] else [])
    return [
        _problems(task_name, groups, form=form, include=include, limit=limit, max_tokens=max_tokens)
        for task_name, groups in groups_of.items()
    ]


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


def _problems(
    name: str, groups: Sequence[str], *, form: Form, include: str | None, limit: int | None, max_tokens: int | None
) -> tuple[ProblemSet, TaskInputs, Generation]:
    task, label = _task(name, include), f"{HARNESS_PREFIX}{name}"
    if task.OUTPUT_TYPE != "generate_until":
        raise ValueError(
            f"task '{label}' compares log-likelihoods ({task.OUTPUT_TYPE}), which no decoder changes, so a sweep has "
            f"nothing to compare; run it once: mbd-lm-eval --model mbd --tasks {name}"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"task '{label}' runs programs outside any sandbox; use this project's task instead")
    if task.config.repeats != 1:
        raise ValueError(
            f"task '{label}' asks {task.config.repeats} times and votes by itself; take its single form and --samples"
        )
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": form == "turns", "chat_template": _messages}
    task.set_fewshot_seed(seed=FEW_SHOT_SEED)  # each time: the same examples however often a process plans
    task.build_all_requests(limit=limit, tokenizer_name="sweep", **(chat if form != "plain" else {}))
    arguments = [instance.args for instance in task.instances]
    generation = read_generation(arguments[0][1])
    if generation.decoding:
        raise ValueError(f"task '{label}' asks for {', '.join(generation.decoding)}, which is no field of a sweep")
    source = f"lm-evaluation-harness {version('lm_eval')}, task {name}"
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
                    **({"groups": groups} if groups else {}),
                }
            ),
        )
        for instance, (context, _) in zip(task.instances, arguments, strict=True)
    )
    prompt = TaskPrompt(
        wording=Wording(form=form),
        num_examples=task.config.num_fewshot or 0,
        max_tokens=generation.max_tokens,
        stop=generation.stop,
        source=source,
        extraction="the task's own filters and metrics",
        text_by=source,
    )
    inputs = TaskInputs(
        prompt=prompt,
        inputs=tuple(json.dumps(context) if form == "plain" else context for context, _ in arguments),
        max_tokens=generation.max_tokens if max_tokens is None else max_tokens,
        may_shorten=max_tokens is None,
    )
    return ProblemSet(task=find_task(label), source=source, problems=problems), inputs, generation


def _messages(history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat as a sweep's `input` holds it, for the template of each model."""
    if not add_generation_prompt:
        raise ValueError("the task begins the assistant's turn (gen_prefix), which only plain text can: --form plain")
    return json.dumps([{"role": turn["role"], "content": turn["content"]} for turn in history])


def harness_metrics(task: Task, problem: Problem, text: str) -> Metrics:
    """The metrics of one answer by every filter of its task, as the harness computes them."""
    from lm_eval.api.instance import Instance

    reference = json.loads(problem.reference)
    harness_task = _task(task.name.removeprefix(HARNESS_PREFIX), reference["include"])
    doc = harness_task.eval_docs[reference["doc_id"]]
    instance = Instance(
        request_type="generate_until",
        doc=doc,
        arguments=(problem.prompt, {}),
        idx=0,
        metadata=(harness_task.config.task, reference["doc_id"], 1),
    )
    instance.resps = [text]
    harness_task._instances = [instance]
    harness_task.apply_filters()
    metrics = {
        name: harness_task.process_results(doc, [response]) for name, response in instance.filtered_resps.items()
    }
    return json.loads(json.dumps(metrics, default=_plain))


def _plain(value: Any) -> Any:
    """A number of numpy as Python's."""
    return value.item()


def is_right(metrics: Metrics) -> bool:
    """Whether an answer has full marks by the first metric of the task's first filter."""
    return float(next(iter(next(iter(metrics.values())).values()))) >= 1.0


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
