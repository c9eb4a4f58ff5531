"""The blocks of `/v1/messages` from a stream of any pieces: the same as those of the whole text read at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from mbd_core.calls.answer_reader import AnswerReader
from mbd_core.calls.forms import HERMES
from mbd_core.calls.reader import CallReader, TextPiece
from mbd_core.calls.thoughts import THOUGHT_FORMS, Thoughts
from mbd_core.serving.api.errors import api_error
from mbd_core.serving.api.messages import MessagesRequest
from mbd_core.serving.server.answer import ServedAnswer
from mbd_core.serving.server.call_input import LARGEST
from mbd_core.serving.server.message_answer import SIGNATURE, MessageAnswer, MessageBuilder

USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
THOUGHTS = Thoughts(THOUGHT_FORMS[0], is_open=True)
WORDS = st.text(alphabet='ab <>/\n"{}é\U0001f600tool_', max_size=12)


def chunk(piece: TextPiece) -> dict[str, Any]:
    delta = {"content": piece.content, "reasoning": piece.reasoning, "tool_calls": piece.calls}
    return {"choices": [{"delta": delta, "finish_reason": None}], "usage": USAGE}


def built(pieces: Sequence[str], steps: Sequence[int], reason: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message and the events of a text that comes in pieces; `steps` says how many come together."""
    reader = AnswerReader(THOUGHTS.reader(), CallReader(HERMES, {"f": SCHEMA}))
    builder, events, chunks = MessageBuilder("m"), list[dict[str, Any]](), [chunk(TextPiece())]
    events += builder.take(chunks)
    rest = [chunk(reader.push(text, ends=i == len(pieces) - 1)) for i, text in enumerate(pieces)]
    for size in steps:
        events += builder.take(rest[:size])
        rest = rest[size:]
    rest.append({"choices": [{"delta": {}, "finish_reason": reason, "stop_reason": None}], "usage": USAGE})
    rest.append({"choices": [], "usage": USAGE, "mbd": {"num_tokens": 5}})
    events += builder.take(rest)
    events += builder.end()
    message: Any = builder.message
    for block in message["content"]:
        block.pop("id", None)
    return message, events


def folded(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, as a client puts them together; it checks the order of the events."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    is_open = False
    for event in events[2:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert not is_open and index == len(blocks)
            blocks.append({**event["content_block"]})
            is_open = True
            continue
        assert is_open and index == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        delta = event["delta"]
        kind, member = {
            "text_delta": ("text", "text"),
            "thinking_delta": ("thinking", "thinking"),
            "signature_delta": ("thinking", "signature"),
            "input_json_delta": ("tool_use", "partial_json"),
        }[delta["type"]]
        assert blocks[-1]["type"] == kind and delta[member]
        if kind == "tool_use":
            texts[index] = texts.get(index, "") + delta[member]
        else:
            blocks[-1][member] += delta[member]
    assert not is_open
    for index, text in texts.items():
        blocks[index]["input"] = json.loads(text)
    for block in blocks:
        block.pop("id", None)
    return blocks


@given(
    thought=WORDS,
    text=WORDS,
    calls=st.lists(st.dictionaries(st.just("a"), WORDS), max_size=3),
    data=st.data(),
)
def test_any_split_gives_the_blocks_of_the_whole(
    thought: str, text: str, calls: list[dict[str, str]], data: st.DataObject
) -> None:
    written = [f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(call)}}}\n</tool_call>' for call in calls]
    whole = f"{thought.replace('</think>', '')}</think>\n\n{text.replace('<tool_call>', '')}" + "\n".join(written)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(whole) - 1, 1)), max_size=20)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    steps = data.draw(st.lists(st.integers(0, 4), max_size=12))
    reason = "tool_calls" if calls else "stop"
    expected, _ = built([whole], [], reason)
    message, events = built(pieces, steps, reason)
    assert message["content"] == folded(events) == expected["content"]
    assert [b["input"] for b in message["content"] if b["type"] == "tool_use"] == calls
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")


def chat_chunk(reason: str, stop: Any = None, **delta: Any) -> list[dict[str, Any]]:
    ends = {"choices": [{"delta": {}, "finish_reason": reason, "stop_reason": stop}], "usage": USAGE}
    return [
        {"choices": [{"delta": delta, "finish_reason": None}], "usage": USAGE},
        ends,
        {**ends, "choices": [], "mbd": {}},
    ]


