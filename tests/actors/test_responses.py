"""`/v1/responses` over HTTP, with OpenAI's own client: texts, schemas, calls, events, refusals."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from chat_templates import QWEN, tool_folder
from gateway_in_process import running_gateway

from actors.serving.args import ServingArgs

LIMIT = 300
MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LOGPROBS = "message.output_text.logprobs"
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def url(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tool_folder(tiny_model_dir, tmp_path_factory.mktemp("tools") / MODEL, template=QWEN)
    engine = {"max_rows": 2, "num_pages": 256}
    args = {"device": "cpu", "models": [{"model": str(folder), "name": MODEL, "engine": engine}]}
    with running_gateway(ServingArgs.read(args)) as (url, _):
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
        yield client


def test_a_response_is_the_chat_s_answer(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Count."}, {"role": "user", "content": "Tom has 3 apples."}],
        max_tokens=40,
    )
    response = client.responses.create(
        model=MODEL, instructions="Count.", input="Tom has 3 apples.", max_output_tokens=40, metadata={"a": "b"}
    )
    again = client.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "Count."},
            {"role": "user", "content": [{"type": "input_text", "text": "Tom has 3 apples."}]},
        ],
        max_output_tokens=40,
    )
    assert response.output_text == again.output_text == chat.choices[0].message.content
    assert chat.usage is not None and response.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    assert (response.model_extra or {})["store"] is False and response.metadata == {"a": "b"}
    assert (response.model_extra or {})["mbd"]["num_tokens"] == response.usage.output_tokens


def order(kinds: list[str]) -> list[str]:
    """Kinds of events, repetitions of one left out."""
    return [kind for number, kind in enumerate(kinds) if kinds[number - 1 : number] != [kind]]


def test_events_come_in_openai_s_order(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Tom has 3 apples.", "max_output_tokens": 40}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert order([event.type.removeprefix("response.") for event in events]) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", whole.status),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == whole.output_text == last.response.output_text
    assert last.response.usage == whole.usage
    with client.responses.stream(**fields) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == text


def test_log_probabilities_are_the_chat_s(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tom has 3 apples."}],
        max_tokens=40,
        logprobs=True,
        top_logprobs=2,
    )
    fields: Any = {"model": MODEL, "max_output_tokens": 40, "top_logprobs": 2}
    fields["include"] = [LOGPROBS, "reasoning.encrypted_content"]
    response = client.responses.create(input="Tom has 3 apples.", **fields)
    events: list[Any] = list(client.responses.create(input="Tom has 3 apples.", stream=True, **fields))
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    wanted = [entry.model_dump() for entry in logprobs.content]
    part: Any = response.output[0]
    assert [entry.model_dump() for entry in part.content[0].logprobs] == wanted
    last = events[-1].response.output[0].content[0].logprobs
    done = next(event for event in events if event.type == "response.output_text.done")
    deltas = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
    assert [entry.model_dump() for entry in last] == wanted and len(done.logprobs) == len(wanted)
    assert [e.token for e in deltas] == [e["token"] for e in wanted][: len(deltas)] and deltas
    again: Any = [{"role": "user", "content": "Tom has 3 apples."}, *response.output, {"role": "user", "content": "x"}]
    assert client.responses.create(model=MODEL, input=again, max_output_tokens=4).usage is not None


def test_a_call_goes_there_and_its_result_comes_back(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    response = client.responses.create(input="Weather?", max_output_tokens=200, **fields)
    (call,) = response.output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(client.responses.create(input="Weather?", max_output_tokens=200, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert order([event.type.removeprefix("response.") for event in events]) == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    last: Any = events[-1]
    assert last.response.output[0].arguments == call.arguments
    conversation: Any = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_none=True) for item in response.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"},
    ]
    answer = client.responses.create(model=MODEL, input=conversation, tools=[TOOL], max_output_tokens=20)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": call.arguments}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        max_tokens=20,
    )
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == (chat.choices[0].message.content or "")


def test_a_schema_holds_the_text(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    response = client.responses.create(model=MODEL, input="Where?", text={"format": form}, max_output_tokens=200)
    assert json.loads(response.output_text)["city"] in ("Rome", "Oslo")


def test_truncation_is_taken_and_an_input_that_does_not_fit_is_refused_under_either(url: str) -> None:
    """As clients send it: OpenAI's `auto` would drop items, and here none is dropped unsaid."""
    for value in ("auto", "disabled"):
        body = {"model": MODEL, "truncation": value, "max_output_tokens": 8}
        answer = httpx.post(f"{url}/v1/responses", json={**body, "input": "a"}, timeout=LIMIT)
        assert answer.status_code == 200 and answer.json()["truncation"] == value
        long = httpx.post(f"{url}/v1/responses", json={**body, "input": "word " * 4000}, timeout=LIMIT)
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"


def test_effort_and_verbosity_are_taken_as_in_a_chat(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Tom has 3 apples.", "max_output_tokens": 20}
    wishes: Any = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"}}
    plain, noted = (client.responses.create(**fields, **more) for more in ({"text": {"verbosity": "medium"}}, wishes))
    assert plain.output_text == noted.output_text
    verbosity, effort = (noted.model_extra or {})["mbd"]["notes"]
    assert effort.startswith("reasoning_effort has no effect") and verbosity.startswith("verbosity has no effect")
    assert "notes" not in (plain.model_extra or {})["mbd"]
    question: Any = [{"role": "user", "content": fields["input"]}]
    chat = client.chat.completions.create(model=MODEL, messages=question, max_tokens=20, verbosity="high")
    assert (chat.choices[0].message.content, (chat.model_extra or {})["mbd"]["notes"]) == (
        plain.output_text,
        [verbosity],
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_serch"}]}, "tools.0"),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0.type"),
        ({"colour": 1}, "colour"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "a little"}}, "reasoning.effort"),
        ({"include": ["everything"]}, "include.0"),
        ({"include": [LOGPROBS], "tools": [TOOL]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(url: str, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "a"} | fields, timeout=LIMIT)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")


def test_ping_says_what_ready_says(url: str) -> None:
    ping, ready = (httpx.get(f"{url}/{route}", timeout=LIMIT) for route in ("ping", "ready"))
    assert (ping.status_code, ping.json()) == (ready.status_code, ready.json()) == (200, ping.json())


def test_docs_has_every_route_and_loads_nothing(url: str) -> None:
    page = httpx.get(f"{url}/docs", timeout=LIMIT)
    paths = httpx.get(f"{url}/openapi.json", timeout=LIMIT).json()["paths"]
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert all(html.escape(path) in page.text for path in paths)
    assert not re.search(r"<script|<link|src=|https?://", page.text)
