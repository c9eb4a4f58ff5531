"""BFCL's questions as tasks: their form, their prompts, and which calls are right. The package's own verdicts are in
`test_bfcl_agreement.py`."""

import json
from pathlib import Path
from typing import Any

import pytest

from mbd_core.batch.tool_chats import ToolChat, answer_text
from mbd_core.evaluation.sweep.endpoints.endpoint import Endpoint
from mbd_core.evaluation.sweep.plan import endpoint_notes
from mbd_core.evaluation.tasks.asking import AskedTask, ask
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds import function_calls
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.evaluation.tasks.recipes import find_recipe

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "The city."},
    "days": {"type": "integer"},
    "share": {"type": "float", "optional": True},
    "hours": {"type": "array", "items": {"type": "integer"}, "enum": [6, 18]},
    "box": {"type": "dict", "properties": {"x": {"type": "float"}, "y": {"type": "any"}}},
}
FORECAST = {
    "name": "weather.forecast",
    "description": "The weather to come.",
    "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["city"]},
}
RIGHT = {
    "weather.forecast": {
        "city": ["San Jose", "San José"],
        "days": [3, ""],
        "share": [0.5, 2.0, ""],
        "hours": [[6, 18], ""],
        "box": [{"x": [1.0], "y": ["top", ""]}, ""],
    }
}


def data_folder(folder: Path, category: str, answers: list[Any] | None) -> str:
    """A folder in the form of the package's."""
    question = {"id": f"{category}_0", "question": [[{"role": "user", "content": "Dry?"}]], "function": [FORECAST]}
    (folder / "possible_answer").mkdir(parents=True)
    (folder / f"BFCL_v4_{category}.json").write_text(json.dumps(question) + "\n")
    if answers is not None:
        row = {"id": question["id"], "ground_truth": answers}
        (folder / "possible_answer" / f"BFCL_v4_{category}.json").write_text(json.dumps(row) + "\n")
    return str(folder)


def reason(task: str, data: str, *calls: dict[str, Any] | str) -> str | None:
    """Why these calls of the forecast are wrong; `None` if they are right."""
    texts = [{"name": "weather_forecast", "arguments": c if isinstance(c, str) else json.dumps(c)} for c in calls]
    [problem] = load_problems(find_task(task), data=data).problems
    grade = find_task(task).grade(problem, answer_text("", texts))
    assert grade.reason == ("passed" if grade.correct else "wrong")
    return None if grade.correct else grade.detail


def test_a_question_becomes_a_chat_with_json_schemas(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "d", "simple_python", [RIGHT])
    for name, grammar in (("bfcl:simple_python", True), ("bfcl-free:simple_python", False)):
        problems = load_problems(find_task(name), data=data)
        inputs = ask(problems, find_recipe("mbd-lms"), examples=None, max_tokens=None)
        chat = ToolChat.of_input(inputs.inputs[0])
        assert chat is not None and chat.grammar is grammar and inputs.max_tokens == 512
        function = chat.tools[0]["function"]
        assert function["name"] == "weather_forecast"
        assert function["description"] == "The weather to come. Note that the provided function is in Python 3 syntax."
        schema = function["parameters"]
        assert schema["type"] == "object" and schema["properties"]["share"] == {"type": "number"}
        assert schema["properties"]["hours"] == {"type": "array", "items": {"type": "integer", "enum": [6, 18]}}
        assert schema["properties"]["box"]["properties"] == {"x": {"type": "number"}, "y": {"type": "string"}}


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "san-jose"},
        {"city": "SAN JOSE", "days": 3, "share": 2, "hours": [6, 18]},
        {"city": "San José", "box": {"x": 1.0}},
        {"city": "San Jose", "box": {"x": 1.0, "y": "To p"}},
    ],
)
def test_right_calls(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert reason("bfcl:simple_python", data_folder(tmp_path / "d", "simple_python", [RIGHT]), arguments) is None


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([], "0 calls where 1 are right"),
        ([{"city": "San Jose"}] * 2, "2 calls"),
        ([{}], "the argument city is missing"),
        ([{"city": "Oslo"}], "city is 'Oslo'"),
        ([{"city": "San Jose", "days": 3.0}], "days is 3.0"),
        ([{"city": "San Jose", "days": True}], "days is True"),
        ([{"city": "San Jose", "hours": [18, 6]}], "hours is"),
        ([{"city": "San Jose", "wind": 1}], "no argument wind"),
        ([{"city": "San Jose", "box": {"y": "top"}}], "box is"),
        (['{"city": "San'], "no JSON object"),
    ],
)
def test_wrong_calls(tmp_path: Path, calls: list[dict[str, Any] | str], why: str) -> None:
    data = data_folder(tmp_path / "d", "simple_python", [RIGHT])
    assert why in (reason("bfcl:simple_python", data, *calls) or "")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": 1e999}',
        '{"city": NaN}',
        '{"city": "\\ud800"}',
        '{"city": "San Jose", "\\ud800": 1}',
        '{"city": "San Jose", "city": "Oslo"}',
        '{"city": "San Jose", "hours": ' + "[" * 100_000,
        '{"city": "San Jose", "days": ' + "9" * 10_000 + "}",
        json.dumps({"city": "x" * 100_000}),
    ],
    ids=["infinite", "NaN", "half a character", "half a name", "twice", "deep", "large", "long"],
)
def test_odd_calls_are_wrong_in_a_short_text_that_can_be_written(tmp_path: Path, arguments: str) -> None:
    data = data_folder(tmp_path / "d", "simple_python", [RIGHT])
    said = reason("bfcl:simple_python", data, arguments)
    assert said and len(said.encode()) < 3_000
    data = data_folder(tmp_path / "e", "irrelevance", None)
    deep = '{"city": ' + "[" * 100_000
    assert reason("bfcl:irrelevance", data, deep) is None, "a call that cannot be read is none"


