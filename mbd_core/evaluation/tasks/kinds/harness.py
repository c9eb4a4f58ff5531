"""Answers to tasks of lm-evaluation-harness, graded and aggregated by the harness's own filters and metrics."""

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import numpy as np

from mbd_core.errors import error_line
from mbd_core.evaluation.tasks.kinds.task import Grade, Grader, Problem, Task

HARNESS_PREFIX = "harness:"
RANDOM_SEED, NUMPY_SEED = 0, 1234  # of the harness
Metrics = dict[str, dict[str, Any]]  # by filter and metric


@functools.lru_cache(maxsize=64)
def harness_objects(name: str, include: str | None) -> dict[str, Any]:
    """The harness's objects `tasks` and `groups` for a task or group `name`, each by name."""
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
        with own_draws():
            objects = manager.load([name])
    except Exception as error:  # loading a file, a data set or a page raises many types
        raise ValueError(
            f"task '{HARNESS_PREFIX}{name}' cannot be loaded: {error_line(error)}; where its data set "
            "cannot be reached, give a task file that names local files (dataset_path: json) in --include"
        ) from None
    for task in objects["tasks"].values():
        _check_names(name, task)
        _check_sentences(name, task)
    return dict(objects)


def _check_names(name: str, task: Any) -> None:
    """Raise `ValueError` for a metric or an aggregation in the task's file that the harness has not found: the
    harness would call `None` in its place once all answers are there."""
    from lm_eval.api.task import ConfigurableTask

    unknown = [f"an aggregation of the metric '{metric}'" for metric, rule in task.aggregation().items() if not rule]
    by_metrics = getattr(type(task), "process_results", None) is ConfigurableTask.process_results
    if by_metrics and task.config.process_results is None:
        unknown = [f"the metric '{metric}'" for metric, rule in task._metric_fn_list.items() if not rule] or unknown
    if unknown:
        raise ValueError(
            f"task '{HARNESS_PREFIX}{name}' names {unknown[0]}, which neither lm-evaluation-harness nor the package "
            "evaluate has; mend metric_list in the task's file"
        )


def _check_sentences(name: str, task: Any) -> None:
    """Raise `ValueError` for a document of IFEval that asks for sentences or words, if nltk's rules for these are
    missing. The harness downloads the rules when it loads the task. Without a network the harness goes on, and fails
    while it grades."""
    process = task.config.process_results
    if "ifeval" not in getattr(process, "__module__", ""):
        return
    try:
        for doc in task.eval_docs:
            process(doc, ["A sentence. Another one."])
    except LookupError as error:
        if "nltk.download" not in str(error):
            raise
        raise ValueError(
            f"task '{HARNESS_PREFIX}{name}' counts sentences by punkt_tab of nltk, which could not be downloaded: run "
            "`python -m nltk.downloader punkt_tab` where there is a network, and copy nltk_data/tokenizers/punkt_tab "
            "into the home folder here"
        ) from None


@functools.lru_cache(maxsize=4)
def manager_of(include: str | None) -> Any:
    """The harness's index of tasks, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include)


def harness_task(name: str, include: str | None) -> Any:
    (task,) = harness_objects(name, include)["tasks"].values()
    return task


@contextmanager
def own_draws() -> Iterator[None]:
    """In the block the global random generators have the harness's seeds, because some tasks shuffle with them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def harness_metrics(name: str, problem: Problem, text: str) -> Metrics:
    """The harness's metrics of one answer, for each filter of the task.

    In a task that compares log-likelihoods, `text` is a JSON list with a pair for each continuation: its
    log-likelihood in nats, and whether greedy decoding gives it.
    """
    from lm_eval.api.instance import Instance

    reference = json.loads(problem.reference)
    task = harness_task(name, reference["include"])
    doc = reference["doc"] if "doc" in reference else task.eval_docs[reference["doc_id"]]
    decodes = task.OUTPUT_TYPE == "generate_until"
    responses = [text] if decodes else [tuple(response) for response in json.loads(text)]
    instances = []
    for number, response in enumerate(responses):
        instance = Instance(
            request_type="generate_until" if decodes else "loglikelihood",
            doc=doc,
            arguments=(problem.prompt, {}),
            idx=number,
            metadata=(task.config.task, reference["doc_id"], 1),
        )
        instance.resps = [response]
        instances.append(instance)
    task._instances = instances
    task.apply_filters()
    metrics = {
        filter_name: task.process_results(doc, [instance.filtered_resps[filter_name] for instance in instances])
        for filter_name in instances[0].filtered_resps
    }
    return json.loads(json.dumps(metrics, default=_plain))


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's."""
    return value.tolist()


def is_right(metrics: Metrics) -> bool:
    """Whether an answer has full marks, by the accuracy of the task's first filter, or else by its first number."""
    by_name = next(iter(metrics.values()))
    numbers = [by_name[name] for name in ("acc", "acc_norm") if name in by_name]
    numbers += [value for value in by_name.values() if isinstance(value, int | float)]
    return bool(numbers) and float(numbers[0]) >= 1.0


def aggregate(name: str, include: str | None, answers: Sequence[Metrics]) -> Metrics:
    """The task's own aggregation of its answers' metrics, by filter and metric."""
    rules = harness_task(name.removeprefix(HARNESS_PREFIX), include).aggregation()
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
    for group, rule in harness_objects(name, include)["groups"].items():
        for key, value in rule.aggregate(rows).items():
            metric, comma, filter_name = key.rpartition(",")
            if comma and not metric.endswith("_stderr"):
                averages.setdefault(group, {}).setdefault(filter_name, {})[metric] = float(value)
    return averages


def group_tasks(name: str, group: str, include: str | None) -> list[str]:
    """The names of a group's tasks; `group` is the group `name` itself or a group inside it."""
    return [task.task_name for task in harness_objects(name, include)["groups"][group].get_all_tasks()]


def _grade(name: str, problem: Problem, text: str) -> Grade:
    metrics = harness_metrics(name, problem, text)
    right = is_right(metrics)
    return Grade(correct=right, reason="passed" if right else "wrong", detail=json.dumps(metrics))


class HarnessRow(TypedDict):
    """Nothing: the harness reads its data sets itself."""


def _no_problem(problem_id: str, _row: HarnessRow) -> Problem:
    raise ValueError(f"{problem_id}: a task of lm-evaluation-harness is swept, by --tasks; it reads no rows of a file")


def named_task(name: str) -> Task:
    """The task of `harness:NAME`."""
    own_name = name.removeprefix(HARNESS_PREFIX)
    grader = Grader(rule="harness", judge=functools.partial(_grade, own_name))
    return Task(name=name, label=own_name, row=HarnessRow, problem=_no_problem, grader=grader)