@pytest.mark.parametrize(
    ("reason", "stop", "shown"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "x", ("stop_sequence", "x")),
        ("stop", 7, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("abort", None, ("pause_turn", None)),
    ],
)
def test_why_it_ended(reason: str, stop: Any, shown: tuple[str, str | None]) -> None:
    builder = MessageBuilder("m")
    events = [*builder.take(chat_chunk(reason, stop, content="a")), *builder.end()]
    assert (builder.message["stop_reason"], builder.message["stop_sequence"]) == shown
    assert events[-2]["delta"] == {"stop_reason": shown[0], "stop_sequence": shown[1]}


def test_an_answer_without_text_has_an_empty_one_if_it_ended_by_itself() -> None:
    for reason, kinds in (("stop", ["thinking", "text"]), ("length", ["thinking"])):
        builder = MessageBuilder("m")
        events = [*builder.take(chat_chunk(reason, reasoning="a")), *builder.end()]
        assert [block["type"] for block in builder.message["content"]] == kinds
        assert len(folded(events)) == len(kinds)


def test_omitted_thoughts_have_a_block_and_no_text() -> None:
    builder = MessageBuilder("m", shows_thoughts=False)
    events = [*builder.take(chat_chunk("stop", reasoning="a", content="b")), *builder.end()]
    thinking = {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert builder.message["content"] == folded(events) == [thinking, {"type": "text", "text": "b"}]


def test_an_ended_call_has_the_part_of_its_arguments() -> None:
    builder = MessageBuilder("m")
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "b", "c": "d'},
    }
    _ = [*builder.take(chat_chunk("abort", tool_calls=[call])), *builder.end()]
    assert builder.message["content"] == [
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b", "c": "d"}}
    ]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    class Failing:
        streamed = True

        async def chunks(self) -> AsyncIterator[list[Any]]:
            yield chat_chunk("stop", content="a")[:1]
            raise KeyError("secret")

    request = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "a"}]}
    )
    answer = MessageAnswer(request, cast(ServedAnswer, Failing()), request_id="req-1")

    async def scenario() -> list[str]:
        return [text async for group in answer.event_groups(api_error) for text in group]

    *_, last = asyncio.run(scenario())
    kind, _, data = last.strip().partition("\ndata: ")
    body = json.loads(data)
    assert kind == "event: error" and body["type"] == "error" and body["request_id"] == "req-1"
    assert body["error"]["type"] == "api_error" and "secret" not in last


def test_cached_tokens_count_apart() -> None:
    builder = MessageBuilder("m")
    details = {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2}}
    chunks = chat_chunk("stop", content="a")
    chunks[-1]["usage"] = USAGE | details
    start, *_ = builder.take(chunks)
    assert start["message"]["usage"]["input_tokens"] == 9
    _ = list(builder.end())
    assert builder.message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ('{"a": 1e999, "b": [-1e999, 1.5]}', {"a": LARGEST, "b": [-LARGEST, 1.5]}),
        (f'{{"a": {"9" * 5000}, "b": -{"9" * 5000}, "c": {10**400}}}', {"a": LARGEST, "b": -LARGEST, "c": 10**400}),
        ('{"a": Infinity, "b": NaN}', {"a": LARGEST, "b": None}),
        (r'{"a": "\ud83d\ude00 \ud83d \\ud83d \udE00\n"}', {"a": "\U0001f600 \ufffd \\ud83d \ufffd\n"}),
        (f'{{"a": {"[" * 300}{"]" * 300}}}', None),
        ('{"a": 1e999, "b": "c', {"a": LARGEST, "b": "c"}),
        (f'{{"a": {"9" * 5000}', {}),
        (f'{{"a": {"[" * 300}', {}),
    ],
)
def test_any_arguments_have_an_object_that_a_reply_can_hold(text: str, value: Any) -> None:
    builder = MessageBuilder("m")
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": text}}
    _ = [*builder.take(chat_chunk("tool_calls", tool_calls=[call])), *builder.end()]
    [block] = builder.message["content"]
    assert value is None or block["input"] == value
    JSONResponse(block)
