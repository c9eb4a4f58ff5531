"""Rows in the forms that people bring: each column and each field of a turn is read, left out by name, or refused."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from mbd_core.multitf.data.conversation_rows import Columns
from mbd_core.multitf.data.turns import ColumnRefused

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def read(row: Mapping[str, Any], **named: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row's messages, and what became of its columns and fields."""
    notes: list[tuple[str, str]] = []
    columns = Columns(**named)
    chat = columns.found(row).conversation("row", row, notes)
    return list(chat.messages), dict(notes)


def texts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


HI_YO = [("user", "Hi"), ("assistant", "Yo")]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (
            {"instruction": "Translate.", "input": "Good", "output": "Bueno"},
            [("user", "Translate.\nGood"), ("assistant", "Bueno")],
        ),
        ({"instruction": "Hi", "input": "", "output": "Yo"}, HI_YO),
        ({"instruction": "Hi", "context": None, "response": "Yo"}, HI_YO),
        (
            {"instruction": "Hi", "input": "", "output": "Yo", "history": [["a", "b"]], "system": "Be brief."},
            [("system", "Be brief."), ("user", "a"), ("assistant", "b"), *HI_YO],
        ),
        (
            {"instruction": "Hi", "output": "Yo", "history": '[["a", "b"]]'},
            [("user", "a"), ("assistant", "b"), *HI_YO],
        ),
        ({"system": "Be brief.", "messages": [USER, ANSWER]}, [("system", "Be brief."), *HI_YO]),
        (
            {
                "system_prompt": "Be brief.",
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}],
            },
            [("system", "Be brief."), *HI_YO],
        ),
        ({"system": "Be brief. ", "messages": [SYSTEM, USER, ANSWER]}, [("system", "Be brief."), *HI_YO]),
        ({"prompt": "Hi", "completion": "Yo"}, HI_YO),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [("system", "Be brief."), *HI_YO]),
        ({"messages": json.dumps([USER, ANSWER])}, HI_YO),
        ({"messages": [json.dumps(USER), json.dumps(ANSWER)]}, HI_YO),
        ({"query": "Hi", "response": "Yo"}, HI_YO),
        ({"messages": None, "conversations": None, "query": "Hi", "response": "Yo"}, HI_YO),
        ({"conversation": [USER, ANSWER]}, HI_YO),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "Yo"}]}]}, HI_YO),
    ],
)
def test_forms_of_rows_become_turns(row: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    assert texts(read(row)[0]) == turns


def test_what_says_nothing_is_named_and_what_repeats_the_conversation_too() -> None:
    row = {
        "prompt": "Hi",
        "prompt_id": "x1",
        "messages": [USER | {"name": "Ana", "timestamp": 3, "refusal": None}, ANSWER],
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}],
        "score_chosen": 1.5,
        "source": "web",
        "languageCode": None,
        "parallel_tool_calls": False,
    }
    messages, notes = read(row)
    assert texts(messages) == HI_YO and set(messages[0]) == {"role", "content"}
    fates = {name: fate.partition(":")[2].strip() or fate for name, fate in notes.items()}
    assert fates == {
        "messages": "the conversation",
        "messages.name": "chat templates have no place for it",
        "messages.timestamp": "says nothing of the conversation",
        "prompt": "repeats the conversation",
        "conversations": "repeats the conversation",
        **dict.fromkeys(
            ("prompt_id", "score_chosen", "source", "parallel_tool_calls"), "says nothing of the conversation"
        ),
        "languageCode": "empty",
    }
    alpaca = {"instruction": "Say", "input": "hi", "output": "hi", "text": "### Instruction: Say ### Input: hi ### hi"}
    assert read(alpaca)[1]["text"].endswith("repeats the conversation")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [USER, ANSWER], "mood": "glad"}, "column 'mood' is not read.*--ignore-columns mood$"),
        ({"messages": [USER, ANSWER], "a": 1, "b": 2}, "columns 'a', 'b' are not read.*--ignore-columns a,b$"),
        (
            {"messages": [USER | {"mood": "glad"}, ANSWER]},
            "message 1 has the field 'mood'.*--ignore-columns messages.mood$",
        ),
        ({"messages": [USER, ANSWER], "conversations": [USER, USER, ANSWER]}, "'conversations' is not read"),
        (
            {"messages": [USER | {"value": "Ho"}, ANSWER]},
            "both 'content' and 'value'.*--ignore-columns messages.value",
        ),
        ({"system": "Be long.", "messages": [SYSTEM, USER, ANSWER]}, "'system' and a turn.*--ignore-columns system"),
        (
            {"question": "Hi", "answer": "Yo", "solution": "Ho"},
            "'solution' is not read .'question' and 'answer' are; --messages",
        ),
        ({"instruction": "Hi", "source": "Good", "target": "Gut"}, "'source' is not read"),
        ({"messages": [USER, ANSWER], "source": "a\nb"}, "'source' is not read"),
        ({"task": "Sum up.", "input": "Hi", "output": "Yo"}, "'task' is not read"),
        ({"text": "Hi Yo"}, "'text' are no conversation.*turns are not told apart"),
        ({"prompt": "Hi", "completion": "Yo", "label": False}, "'label' is not read .*which answers are wanted"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "'images' is not read .images: images, videos"),
        (
            {"messages": [USER, ANSWER | {"reasoning": "a", "thinking": "b"}]},
            "'reasoning' and 'thinking', which differ",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_the_option_that_settles_it(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ColumnRefused, match=sentence):
        read(row)


def test_ignored_columns_and_fields_are_left_out() -> None:
    row = {"messages": [USER | {"mood": "glad"}, ANSWER | {"weight": 0.5}], "mood": "glad"}
    messages, notes = read(row, ignored=frozenset(("mood", "messages.mood", "messages.weight")))
    assert texts(messages) == HI_YO
    assert {name for name, fate in notes.items() if "--ignore-columns" in fate} == {
        "mood",
        "messages.mood",
        "messages.weight",
    }
    with pytest.raises(ValueError, match="--ignore-columns"):
        Columns(chat="messages", ignored=frozenset(("messages",)))


PREFERENCES = [
    ({"prompt": "Hi", "chosen": "Yo", "rejected": "No"}, "--prompt prompt --response chosen"),
    ({"instruction": "Hi", "input": "", "chosen": "Yo", "rejected": "No"}, "--prompt instruction --response chosen"),
    (
        {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "messages": [USER, ANSWER]},
        "--messages chosen",
    ),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "--prompt prompt --response chosen"),
    (
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Yo"},
            "rejected": {"from": "gpt", "value": "No"},
        },
        "--prompt conversations --response chosen",
    ),
]


