"""Bodies of Anthropic's `/v1/messages`: the chats that they stand for, and what is refused by name."""

import json
from typing import Any

import pytest

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.messages import CountTokensRequest, MessagesRequest
from mbd_core.serving.api.parsing import parse

USER = {"role": "user", "content": "2+3?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
CALLED = {"role": "assistant", "content": [{"type": "text", "text": "So: "}, USE]}


def result(use_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use_id, **fields}


def read(**fields: Any) -> Any:
    """The chat of a body."""
    body = {"model": "m", "max_tokens": 2000, "messages": [USER]} | fields
    return parse(MessagesRequest, json.dumps(body).encode()).chat


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_system_texts_and_turns_become_a_chat() -> None:
    marked = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    chat = read(
        system=[marked, {"type": "text", "text": " Count."}],
        messages=[USER, {"role": "user", "content": [marked]}, {"role": "assistant", "content": "5"}, USER],
    )
    assert [(turn["role"], turn["content"]) for turn in chat.turns] == [
        ("system", "Be short. Count."),
        ("user", "2+3?Be short."),
        ("assistant", "5"),
        ("user", "2+3?"),
    ]
    assert not chat.continue_final_message
    assert [turn["role"] for turn in read(system="", messages=[USER]).turns] == ["system", "user"]
    assert [turn["role"] for turn in read(system=[], messages=[USER]).turns] == ["user"]


def test_calls_and_results_become_a_chat_s() -> None:
    texts = [{"type": "text", "text": "12 "}, {"type": "text", "text": "degrees"}]
    second = USE | {"id": "b", "input": {}}
    results = [
        {"type": "text", "text": "Go on."},
        result("b", content="no such a", is_error=True),
        result(content=texts),
    ]
    turns = read(
        messages=[USER, {"role": "assistant", "content": [USE, second]}, {"role": "user", "content": results}]
    )
    _, called, *said = turns.turns
    assert [call["id"] for call in called["tool_calls"]] == ["toolu_1", "b"]
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [(turn["role"], turn["content"]) for turn in said] == [
        ("tool", "12 degrees"),
        ("tool", "Error: no such a"),
        ("user", "Go on."),
    ]
    nothing = read(messages=[USER, CALLED, {"role": "user", "content": [result()]}]).turns
    assert nothing[-1] == {"role": "tool", "content": "", "tool_call_id": "toolu_1"}


def test_thoughts_of_history_are_reasoning_and_encrypted_ones_are_left_out() -> None:
    answer = [
        {"type": "thinking", "thinking": "2 and 3.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "5"},
    ]
    chat = read(messages=[USER, {"role": "assistant", "content": answer}, USER])
    assert chat.turns[1] == {
        "role": "assistant",
        "content": "5",
        "reasoning": "2 and 3.",
        "reasoning_content": "2 and 3.",
    }
    assert chat.notes == ["messages.1.content.1 is left out: a block of type redacted_thinking has no place here"]
    many = [{"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}] * 20
    notes = read(messages=[USER, {"role": "assistant", "content": many}, USER]).notes
    assert len(notes) == 9 and "12 more blocks" in notes[-1]


def test_a_last_text_of_the_assistant_is_continued() -> None:
    chat = read(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert chat.continue_final_message and chat.turns[-1]["content"] == "The answer is ("


@pytest.mark.parametrize(
    ("choice", "must", "several"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "f"}, True, False),
    ],
)
def test_the_choice_of_tools(choice: Any, must: bool, several: bool) -> None:
    rule = read(
        tools=[TOOL | {"description": "F", "strict": True}, TOOL | {"name": "g"}], tool_choice=choice
    ).call_rule
    assert (rule.must, rule.several) == (must, several)
    names = ["f"] if choice and choice["type"] == "tool" else ["f", "g"]
    assert [name for name, _ in rule.functions] == names


def test_no_tool_is_called_under_none_and_tools_of_anthropic_s_are_left_out() -> None:
    assert read(tools=[TOOL], tool_choice={"type": "none"}).call_rule is None
    others = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20260318", "name": "web_search"}]
    chat = read(tools=[TOOL | {"type": "custom"}, *others])
    assert [name for name, _ in chat.call_rule.functions] == ["f"]
    assert [note.partition(" are left")[0] for note in chat.notes] == [
        "tools of type bash_20250124",
        "tools of type web_search_20260318",
    ]
    assert refused(tools=[TOOL, *others], tool_choice={"type": "tool", "name": "bash"}).param == "tool_choice"


def test_a_tool_s_name_has_the_length_that_anthropic_admits() -> None:
    name = "mcp__" + "f" * 123
    call = {"role": "assistant", "content": [USE | {"name": name}]}
    chat = read(tools=[TOOL | {"name": name}], messages=[USER, call, {"role": "user", "content": [result()]}])
    assert [name for name, _ in chat.call_rule.functions] == [chat.turns[1]["tool_calls"][0]["function"]["name"]]


def test_thinking_sets_the_template_s_variable_unless_the_client_does() -> None:
    def variables(**fields: Any) -> Any:
        return read(**fields).variables(lambda names: [])

    assert variables(thinking={"type": "enabled", "budget_tokens": 1024}) == {"enable_thinking": True}
    assert variables(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert variables(thinking={"type": "adaptive", "display": "summarized"}) == variables() == {}
    own = {"enable_thinking": True}
    assert variables(thinking={"type": "disabled"}, chat_template_kwargs=own) == own
    assert variables(output_config={"effort": "high"}) == {"enable_thinking": True, "reasoning_effort": "high"}
    budgeted = read(thinking={"type": "enabled", "budget_tokens": 1024})
    assert (budgeted.thought_budget, budgeted.thought_budget_field) == (1024, "thinking.budget_tokens")
    chat = read(thinking={"type": "disabled"})
    assert chat.template_notes(list) == ["thinking has no effect: the chat template has no variable enable_thinking"]


def test_the_other_fields_are_the_chat_s() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    chat = read(
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=4,
        metadata={"user_id": "u"},
        decoding={"buffer_size": 1},
        output_config={"format": form},
        speed="standard",
        cache_control={"type": "ephemeral"},
    )
    assert (chat.max_tokens, chat.stop, chat.user, chat.decoding) == (2000, ["x"], "u", {"buffer_size": 1})
    sampling = chat.samplings(chat.seed)[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 4)
    assert json.loads(chat.grammar.text) == SCHEMA and read(speed=0.5).speed == 0.5 and chat.notes == []
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert read(context_management=edits).notes == [
        "context_management has no effect: nothing is dropped from messages"
    ]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER | {"content": [IMAGE]}]}, "messages.0.content.0.type", "images are not read here"),
        ({"messages": [USER | {"content": [{"type": "document"}]}]}, "messages.0.content.0.type", "documents are not"),
        (
            {"messages": [USER | {"content": [{"type": "txt"}]}]},
            "messages.0.content.0.type",
            '"txt" is no type of block',
        ),
        ({"messages": [USER | {"content": [{"type": []}]}]}, "messages.0.content.0.type", "is no type of block"),
        (
            {"messages": [USER, CALLED, {"role": "user", "content": [result(content=[IMAGE])]}]},
            "messages.2.content.0.content.0.type",
            "images are not read here",
        ),
        ({"messages": [USER | {"role": "tool"}]}, "messages.0.role", "'user', 'assistant' or 'system'"),
        ({"messages": [USER | {"content": [USE]}]}, "messages.0.content", "role assistant, not user"),
        ({"messages": [USER, {"role": "assistant", "content": [result()]}]}, "messages.1.content", "role user, not"),
        ({"messages": [USER, CALLED, USER]}, "messages.1", "the call toolu_1 has no result"),
        ({"messages": [USER, CALLED]}, "messages.1", "the call toolu_1 has no result"),
        ({"messages": [USER, USER, {"role": "user", "content": [result()]}]}, "messages.2.content.0", "no open call"),
        (
            {"messages": [USER, CALLED, {"role": "user", "content": [result(), result()]}]},
            "messages.2.content.1",
            "no open call",
        ),
        ({"messages": [USER, {"role": "assistant", "content": [USE, USE]}]}, "messages.1", "two calls have the id"),
        ({"messages": [USER | {"content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text", "string"),
        ({"messages": [USER | {"nme": "x"}]}, "messages.0.nme", "unknown field"),
        ({"system": [{"type": "image"}]}, "system.0.type", "'text'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "required"),
        ({"tools": [TOOL | {"name": "f" * 129}]}, "tools.0.name", "{1,128}"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools.0.input_schema", "object"),
        ({"tools": [TOOL | {"type": "custm"}]}, "tools.0.type", "'custom'"),
        ({"tools": [TOOL | {"parameters": {}}]}, "tools.0.parameters", "unknown field"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions are called f"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice",
            "g is not among the tools: f",
        ),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "object"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type", "'any'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "given with type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools are given"),
        ({"tools": [TOOL], "stop_sequences": ["x"]}, "stop_sequences", "leave it out"),
        ({"stop_sequences": [""]}, "stop_sequences", "empty"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "type enabled"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens", "no other type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens", "less than max_tokens"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"speed": "fast"}, "speed", "must be a number from 0 to 1"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type", "json_schema"),
        ({"metadata": {"user": "x"}}, "metadata.user", "unknown field"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "give max_tokens"),
        ({"logprobs": True}, "logprobs", "it belongs to /v1/chat/completions"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "give its functions in tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_place(fields: dict[str, Any], param: str, text: str) -> None:
    error = refused(**fields)
    assert error.param == param, error.message
    assert error.message.startswith(f"{param}: ") and text in error.message, error.message


def test_a_prompt_to_count_is_the_chat_s_prompt() -> None:
    fields = {"system": "Count.", "messages": [USER, CALLED, {"role": "user", "content": [result()]}], "tools": [TOOL]}
    counted = parse(CountTokensRequest, json.dumps({"model": "m"} | fields).encode()).tokenize
    chat = read(**fields)
    assert counted.messages == chat.messages and counted.shown_tools == chat.shown_tools
    with pytest.raises(ApiError) as caught:
        parse(CountTokensRequest, json.dumps({"model": "m", "max_tokens": 5} | fields).encode())
    assert caught.value.message == "max_tokens: unknown field; it belongs to /v1/chat/completions"


@pytest.mark.parametrize("kind", [MessagesRequest, CountTokensRequest])
def test_a_body_is_parsed_with_the_chat_that_it_stands_for(kind: Any) -> None:
    body = {"model": "m", "messages": [USER, CALLED]} | ({"max_tokens": 5} if kind is MessagesRequest else {})
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(body).encode())
    assert caught.value.param == "messages.1"
