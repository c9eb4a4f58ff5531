"""Fields that OpenAI, vLLM and SGLang document, as clients send them: taken, noted, or refused with what to use."""

import json
from pathlib import Path
from typing import Any

import pytest
from local_server import answers

from mbd_core.serving.api.dialect import ChatDialect
from mbd_core.serving.api.documented_fields import CHAT, COMPLETION, DOCUMENTED, MESSAGE, RESPONSE
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.messages import MessagesRequest
from mbd_core.serving.api.parsing import Strict, parse
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest
from mbd_core.serving.api.responses import ResponsesRequest

KINDS: dict[str, type[Strict]] = {
    CHAT: ChatRequest,
    COMPLETION: CompletionRequest,
    RESPONSE: ResponsesRequest,
    MESSAGE: MessagesRequest,
}
USER = {"role": "user", "content": "2+3?"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETION: {"model": "m", "prompt": "a"},
    RESPONSE: {"model": "m", "input": "a"},
    MESSAGE: {"model": "m", "messages": [USER], "max_tokens": 9},
}


def read(route: str, fields: dict[str, Any]) -> Any:
    """The request that a body becomes."""
    parsed: Any = parse(KINDS[route], json.dumps(LEAST[route] | fields).encode())
    return parsed.chat if isinstance(parsed, ChatDialect) else parsed


def refused(route: str, fields: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(route, fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("route", KINDS)
def test_no_documented_name_is_unknown(route: str) -> None:
    known = KINDS[route].model_fields
    assert set(DOCUMENTED[route]) <= set(known)
    for name in DOCUMENTED[route]:
        parse(KINDS[route], json.dumps({name: None} | LEAST[route]).encode())


NEUTRAL: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0,
    "top_p": 1,
    "repetition_penalty": 1,
    "safety_identifier": "a",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "auto"},
    "store": False,
    "metadata": {"a": "b"},
    "user": "a",
    "service_tier": "default",
    "priority": 0,
    "session_id": "a",
    "mm_processor_kwargs": {"a": 1},
    "kv_transfer_params": {},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": False,
    "cache_salt": None,
}
NEUTRAL_GENERATION: dict[str, Any] = {
    "n": 1,
    "logit_bias": {},
    "length_penalty": 1.0,
    "use_beam_search": False,
    "bad_words": [],
    "prompt_logprobs": None,
    "thinking_token_budget": -1,
    "no_stop_trim": False,
    "min_new_tokens": 0,
    "return_hidden_states": False,
    "session_params": None,
    "stop_token_ids": [],
    "stop": [],
    "truncation_side": "left",
}
NEUTRAL_CHAT: dict[str, Any] = {
    "modalities": ["text"],
    "audio": None,
    "verbosity": "medium",
    "echo": False,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "functions": [],
    "function_call": "auto",
    "add_special_tokens": False,
    "tools": [],
    "parallel_tool_calls": True,
}


