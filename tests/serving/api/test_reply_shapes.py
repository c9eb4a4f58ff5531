"""What the endpoint answers is what its OpenAPI document says: all required members, and no others."""

from pathlib import Path
from typing import Any

import jsonschema
from call_templates import OPENS_THOUGHTS
from chat_templates import tool_folder
from local_server import answers

from mbd_core.serving.api.openapi import openapi_document
from mbd_core.serving.api.replies import Reply

DETAILS = {"return_token_ids": True, "return_step_map": True}
TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
CALLS = {"tools": [TOOL], "tool_choice": "required", "return_token_ids": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("complete", {"logprobs": 0, "temperature": 1.0, **DETAILS}),
    ("complete", {"template": [{"hole": 2}, " pens"], "max_tokens": None, **DETAILS}),
    ("complete", {"echo": True, "logprobs": 1, "max_tokens": 1}),
    ("chat", {"logprobs": True, "n": 2, **DETAILS}),
    ("chat", CALLS),
    ("complete", {**USAGE, "logprobs": 0, **DETAILS}),
    ("complete", {"stream": True, "template": [{"hole": 2}, " pens"], "max_tokens": None, **DETAILS}),
    ("chat", {"stream": True, "logprobs": True, **DETAILS}),
    ("chat", {**USAGE, **CALLS}),
    ("complete", {"stream": True, "resumable": True, "temperature": 1.0}),
]


def closed(shape: Any) -> Any:
    """The shape without room for other members."""
    if isinstance(shape, list):
        return [closed(part) for part in shape]
    if not isinstance(shape, dict):
        return shape
    inner = {name: closed(part) for name, part in shape.items()}
    return inner | (
        {"additionalProperties": False} if "properties" in shape and "additionalProperties" not in shape else {}
    )


def errors(shape: str, found: dict[str, Any]) -> list[str]:
    document = openapi_document()
    components = {"schemas": closed(document["components"]["schemas"])}
    validator = jsonschema.Draft202012Validator({"components": components, "$ref": f"#/components/schemas/{shape}"})
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(found)]


def test_answers_and_events_are_of_the_document(tiny_model_dir: Path, tmp_path: Path) -> None:
    seen: set[str] = set()
    thinks = tool_folder(tiny_model_dir, tmp_path / "thinks", template=OPENS_THOUGHTS)
    of_thoughts = [("chat", {"max_tokens": 4}), ("chat", {"max_tokens": 4, "stream": True})]
    replies = [*answers(tiny_model_dir, *ASKED), *answers(thinks, *of_thoughts)]
    for (route, fields), objects in zip([*ASKED, *of_thoughts], replies, strict=True):
        assert isinstance(objects, list), objects
        for found in objects:
            assert not errors("Chunk" if fields.get("stream") else "Completion", found), f"{route} {fields}: {found}"
            for choice in found["choices"]:
                seen |= choice.keys() | choice.get("message", {}).keys() | choice.get("delta", {}).keys()
    schemas = openapi_document()["components"]["schemas"]
    described = {
        name for shape in ("Choice", "ChunkChoice", "AnswerMessage", "Delta") for name in schemas[shape]["properties"]
    }
    assert seen == described, "every member was seen"


def test_a_member_that_is_not_described_is_found() -> None:
    reply = Reply(id="a", created=1, model="m", chat=False)
    chunk = reply.chunk(0, text="a")
    assert not errors("Chunk", chunk)
    assert errors("Chunk", chunk | {"more": 1}) and errors("Chunk", {k: v for k, v in chunk.items() if k != "id"})


def test_a_message_that_litellm_sends_back_is_taken(tiny_model_dir: Path) -> None:
    first = {"role": "user", "content": "Tom has 3 apples."}
    said = {"role": "assistant", "content": "so", "tool_calls": None, "function_call": None}
    for more in ({"refusal": None}, {}):
        messages = [first, {**said, "provider_specific_fields": more}, first]
        ((answer,),) = answers(tiny_model_dir, ("chat", {"messages": messages, "max_tokens": 4}))
        assert answer["object"] == "chat.completion"