@pytest.mark.parametrize("text", ["Dry.", "[]", '{"calls": null}', '{"calls": [{"name": "x"}]}', "3", "[" * 100_000])
def test_an_answer_that_no_sweep_wrote_is_not_graded(tmp_path: Path, text: str) -> None:
    for category, answers in (("simple_python", [RIGHT]), ("irrelevance", None)):
        data = data_folder(tmp_path / category, category, answers)
        task = find_task(f"bfcl:{category}")
        [problem] = load_problems(task, data=data).problems
        grade = task.grade(problem, text)
        assert not grade.correct and grade.reason == "ungradable" and "as JSON" in (grade.detail or "")


def test_parallel_calls_come_in_any_order(tmp_path: Path) -> None:
    oslo = {"weather.forecast": {"city": ["Oslo"], "days": ["", 2]}}
    data = data_folder(tmp_path / "d", "parallel", [RIGHT, oslo])
    assert reason("bfcl:parallel", data, {"city": "Oslo"}, {"city": "San Jose"}) is None
    assert reason("bfcl:parallel", data, {"city": "Oslo"}, {"city": "Oslo"})


def test_relevance_asks_for_a_call_or_for_none(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "a", "irrelevance", None)
    assert reason("bfcl:irrelevance", data) is None and reason("bfcl:irrelevance", data, "no object") is None
    assert reason("bfcl:irrelevance", data, {"city": "Oslo"}) == "no call is right"
    data = data_folder(tmp_path / "b", "live_relevance", None)
    assert reason("bfcl:live_relevance", data, {"city": "x"}) is None
    assert reason("bfcl:live_relevance", data) == reason("bfcl:live_relevance", data, "[]") == "a call is right"


def test_an_endpoint_is_not_asked_without_a_grammar(tmp_path: Path) -> None:
    data, endpoint = data_folder(tmp_path / "d", "irrelevance", None), Endpoint(name="x", url="u", model="m")
    asked = []
    for name in ("bfcl:irrelevance", "bfcl-free:irrelevance"):
        problems = load_problems(find_task(name), data=data)
        inputs = ask(problems, find_recipe("own"), examples=None, max_tokens=None)
        asked.append(AskedTask(problem_set=problems, inputs=inputs))
    assert endpoint_notes(endpoint, asked[:1])
    with pytest.raises(ValueError, match="give bfcl:irrelevance"):
        endpoint_notes(endpoint, asked)


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (
        ("bfcl:rhymes", "its categories"),
        ("bfcl:simple_java", "Java"),
        ("bfcl:multi_turn_base", "runner"),
    ):
        with pytest.raises(ValueError, match=why):
            find_task(name)
    monkeypatch.setattr(function_calls, "PACKAGE", "bfcl_eval_is_not_here")
    with pytest.raises(ValueError, match="pip install --no-deps bfcl-eval=="):
        load_problems(find_task("bfcl:multiple"))
    with pytest.raises(ValueError, match=r"BFCL_v4_multiple\.json is missing"):
        load_problems(find_task("bfcl:multiple"), data=str(tmp_path))
    data = data_folder(tmp_path / "d", "simple_python", [RIGHT])
    (tmp_path / "d/possible_answer/BFCL_v4_simple_python.json").write_text('{"id": "x", "ground_truth": []}\n')
    with pytest.raises(ValueError, match="has no answer to simple_python_0"):
        load_problems(find_task("bfcl:simple_python"), data=data)