@pytest.mark.parametrize(
    ("route", "values"),
    [
        (CHAT, NEUTRAL | NEUTRAL_GENERATION | NEUTRAL_CHAT),
        (COMPLETION, NEUTRAL | NEUTRAL_GENERATION | {"suffix": "", "best_of": 1, "add_special_tokens": True}),
        (
            RESPONSE,
            NEUTRAL | {"max_tool_calls": 3, "background": False, "truncation": "auto", "context_management": []},
        ),
        (
            MESSAGE,
            {"top_p": 1, "top_k": 0, "service_tier": "auto", "speed": "standard", "mcp_servers": [], "fallbacks": []}
            | {"cache_control": {"type": "ephemeral"}, "context_management": {"edits": []}, "diagnostics": {}},
        ),
    ],
)
def test_values_that_change_nothing_are_taken_without_a_word(route: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        assert read(route, {name: value}).notes == [], name
    request = read(route, values | {"temperature": 0.7})
    assert request.notes == [] and request.samplings(0)[0].top_k == 0


@pytest.mark.parametrize(
    ("route", "fields", "note"),
    [
        (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction has no effect"),
        (CHAT, {"separate_reasoning": False}, "reasoning stands beside the text"),
        (CHAT, {"verbosity": "low"}, "max_tokens"),
        (CHAT, {"store": True}, "not stored"),
        (COMPLETION, {"service_tier": "flex"}, "one tier"),
        (COMPLETION, {"priority": 3}, "take turns"),
        (COMPLETION, {"stream_interval": 8}, "chunk"),
        (RESPONSE, {"context_management": [{"type": "compaction"}]}, "nothing is dropped from input"),
    ],
)
def test_what_has_no_effect_is_noted(route: str, fields: dict[str, Any], note: str) -> None:
    [said] = read(route, fields).notes
    assert said.startswith(next(iter(fields))) and note in said


@pytest.mark.parametrize(
    ("route", "fields", "remedy"),
    [
        (CHAT, {"functions": [{"name": "f"}]}, "tools"),
        (CHAT, {"function_call": {"name": "f"}}, "tool_choice"),
        (CHAT, {"modalities": ["text", "audio"]}, "leave it out"),
        (CHAT, {"chat_template": "{{ messages }}"}, "/v1/completions"),
        (CHAT, {"lora_path": "a"}, "model"),
        (CHAT, {"input_ids": [5]}, "/v1/completions"),
        (CHAT, {"include_reasoning": False}, "reasoning_effort"),
        (CHAT, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "give one of them"),
        (COMPLETION, {"suffix": "b"}, "template"),
        (COMPLETION, {"bad_words": ["a"]}, "logit_bias"),
        (COMPLETION, {"prompt_logprobs": 1}, "echo"),
        (COMPLETION, {"truncate_prompt_tokens": 5}, "/tokenize"),
        (COMPLETION, {"max_new_tokens": 5}, "max_tokens"),
        (COMPLETION, {"skip_special_tokens": False}, "return_token_ids"),
        (COMPLETION, {"cache_salt": "a"}, '{"prefix_cache": false}'),
        (COMPLETION, {"structured_outputs": {"structural_tag": "{}"}}, "tools"),
        (COMPLETION, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one of them"),
        (COMPLETION, {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "one of them"),
        (RESPONSE, {"max_tokens": 5}, "max_output_tokens"),
        (RESPONSE, {"response_format": {"type": "text"}}, "text.format"),
        (RESPONSE, {"previous_response_id": "resp_1"}, "whole conversation in input"),
    ],
)
def test_a_refusal_says_what_to_use(route: str, fields: dict[str, Any], remedy: str) -> None:
    error = refused(route, fields)
    assert (error.param or "").partition(".")[0] in fields and remedy in error.message, error.message


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        (CHAT, {"temprature": 1}, "temprature: unknown field; did you mean temperature?"),
        (CHAT, {"colour": 1}, "colour: unknown field"),
        (CHAT, {"prompt": "a"}, "prompt: unknown field; it belongs to /v1/completions"),
        (
            CHAT,
            {"messages": [USER | {"reasning": "a"}]},
            "messages.0.reasning: unknown field; did you mean reasoning?",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cash_control": {}}]}]},
            "messages.0.content.0.cash_control: unknown field; did you mean cache_control?",
        ),
        (CHAT, {"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages: unknown"),
        (CHAT, {"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices: unknown field; did you mean"),
        (RESPONSE, {"input": [{"role": "user", "content": "a", "stat": 1}]}, "input.0.stat: unknown field"),
        (RESPONSE, {"tools": [{"type": "function", "name": "f", "strickt": True}]}, "tools.0.strickt: unknown field"),
    ],
)
def test_a_typing_error_is_refused_by_its_place(route: str, fields: dict[str, Any], message: str) -> None:
    error = refused(route, fields)
    assert error.code == "unknown_field" and error.message.startswith(message), error.message


MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}} | MARK


def turn_of(**fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "5"} | fields
    turns: list[dict[str, Any]] = read(CHAT, {"messages": [USER, message, USER]}).turns
    return turns[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": None, "reasoning": None, "audio": None, "function_call": None, "refusal": None},
        {"annotations": [{"type": "url_citation"}], "tool_calls": [], "images": []},
        {"provider_specific_fields": {"a": 1}, "thinking_blocks": [{}], "reasoning_details": [{}], "name": "b"},
        {"content": [{"type": "text", "text": "5"} | MARK]} | MARK,
        {"extra_content": {"google": {}}, "phase": "final_answer", "prefix": False},
    ],
)
def test_a_reply_of_another_server_is_taken_as_history(fields: dict[str, Any]) -> None:
    assert turn_of(**fields) == {"role": "assistant", "content": "5"}


def test_reasoning_and_refusals_of_history_keep_their_text() -> None:
    reasoned = {"reasoning": "2 and 3.", "reasoning_content": "2 and 3."}
    assert turn_of(reasoning_content="2 and 3.") == turn_of(reasoning="2 and 3.") == turn_of() | reasoned
    parts = [{"type": "thinking", "thinking": "2 and 3.", "closed": True}, {"type": "text", "text": "5"}]
    assert turn_of(content=parts) == turn_of() | reasoned
    assert turn_of(content=None, refusal="No.")["content"] == "No."
    assert turn_of(content=[{"type": "refusal", "refusal": "No."}])["content"] == "No."
    assert "assistant" in refused(CHAT, {"messages": [{"role": "user", "content": parts}]}).message
    for wrong in ({"audio": {"id": "a"}}, {"function_call": {"name": "f", "arguments": ""}}, {"prefix": True}):
        error = refused(CHAT, {"messages": [USER, {"role": "assistant", "content": "5"} | wrong]})
        assert error.param == f"messages.1.{next(iter(wrong))}"


def test_marks_on_tools_and_calls_change_nothing() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    plain, marked = (
        read(CHAT, {"tools": [{"type": "function", "function": function | more} | more], "messages": messages})
        for more, messages in (
            ({}, [USER]),
            (
                MARK,
                [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"} | TO_A | MARK],
            ),
        )
    )
    assert plain.shown_tools == marked.shown_tools == [tool]


def test_what_a_function_returns_is_shown() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}, "response": {"type": "integer"}}
    tool = {"type": "function", "function": function}
    assert read(CHAT, {"tools": [tool], "messages": [USER]}).shown_tools == [tool]


