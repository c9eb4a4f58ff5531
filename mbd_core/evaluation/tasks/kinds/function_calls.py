"""The single-turn questions of the Berkeley Function-Calling Leaderboard (BFCL), version 4.

The package `bfcl-eval` holds questions and right answers, and `pip install --no-deps` suffices: nothing of it runs.
Answers are graded by `answers/called_functions.py`. `bfcl:CATEGORY` decodes under a grammar of calls, as the endpoint
does; `bfcl-free:CATEGORY` decodes freely, so that a report has both.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from mbd_core.batch.tool_chats import ToolChat
from mbd_core.evaluation.tasks.answers.called_functions import FunctionCall, WrongCall, check_calls
from mbd_core.evaluation.tasks.kinds.task import Grade, Grader, Problem, Task
from mbd_core.row_files.paths import NumberedRow, read_row_files

NAME, FREE = "bfcl", "bfcl-free"
PACKAGE, VERSION = "bfcl_eval", "2026.3.23"
WITH_ANSWERS = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
"""Categories whose questions have right calls."""
RELEVANCE = {"irrelevance": False, "live_irrelevance": False, "live_relevance": True}
"""Categories that ask only whether to call a function, each with whether a call is right."""
BY_RUNNER = "let the package's own runner ask the endpoint of mbd serve"
ELSEWHERE = {
    **dict.fromkeys(
        ("simple_java", "simple_javascript"), f"its values are literals of Java or JavaScript: {BY_RUNNER}"
    ),
    **dict.fromkeys(
        ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param"),
        f"its functions run between turns: {BY_RUNNER}",
    ),
}
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The leaderboard's names of types that JSON Schema has by other names."""
HINT = " Note that the provided function is in Python 3 syntax."
"""The text that the leaderboard adds to each function's description when it asks."""
MAX_DETAIL = 500  # characters of a wrong call in a grade's detail


class QuestionRow(TypedDict):
    """A question, with its right calls if it has any."""

    id: str
    question: list[Any]
    function: list[Any]
    ground_truth: list[Any]


def named_task(name: str) -> Task:
    """The task of `bfcl:CATEGORY` or `bfcl-free:CATEGORY`. Raises `ValueError` for another category."""
    prefix, _, category = name.partition(":")
    if category in ELSEWHERE:
        raise ValueError(f"task '{name}' is not asked here: {ELSEWHERE[category]}")
    if category not in (*WITH_ANSWERS, *RELEVANCE):
        raise ValueError(f"unknown task '{name}'; its categories are {', '.join((*WITH_ANSWERS, *RELEVANCE))}")
    judge = _judge_calls if category in WITH_ANSWERS else functools.partial(_judge_relevance, RELEVANCE[category])
    return Task(
        name=name,
        label=f"BFCL {category}" + " without a grammar" * (prefix == FREE),
        row=QuestionRow,
        problem=functools.partial(_problem, grammar=prefix == NAME),
        grader=Grader(rule="bfcl", judge=judge),
        packaged=functools.partial(_rows, category),
        asks_calls=True,
    )


def _rows(category: str, data: str | None) -> Iterator[NumberedRow]:
    """The questions of a category, from the installed package or from a copy of its folder `data`."""
    folder = _folder() if data is None else Path(data)
    questions, answers = (folder / place / f"BFCL_v4_{category}.json" for place in ("", "possible_answer"))
    for file in (questions, *([answers] if category in WITH_ANSWERS else [])):
        if not file.is_file():
            raise ValueError(f"{folder} is no folder of {PACKAGE}'s data: {file.relative_to(folder)} is missing")
    right: dict[Any, Any] = {}
    if category in WITH_ANSWERS:
        right = {row.get("id"): row.get("ground_truth") for _, _, row in read_row_files(str(answers))}
    for number, place, row in read_row_files(str(questions)):
        if category in WITH_ANSWERS and row.get("id") not in right:
            raise ValueError(f"{place}: {answers} has no answer to {row.get('id')}")
        yield number, place, {**row, "ground_truth": right.get(row.get("id"), [])}


def _folder() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"tasks {NAME}:CATEGORY need the package bfcl-eval (pip install --no-deps bfcl-eval=={VERSION})"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _problem(_name: str, row: QuestionRow, *, grammar: bool) -> Problem:
    functions = [{**function, "name": _plain_name(function["name"])} for function in row["function"]]
    tools = [
        {
            "type": "function",
            "function": {
                "name": function["name"],
                "description": function["description"] + HINT,
                "parameters": _json_schema(function["parameters"]),
            },
        }
        for function in functions
    ]
    right = [{_plain_name(name): values for name, values in call.items()} for call in row["ground_truth"]]
    return Problem(
        problem_id=row["id"],
        prompt=ToolChat(messages=row["question"][0], tools=tools, grammar=grammar).as_json(),
        reference=json.dumps({"functions": functions, "right": right}),
    )


def _plain_name(name: str) -> str:
    """A function's name without dots, because OpenAI's names have none; the leaderboard replaces dots alike."""
    return name.replace(".", "_")


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The leaderboard's description of parameters as a JSON Schema.

    The leaderboard's `enum` of an array lists the values of its items. In a JSON Schema it would list whole arrays.
    """
    kept = {name: value for name, value in schema.items() if name != "optional"}
    kept["type"] = JSON_TYPES.get(schema["type"], schema["type"])
    if "properties" in kept:
        kept["properties"] = {name: _json_schema(inner) for name, inner in kept["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(kept.get(name), dict):
            kept[name] = _json_schema(kept[name])
    if kept["type"] == "array" and not any(isinstance(value, list) for value in kept.get("enum", [[]])):
        kept["items"] = {**kept.get("items", {}), "enum": kept.pop("enum")}
    return kept


def _judge_calls(problem: Problem, text: str) -> Grade:
    """Whether an answer, which is JSON (`answer_text`), has the right calls."""
    reference = json.loads(problem.reference)
    right = [FunctionCall(name, values) for call in reference["right"] for name, values in call.items()]
    try:
        check_calls(reference["functions"], _calls(text), right)
    except WrongCall as error:
        detail = str(error)[:MAX_DETAIL].encode("utf-8", "backslashreplace").decode()  # JSON may spell lone surrogates
        return Grade(correct=False, reason="wrong", detail=detail)
    return Grade(correct=True, reason="passed")


def _judge_relevance(is_right: bool, _problem: Problem, text: str) -> Grade:
    """Whether an answer has a call exactly if a call is right. A call that cannot be read does not count."""
    try:
        has_call = bool(_calls(text))
    except WrongCall:
        has_call = False
    if has_call == is_right:
        return Grade(correct=True, reason="passed")
    return Grade(correct=False, reason="wrong", detail="no call is right" if has_call else "a call is right")


def _calls(text: str) -> list[FunctionCall]:
    """The calls of an answer. Raises `WrongCall` for arguments that are no JSON object, and `ValueError` for a text
    that `answer_text` did not write."""
    calls = []
    try:
        written = [(call["name"], call["arguments"]) for call in json.loads(text)["calls"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("the answer is not of a sweep, which writes its text and its calls as JSON") from None
    for name, json_text in written:
        try:
            arguments = json.loads(json_text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise WrongCall(f"{name}: the arguments are no JSON object: {json_text}")
        calls.append(FunctionCall(name, arguments))
    return calls
