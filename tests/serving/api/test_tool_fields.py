"""Tools over the API: every call fits its function's schema, and a conversation with results goes on."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from call_templates import TEMPLATES
from chat_templates import OTHER_FORM, QWEN, tool_folder
from local_server import LIMIT, MODEL, ROUTES, LocalServer, answers, openai_client, server_of
from transformers import AutoTokenizer

from mbd_core.checkpoint.chat import chat_text
from mbd_core.decoding.grammar.guide import AllowedToken
from mbd_core.engine.step import steering
from mbd_core.serving.api.errors import ApiError

NUM_PAGES = 256
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"enum": ["pens", "cups"]}, "maxItems": 2}},
    "required": ["items"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": CITY, "order": ORDER, "now": {"type": "object", "maxProperties": 0}}


asked_of = partial(answers, num_pages=NUM_PAGES)


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [
    tool("weather", description="The weather to come", parameters=CITY, strict=True),
    tool("order", parameters=ORDER),
    tool("now"),
]
NAMED = {"type": "function", "function": {"name": "order"}}
DRAWN = {"tools": TOOLS, "max_tokens": 150, "temperature": 1.0}


def check_calls(calls: Sequence[dict[str, Any]]) -> list[str]:
    for call in calls:
        assert set(call) == {"id", "type", "function"}
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in calls]


def joined(events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of a stream."""
    content, calls = "", []
    for delta in (event["choices"][0]["delta"] for event in events if event["choices"]):
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append((part["function"]["name"], ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + part["function"]["arguments"])
    return content, calls


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template says nothing of tools."""
    return tool_folder(tiny_model_dir, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module", params=["plain", "added", "special"])
def folder(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`; and models whose template takes tools, with the marks of calls as tokens of both kinds."""
    if request.param == "plain":
        return plain
    return tool_folder(plain, tmp_path_factory.mktemp("marks") / "model", template=QWEN, marks=request.param)


def test_every_call_fits_its_schema_whole_and_streamed(folder: Path) -> None:
    required = DRAWN | {"tool_choice": "required"}
    many, whole, events, named = asked_of(
        folder,
        ("chat", required | {"n": 4, "seed": 3}),
        ("chat", required | {"seed": 5}),
        ("chat", required | {"seed": 5, "stream": True}),
        ("chat", DRAWN | {"tool_choice": NAMED, "n": 2, "seed": 2}),
    )
    names: list[str] = []
    for choice in many[0]["choices"]:
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        names += check_calls(choice["message"]["tool_calls"])
    assert len(set(names)) > 1
    calls = whole[0]["choices"][0]["message"]["tool_calls"]
    assert joined(events) == ("", [(c["function"]["name"], c["function"]["arguments"]) for c in calls])
    assert len([e for e in events if e["choices"][0]["delta"].get("tool_calls")]) > 1, "calls come in parts"
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == "tool_calls"
    for choice in named[0]["choices"]:
        assert check_calls(choice["message"]["tool_calls"]) == ["order"]


def test_one_call_where_parallel_ones_are_not_wanted(plain: Path) -> None:
    asked = DRAWN | {"tool_choice": "required", "n": 6, "seed": 1}
    several, single = asked_of(plain, ("chat", asked), ("chat", asked | {"parallel_tool_calls": False}))
    numbers = [[len(c["message"]["tool_calls"]) for c in objects[0]["choices"]] for objects in (several, single)]
    assert max(numbers[0]) > 1
    assert numbers[1] == [1] * 6


def test_under_auto_text_stays_text_and_is_cut_by_the_budget_alone(plain: Path) -> None:
    untold, none, auto, cut, events = asked_of(
        plain,
        ("chat", {"max_tokens": 12}),
        ("chat", {"max_tokens": 12, "tools": TOOLS, "tool_choice": "none"}),
        ("chat", {"tools": TOOLS, "max_tokens": 40, "seed": 3, "temperature": 1.0}),
        ("chat", {"tools": TOOLS, "max_tokens": 3, "return_token_ids": True}),
        ("chat", {"tools": TOOLS, "max_tokens": 3, "stream": True}),
    )
    assert none[0]["choices"] == untold[0]["choices"], "without a choice of tools they are not in the prompt"
    assert none[0]["usage"] == untold[0]["usage"]
    assert auto[0]["usage"]["prompt_tokens"] > untold[0]["usage"]["prompt_tokens"]
    choice = auto[0]["choices"][0]
    assert choice["message"]["content"] and "tool_calls" not in choice["message"]
    choice = cut[0]["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 3
    assert joined(events) == (choice["message"]["content"], [])
    assert events[-1]["choices"][0]["finish_reason"] == "length"


ARGUMENTS = "messages.0.tool_calls.0.function.arguments"


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "now", "arguments": arguments}}


