"""Thoughts over the API: a field of their own beside the content, whole and streamed, and counted."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from call_templates import OPENS_THOUGHTS, TEMPLATES
from chat_templates import tool_folder
from local_server import MODEL, answers, server_of

NUM_PAGES = 256
MAY_THINK = TEMPLATES["hermes"].replace("{{ m['content'] if", "{{ m['content'].split('</think>')[-1] if")
FLAG = {"type": "json_schema", "json_schema": {"name": "flag", "schema": {"type": "boolean"}}}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def opening(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompt opens thoughts."""
    return tool_folder(tiny_model_dir, tmp_path_factory.mktemp("opens") / "model", template=OPENS_THOUGHTS)


def streamed(events: list[dict[str, Any]], name: str) -> str:
    return "".join(e["choices"][0]["delta"].get(name) or "" for e in events if e["choices"])


def test_thoughts_come_beside_the_content_and_a_grammar_begins_behind_them(opening: Path) -> None:
    asked = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
    must = asked | {"tools": [NOW], "tool_choice": "required", "max_tokens": 120}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    free, whole, events, called = answers(
        opening,
        ("chat", asked),
        ("chat", asked | {"response_format": FLAG}),
        ("chat", asked | {"response_format": FLAG} | usage),
        ("chat", must),
        num_pages=NUM_PAGES,
    )
    message = free[0]["choices"][0]["message"]
    assert message["reasoning"] and message["reasoning"] == message["reasoning_content"]
    assert message["content"] == "" and free[0]["choices"][0]["finish_reason"] == "length"
    assert free[0]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 60}
    message = whole[0]["choices"][0]["message"]
    assert json.loads(message["content"]) in (True, False)
    assert "</think>" not in message["reasoning"]
    details = whole[0]["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole[0]["usage"]["completion_tokens"]
    assert streamed(events, "content") == message["content"]
    assert streamed(events, "reasoning") == streamed(events, "reasoning_content") == message["reasoning"]
    assert events[-1]["usage"]["completion_tokens_details"] == details
    choice = called[0]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_the_budget_cuts_thoughts_beside_tools_that_need_not_be_called(opening: Path) -> None:
    asked = {"max_tokens": 2, "temperature": 1.0, "seed": 3}
    free, beside = answers(opening, ("chat", asked), ("chat", asked | {"tools": [NOW]}), num_pages=NUM_PAGES)
    for objects in (free, beside):
        assert objects[0]["choices"][0]["finish_reason"] == "length"
        assert objects[0]["usage"]["completion_tokens"] == 2


def test_frames_add_no_tokens_of_thoughts(opening: Path) -> None:
    asked = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "frames": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    [events] = answers(opening, ("chat", asked | usage), num_pages=NUM_PAGES)
    assert sum("frame" in event for event in events) > 0
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 60}


def test_an_answer_continues_the_open_thoughts_of_the_last_message(opening: Path) -> None:
    user = {"role": "user", "content": "Is it?"}
    open_, ended = "<think>\nLet me see" + " and see" * 20, "<think>\nLet me.</think>\n\nIt"
    drawn = {"continue_final_message": True, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    asked = [{"messages": [user, {"role": "assistant", "content": text}]} | drawn for text in (open_, ended)]
    [goes_on], [answers_] = answers(opening, *(("chat", body) for body in asked), num_pages=NUM_PAGES)
    message = goes_on["choices"][0]["message"]
    assert message["reasoning"] and not message["content"]
    message = answers_["choices"][0]["message"]
    assert message["content"] and not message.get("reasoning")


def test_a_stop_string_in_thoughts_ends_nothing(opening: Path) -> None:
    asked = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    [free] = answers(opening, ("chat", asked), num_pages=NUM_PAGES)
    thoughts = free[0]["choices"][0]["message"]["reasoning"]
    [again] = answers(opening, ("chat", asked | {"stop": thoughts[3:6]}), num_pages=NUM_PAGES)
    assert again[0]["choices"] == free[0]["choices"]


def test_a_model_that_may_think_and_does_not_answers_as_before(tiny_model_dir: Path, tmp_path: Path) -> None:
    may = tool_folder(tiny_model_dir, tmp_path / "may", template=MAY_THINK)
    plain = tool_folder(tiny_model_dir, tmp_path / "plain", template=TEMPLATES["hermes"])
    [[own]], [[other]] = (answers(folder, ("chat", {"max_tokens": 20})) for folder in (may, plain))
    assert own["choices"] == other["choices"] and own["usage"] == other["usage"]


def test_a_response_has_an_item_of_reasoning(opening: Path) -> None:
    server = server_of(opening, num_pages=NUM_PAGES)
    form = {"format": {"type": "json_schema", "name": "flag", "schema": {"type": "boolean"}}}
    body = {"model": MODEL, "input": "?", "max_output_tokens": 60, "text": form, "temperature": 1.0, "seed": 3}

    async def scenario() -> tuple[Any, list[Any]]:
        try:
            whole = await (await server.respond(json.dumps(body).encode())).whole()
            answer = await server.respond(json.dumps(body | {"stream": True}).encode())
            groups = [group async for group in answer.event_groups(lambda error: pytest.fail(str(error)))]
            return whole, [json.loads(e.partition("data: ")[2]) for group in groups for e in group]
        finally:
            await server.stop()

    whole, events = asyncio.run(scenario())
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    said = "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta")
    assert said == whole["output"][0]["content"][0]["text"]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
    assert last["output"][1]["content"][0]["text"] == whole["output"][1]["content"][0]["text"]