TO_A = {"tool_call_id": "a"}


def test_allowed_tools_may_be_called_and_all_are_shown() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    request = read(CHAT, {"tools": tools, "tool_choice": choice})
    rule = request.call_rule
    assert [name for name, _ in rule.functions] == ["b", "c"] and rule.must and rule.several
    assert len(request.shown_tools) == 3
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, {"type": "function", "name": "b"}]}
    own_tools = [{"type": "function", "name": name} for name in "abc"]
    rule = read(RESPONSE, {"tools": own_tools, "tool_choice": choice}).call_rule
    assert [name for name, _ in rule.functions] == ["b"] and not rule.must


RUN = {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}}


def test_tools_of_other_kinds_are_left_out_of_a_response() -> None:
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch", "format": {"type": "text"}}]
    request = read(RESPONSE, {"tools": [RUN, *others]})
    assert [name for name, _ in request.call_rule.functions] == ["run"]
    assert [note.split(":")[0] for note in request.notes] == [
        "tools of type web_search are left out",
        "tools of type custom are left out",
    ]
    for choice in ({"type": "web_search"}, {"type": "function", "name": "patch"}):
        assert refused(RESPONSE, {"tools": [RUN, *others], "tool_choice": choice}).param == "tool_choice"
    assert refused(RESPONSE, {"tools": others, "tool_choice": "required"}).param == "tool_choice"
    assert refused(RESPONSE, {"tools": [RUN, {"type": "funktion"}]}).param == "tools.1"


def test_the_items_of_other_servers_are_read_as_far_as_they_have_text() -> None:
    items = [
        USER,
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Patch it."}], "id": "rs_1"},
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** a"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "a"}},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Done.", "annotations": [{"type": "url_citation"}]}],
        },
    ]
    request = read(RESPONSE, {"input": items})
    assert [turn["role"] for turn in request.turns] == ["user", "assistant", "tool", "assistant"]
    called = request.turns[1]
    assert called["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** a"}}
    assert called["reasoning"] == "Patch it."
    assert request.turns[3]["content"] == "Done."
    assert [note.split()[0] for note in request.notes] == ["input.1", "input.5"]
    many = read(RESPONSE, {"input": [USER, *[items[5]] * 50]}).notes
    assert len(many) == 9 and "42 more items" in many[-1]


