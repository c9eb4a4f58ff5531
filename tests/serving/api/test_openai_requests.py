"""A body is read on the loop that serves everybody: whatever stands in it, its first mistake is found and no more."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mbd_core.serving.api.chat_fields import MAX_CALLS, MAX_MESSAGES, ChatMessage, ordered_results
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.parsing import (
    MAX_BRACKETS,
    MAX_COMMAS,
    MAX_IDS,
    MAX_QUOTES,
    MOST_PROMPTS,
    Strict,
    parse,
)
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 3000
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**turn: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "assistant", "content": "a"} | turn]}


def refusal(kind: type[Strict], fields: dict[str, Any] | bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, fields if isinstance(fields, bytes) else json.dumps(fields).encode())
    assert caught.value.status == 400
    return caught.value


LISTS: list[tuple[type[Strict], dict[str, Any], str]] = [
    (CompletionRequest, {"model": "m", "prompt": [{}] * MANY}, "prompt"),
    (CompletionRequest, {"model": "m", "prompt": [[{}] * MANY]}, "prompt"),
    (CompletionRequest, {"model": "m", "prompt": [["a"]] * MANY}, "prompt"),
    (CompletionRequest, {"model": "m", "prompt": "a", "stop": [1] * MANY}, "stop"),
    (CompletionRequest, {"model": "m", "prompt": "a", "template": [1] * 250}, "template"),
    (CompletionRequest, {"model": "m", "prompt": "a", "guided_choice": [1] * 900}, "guided_choice.0"),
    (ChatRequest, {"model": "m", "messages": [{}] * MANY}, "messages.0.role"),
    (ChatRequest, chat(content=[{}] * 1000), "messages.0.content"),
    (ChatRequest, chat(tool_calls=[{}] * 100), "messages.0.tool_calls.0.id"),
    (ChatRequest, CHAT | {"tools": [{}] * 100}, "tools.0.type"),
    (TokenizeRequest, {"messages": [{}] * MANY}, "messages.0.role"),
    (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens.0"),
]


@pytest.mark.parametrize(("kind", "fields", "param"), LISTS)
def test_a_list_of_wrong_items_is_a_mistake_and_not_one_for_each(
    kind: type[Strict], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(fields))
    assert caught.value.error_count() < 10
    assert refusal(kind, fields).param == param


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {"model": "m", "prompt": ["a"] * (MOST_PROMPTS + 1)}, "prompt"),
        (CompletionRequest, {"model": "m", "prompt": [[1]] * (MOST_PROMPTS + 1)}, "prompt"),
        (CompletionRequest, {"model": "m", "prompt": [1] * (MAX_IDS + 1)}, "prompt"),
        (CompletionRequest, {"model": "m", "prompt": "a", "stop": ["a"] * 17}, "stop"),
        (ChatRequest, {"model": "m", "messages": CHAT["messages"] * (MAX_MESSAGES + 1)}, "messages"),
        (ChatRequest, chat(tool_calls=[CALL] * (MAX_CALLS + 1)), "messages.0.tool_calls"),
        (ChatRequest, chat(content=[{"type": "text", "text": ""}] * 1025), "messages.0.content"),
        (DetokenizeRequest, {"tokens": [1] * (2**17 + 1)}, "tokens"),
    ],
)
def test_every_list_is_bounded(kind: type[Strict], fields: dict[str, Any], param: str) -> None:
    assert refusal(kind, fields).param == param


def test_a_part_that_is_no_text_is_refused_by_its_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    error = refusal(ChatRequest, chat(content=[{"type": "text", "text": "a"}, image]))
    assert error.param == "messages.0.content" and "images" in error.message


def test_a_long_conversation_and_a_long_prompt_are_taken() -> None:
    assert len(parse(ChatRequest, json.dumps(CHAT | {"messages": CHAT["messages"] * 4096}).encode()).messages) == 4096
    asked = parse(CompletionRequest, json.dumps({"model": "m", "prompt": [1] * 100_000}).encode())
    assert asked.num_prompts == 1 and len(asked.prompts[0]) == 100_000
    assert asked.prompts[0] is asked.prompts[0], "it is not copied each time"


def test_a_body_of_brackets_is_not_built() -> None:
    error = refusal(CompletionRequest, b'{"model": "m", "prompt": "a", "metadata": {"a": [' + b"[]," * MAX_BRACKETS)
    assert (error.code, error.param) == ("invalid_json", None) and f"{MAX_BRACKETS} brackets" in error.message
    error = refusal(CompletionRequest, b'{"model": "m", "prompt": "a", "metadata": {"a": [' + b"1," * (MAX_COMMAS + 1))
    assert error.code == "invalid_json" and f"{MAX_COMMAS} commas" in error.message
    text = '[{\\"[\\,,' * max(MAX_BRACKETS, MAX_COMMAS // 2)
    assert parse(CompletionRequest, json.dumps({"model": "m", "prompt": text}).encode()).prompt == text


@pytest.mark.parametrize("name", ["k{}", "k{}\\\\"])
def test_a_body_of_keys_is_not_built(name: str) -> None:
    keys = ",".join(f'"{name.format(i)}":0' for i in range(MAX_QUOTES // 2))
    for kind, body in (
        (CompletionRequest, '{"model": "m", "prompt": "a", "metadata": {' + keys + "}}"),
        (CompletionRequest, '{"model": "m", "prompt": "a", ' + keys + "}"),
        (ChatRequest, '{"model": "m", "messages": [{"role": "user", "content": "a"}], ' + keys + "}"),
    ):
        error = refusal(kind, body.encode())
        assert (error.code, error.param) == ("invalid_json", None) and f"{MAX_QUOTES} quotes" in error.message


def test_quotes_in_a_text_are_not_counted() -> None:
    text = '"' * (2 * MAX_QUOTES) + '\\"' * MAX_QUOTES
    assert parse(CompletionRequest, json.dumps({"model": "m", "prompt": text}).encode()).prompt == text
    turns = [CHAT["messages"][0] | {"name": "tom"}] * MAX_MESSAGES
    assert len(parse(ChatRequest, json.dumps(CHAT | {"messages": turns}).encode()).messages) == MAX_MESSAGES


def test_many_unknown_fields_are_counted_and_not_listed() -> None:
    few = {"model": "m", "prompt": "a", **{f"x{i}": 0 for i in range(3)}}
    assert refusal(CompletionRequest, few).message == "x0: unknown field"
    for many in (few | {f"x{i}": 0 for i in range(MANY)}, CHAT | {f"x{i}": 0 for i in range(MANY)}):
        error = refusal(CompletionRequest if "prompt" in many else ChatRequest, many)
        assert (error.code, error.message) == ("unknown_field", "more than 1000 mistakes, unknown fields among them")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": "many"}, "must be a valid integer"),
        ({"max_tokens": 0}, "must be greater than or equal to 1"),
        ({"temperature": []}, "must be a valid number"),
        ({"stream": 3}, "must be a valid boolean"),
        ({"model": 3}, "must be a valid string"),
        ({"stream_options": 3}, "must be an object"),
        ({"stop": ["x"] * 99}, "must be a string or a list of at most 16 strings"),
        ({"logit_bias": 3}, "must be an object"),
    ],
)
def test_a_refusal_is_in_our_words(fields: dict[str, Any], message: str) -> None:
    error = refusal(ChatRequest, {**chat(content="x"), **fields})
    assert message in str(error) and " should " not in str(error)


def test_a_value_that_is_refused_is_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written, dumps = list[int](), json.dumps

    def counted(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        written.append(len(text))
        return text

    cases = [({str(i): 0 for i in range(MANY)}, "this value"), ([1] * MANY, "this value"), (2**70, "this value")]
    for value, shown in [*cases, ("a" * MANY, '"aaa'), (0.5, "0.5"), (True, "true")]:
        body = dumps({"model": "m", "prompt": "a", "length_penalty": value}).encode()
        with monkeypatch.context() as patched:
            patched.setattr(json, "dumps", counted)
            error = refusal(CompletionRequest, body)
        assert error.param == "length_penalty" and error.message.startswith(f"length_penalty: {shown}")
        assert error.message.endswith("is not supported; leave it out or give 1")
    assert max(written) < 1000


def test_the_calls_of_a_chat_are_checked_without_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatMessage, "turn", property(lambda message: pytest.fail("a turn was built")))
    assert parse(ChatRequest, json.dumps(CHAT).encode()).messages


def test_calls_with_ids_of_their_own_are_looked_at_once_each() -> None:
    """An id is compared with others only where two are alike."""

    class Id(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Id.compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    ids = [Id(f"call-{i}") for i in range(500)]
    assert ordered_results([ids, *[()] * 500], [None, *ids]) == list(range(501))
    assert Id.compared < 5000
    with pytest.raises(ValueError, match="call-7"):
        ordered_results([[*ids, ids[7]]], [None])