@pytest.mark.parametrize(("row", "options"), PREFERENCES)
def test_preferences_are_refused_with_the_options_that_take_the_chosen_side(row: dict[str, Any], options: str) -> None:
    with pytest.raises(ColumnRefused, match=f"{options} --ignore-columns rejected$"):
        read(row)
    words = options.split()
    named = {"--messages": "chat", "--prompt": "prompt", "--response": "response"}
    given = {named[words[i]]: words[i + 1] for i in range(0, len(words), 2)}
    assert texts(read(row, **given, ignored=frozenset(("rejected",)))[0]) == HI_YO


@pytest.mark.parametrize("value", [5, 1.5, True, "[x", "{", ["x"], [None], {"a": 1}])
@pytest.mark.parametrize(
    "column",
    ["messages", "prompt", "response", "tools", "history", "system", "input", "chosen", "chat_template_kwargs"],
)
def test_values_of_odd_types_are_read_or_refused(column: str, value: Any) -> None:
    row = {"instruction": "Hi", "prompt": "Hi", "response": "Yo", "rejected": "No", column: value}
    columns = Columns(prompt="prompt", response="response", ignored=frozenset(("instruction",)))
    for named in (columns, Columns(prompt="instruction", response="response"), Columns()):
        with contextlib.suppress(ValueError):
            named.found(row).conversation("row", row, [])
    for field in ("tool_calls", "function_call", "reasoning", "weight", "content", "role", "tool_call_id", "name"):
        with contextlib.suppress(ValueError):
            read({"messages": [USER | {field: value}, ANSWER | {field: value}]})


def test_preferences_without_turns_say_so() -> None:
    with pytest.raises(ColumnRefused, match="make messages of the chosen answer"):
        read({"chosen": "Human: Hi", "rejected": "Human: Hi"})


@pytest.mark.parametrize("flag", ["weight", "loss", "trainable", "train", "train_on_turn", "training", "masked"])
def test_flags_leave_answers_untrained(flag: str) -> None:
    off, on = (True, False) if flag == "masked" else (0, 1)
    turns = [USER | {flag: off}, ANSWER | {flag: off}, USER | {flag: None}, ANSWER | {flag: on}]
    row = {"messages": turns}
    assert Columns.of(row).conversation("row", row, []).untrained == (1,)
    for bad, sentence in (
        ([USER, ANSWER | {flag: 0.5}], f"message 2 has {flag} 0.5.*must be 0 or 1"),
        ([USER, ANSWER | {flag: "no"}], "must be 0 or 1"),
        ([USER | {flag: on}, ANSWER], f"message 1, of the role user, has {flag}"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read({"messages": bad})


def test_flags_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="masked and weight"):
        read({"messages": [USER, ANSWER | {"weight": 1, "masked": True}]})


def test_calls_and_results_of_sharegpt_become_those_of_openai() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "gpt", "value": "I add."},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "function_call", "value": '[{"name": "add", "arguments": "{\\"a\\": 2}"}]'},
            {"from": "observation", "value": '{"sum": 2}'},
            {"from": "gpt", "value": "2"},
        ]
    }
    messages, _ = read(row)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "I add."
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [{"a": 1}, {"a": 2}]
    row["conversations"][2]["value"] = "add(1)"
    with pytest.raises(ValueError, match="message 3"):
        read(row)