def said(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool("a b")]}, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type", "function"),
    ({"tools": [tool("a"), tool("a")]}, "tools", "two functions are called a"),
    ({"tools": [tool("a", parameters={"type": "string"})]}, "tools.0.function.parameters", '"type": "object"'),
    ({"tools": [tool("a", parameters={"not": {}})]}, "tools", "Unimplemented keys"),
    ({"tools": [tool("a", x=1)]}, "tools.0.function.x", "unknown field"),
    ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 5}, "tools", "no answer of at most 5 tokens"),
    ({"tools": TOOLS, "guided_json": CITY, "max_tokens": 5}, "tools", "calls a tool or fits the JSON schema;"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '"required"'),
    (
        {"tools": TOOLS, "tool_choice": tool("other")},
        "tool_choice",
        "other is not among the tools: weather, order, now",
    ),
    ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
    ({"tools": TOOLS, "stop": "x"}, "stop", "would cut an answer that tools holds to its form"),
    ({"tools": TOOLS, "guided_regex": "x"}, "guided_regex", "tools hold the answer to their form"),
    ({"tools": TOOLS, "guided_json": "{"}, "guided_json", "tools hold the answer to their form"),
    ({"tools": TOOLS, "guided_json": {"not": {}}}, "tools", "the JSON schema of the text cannot be honoured"),
    ({"tools": TOOLS, "decoding": {"t2t": {}}}, "tools", "t2t changes tokens"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages.0.tool_call_id", "id of the call"),
    ({"messages": [{"role": "tool", "content": "5", "tool_call_id": "a"}]}, "messages.0.tool_call_id", "no open"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id", "required"),
    ({"messages": [{"role": "user", "tool_calls": []}]}, "messages.0.content", "needs a string"),
    ({"messages": [said(call("a", '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"))]}, ARGUMENTS, "a JSON object"),
    ({"messages": [said(call("a", '{"a":"\\ud800"}'))]}, ARGUMENTS, "a JSON object"),
    ({"messages": [said(call("a", "{}"), call("a", "{}"))]}, "messages.0.tool_calls", "two calls have the id a"),
]


@pytest.fixture(scope="module")
def refusals(plain: Path) -> list[Any]:
    return asked_of(plain, *(("chat", fields) for fields, _, _ in REFUSED))


@pytest.mark.parametrize("place", range(len(REFUSED)), ids=[f"{param}: {reason}" for _, param, reason in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(refusals: list[Any], place: int) -> None:
    error, (_, param, reason) = refusals[place], REFUSED[place]
    assert isinstance(error, ApiError), error
    assert (error.status, error.param) == (400, param), error.message
    assert reason in error.message


def test_a_template_with_calls_in_another_form_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = tool_folder(plain, tmp_path / "other", template=OTHER_FORM)
    refused, text = asked_of(folder, ("chat", {"tools": TOOLS}), ("chat", {"tools": TOOLS, "tool_choice": "none"}))
    assert isinstance(refused, ApiError) and (refused.status, refused.param) == (400, "tools")
    assert "a form of its own" in refused.message
    assert text[0]["choices"][0]["message"]["content"] is not None


FOLLOWS_TYPES = (
    "{% macro kind(s) %}{% if s.type %}{{ s.type }}{% else %}{{ kind(s) }}{% endif %}{% endmacro %}"
    "{% for tool in tools or [] %}{% for v in tool.function.parameters.properties.values() %}{{ kind(v) }}{% endfor %}"
    "{% endfor %}"
) + QWEN


def test_a_template_that_fails_on_a_schema_is_a_400(plain: Path, tmp_path: Path) -> None:
    """As Hermes' template does, without an end, for a property without a type."""
    folder = tool_folder(plain, tmp_path / "types", template=FOLLOWS_TYPES)
    typed, untyped = {"type": "boolean"}, {"enum": ["a"]}
    [good, refused] = asked_of(
        folder,
        *(
            ("chat", {"tools": [tool("f", parameters={"properties": {"a": part}})], "max_tokens": 8})
            for part in (typed, untyped)
        ),
    )
    assert not isinstance(good, ApiError)
    assert isinstance(refused, ApiError) and (refused.status, refused.param) == (400, "messages")
    assert "the model's chat template cannot show these messages and tools" in refused.message


@pytest.mark.parametrize("name", ["xml", "gemma", "pythonic", "mistral"])
def test_calls_in_another_form_fit_whole_and_streamed_and_go_on(plain: Path, tmp_path: Path, name: str) -> None:
    folder = tool_folder(plain, tmp_path / name, template=TEMPLATES[name])
    fields = DRAWN | {"tool_choice": "required", "seed": 5, "max_tokens": 250}
    turns = {"messages": [*TURNS, {"role": "user", "content": "And then?"}], "tools": TOOLS, "max_tokens": 8}
    whole, events, after = asked_of(
        folder, ("chat", fields), ("chat", fields | {"stream": True}), ("chat", turns | {"tool_choice": "auto"})
    )
    message = whole[0]["choices"][0]["message"]
    assert message["content"] is None and check_calls(message["tool_calls"])
    assert joined(events) == (
        "",
        [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]],
    )
    assert after[0]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_a_form_that_the_server_is_given_overrides_the_template_s(plain: Path, tmp_path: Path) -> None:
    folder = tool_folder(plain, tmp_path / "other", template=OTHER_FORM)
    [reply] = answers(
        folder, ("chat", DRAWN | {"tool_choice": NAMED, "seed": 2}), num_pages=NUM_PAGES, call_form="gemma"
    )
    assert check_calls(reply[0]["choices"][0]["message"]["tool_calls"]) == ["order"]


CALLED = [
    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome","days":2}'}},
    {"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}},
]
TURNS = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": None, "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "a", "content": "noon"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "rain"}]},
]


def test_a_result_follows_its_call_in_the_prompt(plain: Path) -> None:
    server = server_of(plain, num_pages=NUM_PAGES)

    async def prompts(*chats: list[dict[str, Any]]) -> list[Any]:
        try:
            bodies = [json.dumps({"model": MODEL, "messages": c, "tools": TOOLS}).encode() for c in chats]
            return await asyncio.gather(*map(server.tokenize, bodies), return_exceptions=True)
        finally:
            await server.stop()

    user, asked, first, second = TURNS
    again = [*TURNS, {"role": "assistant", "content": "ok"}, user, *TURNS[1:]]
    wrong = [[user, asked, first], [user, asked, first, user], [user, asked, first, first], [user, first]]
    found, turned, _, *refused = asyncio.run(prompts(TURNS, [user, asked, second, first], again, *wrong))
    text = server.served.tokenizer.decode(found["tokens"])
    assert text.index("rain") < text.index("noon"), "the template shows no ids: the order tells them apart"
    assert '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}' in text
    assert '{"name": "now", "arguments": {}}' in text
    assert "The weather to come" in text
    assert turned == found
    assert [error.param for error in refused] == ["messages.1.tool_calls"] * 2 + [
        "messages.3.tool_call_id",
        "messages.1.tool_call_id",
    ]


def test_a_template_that_takes_tools_gets_them_as_it_asks(plain: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tool_folder(plain, tmp_path / "qwen", template=QWEN))
    function = {"name": "now", "arguments": {}}
    turns = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "noon", "tool_call_id": "a"},
    ]
    shown = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    text = chat_text(tokenizer, turns, tools=shown).plain
    assert "TOOLS " + json.dumps(shown[0]) in text
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text
    assert "RESULT noon" in text
    assert "You may call functions" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_client_holds_a_conversation_of_two_turns_with_tools(plain: Path, stream: bool) -> None:
    async def turn(client: openai.AsyncOpenAI, **fields: Any) -> Any:
        asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 70, "temperature": 1.0, "seed": 4}
        if not stream:
            return (await client.chat.completions.create(**asked, **fields)).choices[0]
        try:
            async with client.chat.completions.stream(**asked, **fields) as events:
                return (await events.get_final_completion()).choices[0]
        except openai.LengthFinishReasonError as cut:  # the client's way to say that a text was cut
            return cut.completion.choices[0]

    async def conversation(server: LocalServer) -> None:
        client = openai_client(server)
        messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
        choice = await turn(client, messages=messages, tool_choice="required")
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        choice = await turn(client, messages=messages)
        assert choice.finish_reason in ("stop", "length") and choice.message.content
        messages += [choice.message, {"role": "user", "content": "Thanks"}]
        assert (await turn(client, messages=messages)).message.content

    async def scenario() -> None:
        server = server_of(plain, num_pages=NUM_PAGES)
        try:
            await conversation(server)
        finally:
            await server.stop()

    asyncio.run(scenario())


WANTS = {
    "text": "It rains.",
    "call": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    "two": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "order", "arguments": '
    '{"items": ["cups"]}}\n</tool_call>',
    "wrong": 'So <tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 0}}\n</tool_call> bye',
    "unclosed": '<tool_call> {"name": "now"',
}


def wanting(script: str, tokenizer: Any) -> Callable[..., Any]:
    """A picker of a model that wants to say `script`: the longest allowed token that goes on with it."""
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]

    def picker(row: Any, buffer: Any, vocab: Any) -> Callable[..., AllowedToken]:
        left = script[len(tokenizer.decode(row.guide._decided_tokens)) :]

        def pick(i: int, allowed_V: Any) -> AllowedToken:
            fits = [t for t, text in enumerate(texts) if text and left.startswith(text) and allowed_V[t]]
            likely = fits or ([1] if allowed_V[1] else np.flatnonzero(allowed_V).tolist())
            return AllowedToken(max(likely, key=lambda t: len(texts[t]) if t != 1 else 0), -1.0, False)

        return pick

    return picker


