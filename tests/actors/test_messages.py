"""`/v1/messages` over HTTP: the chat's answers in blocks and events, counts, keys, limits, Anthropic's errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from call_templates import OPENS_THOUGHTS
from chat_templates import QWEN, tool_folder
from gateway_in_process import running_gateway
from jsonschema import Draft202012Validator

from actors.serving.args import ServingArgs
from mbd_core.serving.api.openapi import openapi_document

LIMIT = 300
MODEL, THINKS = "tiny", "thinks"
ANN, BEN = "ann-0123456789abcdef", "ben-0123456789abcdef"
USER = {"role": "user", "content": "Tom has 3 apples."}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather to come", "input_schema": SCHEMA}
FUNCTION = {"name": "weather", "description": "The weather to come", "parameters": SCHEMA}
DRAWN = {"model": THINKS, "temperature": 1.0, "seed": 3, "max_tokens": 60}
FLAG = {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}


@pytest.fixture(scope="module")
def url(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("served")
    (root / "keys").write_text(f"ann {ANN}\nben {BEN} administrator\n")
    folders = {MODEL: QWEN, THINKS: OPENS_THOUGHTS}
    engine = {"max_rows": 2, "num_pages": 256}
    models = [
        {
            "model": str(tool_folder(tiny_model_dir, root / name, template=template)),
            "name": name,
            "engine": engine,
            "max_waiting": 1,
        }
        for name, template in folders.items()
    ]
    limits = {"api_keys": str(root / "keys"), "client_requests": 2, "body_bytes": 50_000}
    with running_gateway(ServingArgs.read({"device": "cpu", "models": models, **limits})) as (url, _):
        yield url


def post(url: str, path: str = "/v1/messages", *, key: str = ANN, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 40, "messages": [USER]} | fields
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "x-request-id": "req-1"}
    return httpx.post(url + path, json=body, headers=headers, timeout=LIMIT)


def ask(url: str, **fields: Any) -> dict[str, Any]:
    answer = post(url, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    schemas = openapi_document()["components"]
    validator = Draft202012Validator({"components": schemas, "$ref": "#/components/schemas/Message"})
    assert not [error.message for error in validator.iter_errors(body)]
    return body


def chat(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 40} | fields
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {ANN}"}, timeout=LIMIT
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(url: str, **fields: Any) -> list[dict[str, Any]]:
    answer = post(url, stream=True, **fields)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in answer.text.strip().split("\n\n"):
        kind, _, data = text.partition("\ndata: ")
        found.append(json.loads(data))
        assert kind == f"event: {found[-1]['type']}"
    return found


def kinds(stream: list[dict[str, Any]]) -> list[str]:
    """The kinds of events, neighbouring deltas of one block as one."""
    names = [e["delta"]["type"] if e["type"] == "content_block_delta" else e["type"] for e in stream]
    return [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def joined(stream: list[dict[str, Any]], member: str) -> str:
    return "".join(e["delta"].get(member, "") for e in stream if e["type"] == "content_block_delta")


def test_a_message_is_the_chat_s_answer(url: str) -> None:
    system = {"role": "system", "content": "Count."}
    message = ask(url, system=[{"type": "text", "text": "Count.", "cache_control": {"type": "ephemeral"}}])
    choice = (own := chat(url, messages=[system, USER]))["choices"][0]
    assert message["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert message["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[choice["finish_reason"]]
    usage, counted = message["usage"], post(url, "/v1/messages/count_tokens", system="Count.").json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == own["usage"]["prompt_tokens"]
    assert counted == {"input_tokens": own["usage"]["prompt_tokens"]}
    assert usage["output_tokens"] == own["usage"]["completion_tokens"] == message["mbd"]["num_tokens"]


def test_a_prompt_that_was_read_comes_from_the_prefix_cache(url: str) -> None:
    long = [USER | {"content": "Tom has 3 apples. " * 40}]
    first, second = (ask(url, messages=long, max_tokens=4)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > first["cache_read_input_tokens"] == 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


def test_events_come_in_anthropic_s_order(url: str) -> None:
    fields = {"messages": [USER, {"role": "assistant", "content": "So Tom"}], "max_tokens": 30}
    drawn = fields | {"temperature": 1.0, "seed": 5}
    whole, stream = ask(url, **drawn), events(url, **drawn)
    assert kinds(stream) == [
        *("message_start", "ping", "content_block_start", "text_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [joined(stream, "text")] == [block["text"] for block in whole["content"]]
    assert stream[0]["message"]["content"] == [] and stream[0]["message"]["stop_reason"] is None
    assert stream[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert stream[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    tokens = sum(event["type"] == "content_block_delta" for event in stream)
    assert tokens < whole["usage"]["output_tokens"], "tokens that came together are one event"


def test_a_stop_sequence_ends_the_answer_and_is_named(url: str) -> None:
    drawn = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    text = ask(url, **drawn)["content"][0]["text"]
    stop = text[10:13]
    message = ask(url, stop_sequences=["never found", stop], **drawn)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    assert events(url, stop_sequences=[stop], **drawn)[-2]["delta"]["stop_sequence"] == stop


def test_a_call_goes_there_and_its_result_comes_back(url: str) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 200}
    message, stream = ask(url, **fields), events(url, **fields)
    [call] = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert call["input"]["city"] in ("Rome", "Oslo") and call["id"].startswith("toolu_")
    assert "input_json_delta" in kinds(stream) and json.loads(joined(stream, "partial_json")) == call["input"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "12 degrees"}]}
    history = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    answer = ask(url, messages=history, tools=[TOOL], max_tokens=20)
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    own = chat(
        url,
        messages=[
            USER,
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
        ],
        tools=[{"type": "function", "function": FUNCTION}],
        max_tokens=20,
    )
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == own["usage"]["prompt_tokens"]
    counted = post(url, "/v1/messages/count_tokens", messages=history, tools=[TOOL]).json()
    assert counted["input_tokens"] == own["usage"]["prompt_tokens"]


def test_thoughts_are_blocks_before_the_answer_and_are_taken_back(url: str) -> None:
    fields = DRAWN | {"output_config": FLAG, "thinking": {"type": "enabled", "budget_tokens": 59}}
    message, stream = ask(url, **fields), events(url, **fields)
    thinking, text = message["content"]
    assert thinking["thinking"] and thinking["signature"] and json.loads(text["text"]) in (True, False)
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]
    assert kinds(stream)[2:9] == [
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
    ]
    assert joined(stream, "thinking") == thinking["thinking"] and joined(stream, "text") == text["text"]
    brief = ask(url, **fields | {"thinking": {"type": "enabled", "budget_tokens": 7}})
    assert json.loads(brief["content"][1]["text"]) in (True, False)
    num_end = brief["usage"]["output_tokens_details"]["thinking_tokens"] - 7
    assert 1 <= num_end <= len("</think>") and not any("budget" in note for note in brief["mbd"]["notes"])
    hidden = ask(url, **fields | {"thinking": {"type": "adaptive", "display": "omitted"}})
    assert hidden["content"] == [{**thinking, "thinking": ""}, text]
    history = [USER, {"role": "assistant", "content": message["content"]}, USER]
    assert ask(url, model=THINKS, messages=history, max_tokens=4)["content"]


def test_decoding_is_taken_as_a_field_of_its_own(url: str) -> None:
    slow, wrong = {"buffer_size": 1, "tau_m2t": 1.0}, {"buffer_sizes": 1}
    assert ask(url, decoding=slow, max_tokens=16)["mbd"]["tpf"] <= 1.0
    assert post(url, decoding=wrong).json()["error"]["details"]["param"] == "decoding"


def check_error(answer: httpx.Response, status: int, kind: str, code: str | None) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message", "details"}
    assert (body["error"]["type"], body["error"]["details"]["error_code"]) == (kind, code), body
    assert body["request_id"] == answer.headers["request-id"] == "req-1"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_every_fault_has_anthropic_s_shape_and_status(url: str, path: str) -> None:
    headers = {"x-request-id": "req-1", "x-api-key": ANN}

    def send(content: bytes = b"{}", **more: str) -> httpx.Response:
        return httpx.post(url + path, content=content, headers=headers | more, timeout=LIMIT)

    check_error(send(b"{"), 400, "invalid_request_error", "invalid_json")
    check_error(send(), 400, "invalid_request_error", "missing_field")
    check_error(post(url, path, colour=1), 400, "invalid_request_error", "unknown_field")
    check_error(post(url, path, messages=[]), 400, "invalid_request_error", "invalid_value")
    for key in ("", "wrong", ANN[:-1]):
        check_error(post(url, path, key=key), 401, "authentication_error", "invalid_api_key")
    check_error(post(url, path, model="other"), 404, "not_found_error", "model_not_found")
    check_error(httpx.get(url + path, headers=headers, timeout=LIMIT), 405, "invalid_request_error", None)
    check_error(post(url, path, system="a" * 60_000), 413, "request_too_large", "body_too_large")
    check_error(send(**{"content-encoding": "gzip"}), 415, "invalid_request_error", "body_encoded")
    long = [USER | {"content": "word " * 9000}]
    check_error(post(url, path, messages=long), 400, "invalid_request_error", "context_length_exceeded")


def test_a_number_of_tokens_that_does_not_fit_is_a_400(url: str) -> None:
    check_error(post(url, max_tokens=10**6), 400, "invalid_request_error", "context_length_exceeded")
    assert post(url, max_tokens=10**6).json()["error"]["details"]["param"] == "max_tokens"


def test_either_header_has_the_key(url: str) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER]}
    for headers in ({"authorization": f"Bearer {ANN}"}, {"x-api-key": BEN}):
        assert httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=LIMIT).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers=headers, timeout=LIMIT).status_code == 200
    both = {"authorization": "Bearer wrong", "x-api-key": ANN}
    assert httpx.post(f"{url}/v1/messages", json=body, headers=both, timeout=LIMIT).status_code == 401


def test_a_client_at_its_limit_gets_429(url: str) -> None:
    slow = {"decoding": {"buffer_size": 1, "tau_m2t": 1.0}, "max_tokens": 400}
    streams = []
    with httpx.Client(base_url=url, headers={"x-api-key": ANN, "x-request-id": "req-1"}, timeout=LIMIT) as client:
        for _ in range(2):
            body = {"model": MODEL, "messages": [USER], "stream": True} | slow
            streams.append(client.stream("POST", "/v1/messages", json=body))
            streams[-1].__enter__()
        refused = post(url)
        check_error(refused, 429, "rate_limit_error", "too_many_requests")
        assert refused.headers["retry-after"]
        for stream in streams:
            stream.__exit__(None, None, None)