@pytest.mark.parametrize(
    ("names", "roles"), [(("from", "value"), ["call", "tool"]), (("role", "content"), ["tool", "tool"])]
)
def test_function_is_a_call_or_a_result_by_its_place(names: tuple[str, str], roles: list[str]) -> None:
    role, content = names
    call = '{"name": "add", "arguments": {}}'
    if roles[0] == "call":
        turns = [{role: "human", content: "q"}, {role: "function", content: call}, {role: "function", content: "2"}]
    else:
        old_call = {"name": "add", "arguments": "{}"}
        turns = [{role: "user", content: "q"}, {role: "assistant", content: None, "function_call": old_call}]
        turns += [{role: "function", "name": "add", content: "2"}]
    messages, _ = read({"conversations": [*turns, {role: "assistant", content: "2"}]})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


def test_roles_of_other_names_are_given_by_an_option() -> None:
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "bing", "value": "Yo"}]}
    with pytest.raises(ValueError, match="--roles bing=assistant"):
        read(row)
    assert texts(read(row, roles={"bing": "assistant"})[0]) == HI_YO
    row["conversations"][1:] = [
        {"from": "do", "value": '{"name": "f", "arguments": {}}'},
        {"from": "gpt", "value": "x"},
    ]
    row["conversations"].insert(2, {"from": "did", "value": "1"})
    messages, _ = read(row, roles={"do": "function_call", "did": "tool"})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(ValueError, match="one of system, user"):
        Columns(roles={"bing": "bot"})


def tools(value: Any, **row: Any) -> Any:
    row = {"messages": [USER, ANSWER], "tools": value, **row}
    return Columns.of(row).conversation("row", row, []).tools


def test_tools_are_taken_as_lists_and_texts_without_null_keywords() -> None:
    (shown,) = tools([TOOL])
    assert shown == TOOL
    for same in (json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"] | {"strict": True}], json.dumps(TOOL)):
        assert tools(same) == [TOOL]
    assert tools(None, functions=[TOOL["function"]]) == [TOOL]
    assert not tools("") and not tools("[]") and not tools("null")
    field = {"type": ["string", "null"], "enum": ["a", None], "default": None, "description": None}
    schema = {"type": "object", "properties": {"a": field, "padded": None, "default": None}, "required": None}
    (shown,) = tools([{"name": "f", "parameters": schema}])
    del field["description"]
    assert shown["function"]["parameters"] == {"type": "object", "properties": {"a": field}}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("a text", "no list of functions"),
        (5, "no list of functions"),
        ([None], "no list of functions"),
        ([{"name": "f", "parameters": [1]}], "'parameters' that are no JSON schema"),
        ([{"name": "f", "returns": {"type": "string"}}], "'returns'.*--ignore-columns tools.returns"),
    ],
)
def test_tools_that_are_no_functions_are_refused(value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tools(value)


def test_null_arguments_that_a_function_has_no_place_for_are_left_out() -> None:
    schema = {"properties": {"a": {"type": ["number", "null"]}, "b": {"type": "number"}, "n": {"type": "integer"}}}
    call = {"function": {"name": "f", "arguments": {"a": None, "b": None, "c": None, "n": 2.0}}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        ANSWER,
    ]
    messages, notes = read({"messages": turns, "tools": [{"name": "f", "parameters": schema}]})
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None, "n": 2}
    assert "null arguments of calls" in notes
    assert read({"messages": turns})[0][1]["tool_calls"][0]["function"]["arguments"] == {
        "a": None,
        "b": None,
        "c": None,
        "n": 2.0,
    }


def test_variables_of_the_template_are_read() -> None:
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False, "x": 1}}
    columns = Columns(ignored=frozenset(("chat_template_kwargs.x",))).found(row)
    assert columns.conversation("row", row, []).variables == {"enable_thinking": False}


def test_a_model_answers_where_the_rows_own_answers_are_not_read() -> None:
    messages, notes = read({"prompt": "Hi", "chosen": "Yo", "rejected": "No", "completion": "x"}, answered=False)
    assert texts(messages) == [("user", "Hi")]
    assert {name for name, fate in notes.items() if "a model answers" in fate} == {"chosen", "rejected", "completion"}