@pytest.mark.parametrize("wants", WANTS)
def test_under_auto_the_model_decides_and_what_it_calls_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wants: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(steering, "_picker", wanting(WANTS[wants], tokenizer))
    fields = {"tools": TOOLS, "max_tokens": 200, "return_token_ids": True}
    whole, events = asked_of(folder, ("chat", fields), ("chat", fields | {"stream": True}))
    choice = whole[0]["choices"][0]
    message, called = choice["message"], "tool_calls" in choice["message"]
    assert choice["finish_reason"] == ("tool_calls" if called else "stop")
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    assert joined(events) == (message["content"] or "", calls)
    assert check_calls(message.get("tool_calls", ())) == [name for name, _ in calls]
    expected = {
        "text": ("It rains.", []),
        "call": ("Let me see.", [("weather", '{"city": "Oslo", "days": 3}')]),
        "two": (None, [("now", "{}"), ("order", '{"items": ["cups"]}')]),
    }
    if wants in expected:
        assert (message["content"], calls) == expected[wants]
    else:
        assert len(calls) == 1
    mark = tokenizer.get_added_vocab().get("<tool_call>")
    if mark is not None and wants in expected:
        assert choice["token_ids"].count(mark) == len(calls), "a mark that is a token is written as that"
        assert choice["token_ids"] == tokenizer.encode(WANTS[wants], add_special_tokens=False)


TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN}}
BESIDE_A_FORM = {
    '{"town": "Oslo"}': ('{"town": "Oslo"}', []),
    '{"town": "<tool_call>"}': ('{"town": "<tool_call>"}', []),  # no call
    WANTS["two"]: (None, [("now", "{}"), ("order", '{"items": ["cups"]}')]),
}


@pytest.mark.parametrize("wants", BESIDE_A_FORM)
def test_an_answer_with_tools_and_a_form_is_calls_or_text_of_the_form(
    plain: Path, monkeypatch: pytest.MonkeyPatch, wants: str
) -> None:
    monkeypatch.setattr(steering, "_picker", wanting(wants, AutoTokenizer.from_pretrained(plain)))
    fields = {"tools": TOOLS, "max_tokens": 200, "response_format": FORM}
    whole, events = asked_of(plain, ("chat", fields), ("chat", fields | {"stream": True}))
    message = whole[0]["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    assert (message["content"], calls) == BESIDE_A_FORM[wants]
    assert joined(events) == (message["content"] or "", calls)


def test_a_form_does_not_bend_what_the_model_draws(folder: Path) -> None:
    """Drawn answers are calls that fit, or text that does; where a call must come, the form has no effect."""
    fields = DRAWN | {"response_format": FORM, "n": 2}
    free, must = asked_of(folder, ("chat", fields), ("chat", fields | {"tool_choice": NAMED}))
    for choice in free[0]["choices"]:
        message = choice["message"]
        check_calls(message.get("tool_calls", ()))
        if message["content"] is not None:
            jsonschema.validate(json.loads(message["content"]), TOWN)
    assert all(check_calls(choice["message"]["tool_calls"]) == ["order"] for choice in must[0]["choices"])
    assert (
        "response_format has no effect: tool_choice asks for a call, and the answer is no text"
        in must[0]["mbd"]["notes"]
    )


@pytest.mark.parametrize("number", [1, 12, 57])
def test_a_call_is_never_cut(plain: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(steering, "_picker", wanting(WANTS["call"], AutoTokenizer.from_pretrained(plain)))
    [objects] = asked_of(plain, ("chat", {"tools": TOOLS, "max_tokens": number, "return_token_ids": True}))
    choice = objects[0]["choices"][0]
    assert len(choice["token_ids"]) <= number
    assert "tool_calls" not in choice["message"], "there is no room for one"
    assert "<tool_call>" not in choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")


def test_a_call_that_is_aborted_says_so(plain: Path) -> None:
    """Its arguments are not whole, so the answer does not end as one with calls."""
    city = {"type": "object", "properties": {"city": {"type": "string", "minLength": 150}}, "required": ["city"]}
    fields = {
        "tools": [tool("weather", parameters=city)],
        "tool_choice": "required",
        "max_tokens": 400,
        "stream": True,
    }
    server = server_of(plain, num_pages=NUM_PAGES)

    async def scenario() -> list[str]:
        answer = await server.chat(json.dumps({"model": MODEL} | ROUTES["chat"] | fields | {"stream": True}).encode())
        reasons, aborted = [], False
        async for event in answer.events(lambda error: ApiError(500, str(error))):
            if event.startswith("data: {"):
                (choice,) = json.loads(event.removeprefix("data: "))["choices"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                if choice["delta"].get("tool_calls") and not aborted:
                    aborted = await server.service.engine.abort_all() > 0
        await server.stop()
        return reasons

    assert asyncio.run(asyncio.wait_for(scenario(), LIMIT)) == ["abort"]