FORMS = [
    ("guided_choice", ["north", "south"], {"choice": ["north", "south"]}),
    ("guided_json", {"type": "object"}, {"json": {"type": "object"}}),
    ("guided_json", {"type": "object"}, {"json_object": True}),
    ("guided_regex", "[0-9]{2}", {"regex": "[0-9]{2}", "disable_any_whitespace": True}),
    ("guided_grammar", 'start: "a" | "b"', {"grammar": 'start: "a" | "b"'}),
]


@pytest.mark.parametrize(("name", "value", "newer"), FORMS)
def test_structured_outputs_are_the_guided_fields(name: str, value: Any, newer: dict[str, Any]) -> None:
    grammar = read(CHAT, {name: value}).grammar
    for route in (CHAT, COMPLETION, RESPONSE):
        request = read(route, {"structured_outputs": newer})
        assert (request.grammar, request.grammar_field) == (grammar, "structured_outputs")


def test_the_forms_of_sglang_are_the_guided_fields() -> None:
    schema = {"type": "object"}
    guided = read(COMPLETION, {"guided_json": schema}).grammar
    assert guided is not None and read(COMPLETION, {"json_schema": json.dumps(schema)}).grammar == guided
    assert read(CHAT, {"regex": "a"}).grammar == read(CHAT, {"guided_regex": "a"}).grammar


def text_of(objects: list[dict[str, Any]]) -> str:
    choice = objects[0]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_answers_have_the_forms_of_other_servers(tiny_model_dir: Path) -> None:
    ebnf = 'root ::= "yes " word\nword ::= [a-c]+ "."'
    number, choice, sentence, other_sentence, unread = answers(
        tiny_model_dir,
        ("chat", {"structured_outputs": {"regex": "[0-9]{2}"}}),
        ("complete", {"structured_outputs": {"choice": ["north", "south"]}}),
        ("chat", {"ebnf": ebnf}),
        ("complete", {"structured_outputs": {"grammar": ebnf}}),
        ("chat", {"ebnf": 'root ::= "a'}),
    )
    assert text_of(number).isdecimal() and len(text_of(number)) == 2
    assert text_of(choice) in ("north", "south")
    assert text_of(sentence).startswith("yes ") and text_of(other_sentence).endswith(".")
    assert isinstance(unread, ApiError) and (unread.status, unread.param) == (400, "ebnf")
    assert "EBNF cannot be read" in unread.message


def text_of_stream(events: list[dict[str, Any]]) -> str:
    """The first choice's text."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_usage_comes_with_each_event_where_that_is_asked_for(tiny_model_dir: Path, route: str) -> None:
    fields = {"stream": True, "max_tokens": 12, "n": 2}
    plain, at_the_end, each = answers(
        tiny_model_dir,
        *(
            (route, fields | {"stream_options": {"include_usage": True} | more})
            for more in ({}, {"continuous_usage_stats": False}, {"continuous_usage_stats": True})
        ),
    )
    assert [e["usage"] for e in plain] == [e["usage"] for e in at_the_end]
    assert text_of_stream(plain) == text_of_stream(each)
    so_far = [event["usage"]["completion_tokens"] for event in each]
    last = each[-1]["usage"]
    assert so_far == sorted(so_far) and so_far[-2] == so_far[-1] == last["completion_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in each} == {last["prompt_tokens"]}
    assert all(
        e["usage"]["total_tokens"] == e["usage"]["prompt_tokens"] + n for e, n in zip(each, so_far, strict=True)
    )


def test_reasoning_of_history_is_shown_by_a_template_that_has_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    from chat_templates import tool_folder

    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    reasoner = tool_folder(tiny_model_dir, tmp_path / "reasoner", template=template)
    answer = {"role": "assistant", "content": "5"}
    chats = [{"messages": [USER, answer | more, USER], "max_tokens": 2} for more in ({}, {"reasoning": "2 and 3"})]
    for folder, shows in ((tiny_model_dir, False), (reasoner, True)):
        without, with_it = (objects[0] for objects in answers(folder, *(("chat", chat) for chat in chats)))
        longer = with_it["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
        notes = with_it["mbd"].get("notes", [])
        assert longer is shows and bool(notes) is not shows
        assert all(note.startswith("messages.1.reasoning has no effect") for note in notes)
