"""The JSON shapes of what the endpoint answers, as the components of its OpenAPI document.

Members that an answer always has are required; the others are there where they were asked for, or have a value.
"""

from dataclasses import fields
from typing import Any

from mbd_core.decoding.request import Counts

ENDS = ["stop", "length", "tool_calls", "abort"]
COMPONENTS = "#/components/schemas/{model}"
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
STRING_OR_NULL = {"type": ["string", "null"]}
INTEGERS, NUMBERS, STRINGS = ({"type": "array", "items": item} for item in (INTEGER, NUMBER, STRING))

Shape = dict[str, Any]


def _refer(shape: str) -> Shape:
    return {"$ref": COMPONENTS.format(model=shape)}


def _array(shape: str) -> Shape:
    return {"type": "array", "items": _refer(shape)}


def _object(required: dict[str, Shape], more: dict[str, Shape] | None = None, description: str = "") -> Shape:
    shape: Shape = {"type": "object", "required": list(required), "properties": {**required, **(more or {})}}
    return {"description": description, **shape} if description else shape


_OF_TOKENS = {
    "token_ids": INTEGERS,
    "prompt_token_ids": INTEGERS,
    "rollout": _refer("RolloutFields"),
    "holes": STRINGS,
}
_HEAD = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
_LOGPROBS: Shape = {"type": ["object", "null"]}

ANSWERS: dict[str, Shape] = {
    "Answer": _object(
        {
            **_HEAD,
            "object": {"enum": ["chat.completion", "text_completion"]},
            "choices": {**_array("Choice"), "minItems": 1},
            "usage": _refer("Usage"),
            "mbd": _refer("Measures"),
        }
    ),
    "Choice": _object(
        {"index": INTEGER, "finish_reason": {"enum": ENDS}, "logprobs": _LOGPROBS},
        {"message": _refer("AnswerMessage"), "text": STRING, **_OF_TOKENS},
        "`message` in a chat, `text` in a completion.",
    ),
    "AnswerMessage": _object(
        {"role": {"const": "assistant"}, "content": STRING_OR_NULL, "refusal": {"type": "null"}},
        {"tool_calls": _array("AnswerCall")},
    ),
    "AnswerCall": _object(
        {
            "id": STRING,
            "type": {"const": "function"},
            "function": _object({"name": STRING, "arguments": STRING}),
        },
        {"index": INTEGER},
    ),
    "RolloutFields": _object(
        {"step_map": INTEGERS, "logprobs": NUMBERS},
        {"terminal": _object({"token_ids": INTEGERS, "step_map": INTEGERS, "logprobs": NUMBERS})},
        "`terminal` is the rest of the answer's last block, in the whole answer and in a stream's last piece.",
    ),
    "Usage": _object(
        {
            "prompt_tokens": INTEGER,
            "completion_tokens": INTEGER,
            "total_tokens": INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": INTEGER}),
        }
    ),
    "Measures": _object(
        {
            **{field.name: INTEGER for field in fields(Counts) if field.name != "decode_seconds"},
            "decode_seconds": NUMBER,
            "tpf": NUMBER,
            "oldest_weights": INTEGER,
            "newest_weights": INTEGER,
        },
        {"seed": INTEGER, "speed": NUMBER},
        "Sums over the choices; `tpf` is their tokens per forward.",
    ),
    "Event": _object(
        {"data": STRING},
        {"event": STRING},
        "An event of a stream: as text a Chunk, an Error, or [DONE]. The data of an event of type `frame`, where "
        "`frames` was asked for, is a FrameEvent.",
    ),
    "Chunk": _object(
        {
            **_HEAD,
            "object": {"enum": ["chat.completion.chunk", "text_completion"]},
            "choices": {**_array("ChunkChoice"), "maxItems": 1},
        },
        {"usage": {"anyOf": [_refer("Usage"), {"type": "null"}]}, "mbd": _refer("Measures")},
        "`mbd` is in the last one, and so is `usage` with `stream_options.include_usage`.",
    ),
    "ChunkChoice": _object(
        {"index": INTEGER, "finish_reason": {"enum": [*ENDS, None]}, "logprobs": _LOGPROBS},
        {"delta": _refer("Delta"), "text": STRING, **_OF_TOKENS, "resume": _refer("Place")},
        "`delta` in a chat, `text` in a completion; `resume` at the end of a commit, where `resumable` was asked for.",
    ),
    "Place": _object({"id": STRING, "num_tokens": INTEGER, "forwards": INTEGER}, {"seed": INTEGER}),
    "Delta": _object({}, {"role": {"const": "assistant"}, "content": STRING, "tool_calls": {"type": "array"}}),
}

_STATE = {"ready": BOOLEAN, "asleep": BOOLEAN}
_LOAD = {"running": INTEGER, "waiting": INTEGER}

STATES: dict[str, Shape] = {
    "Error": _object({"error": _refer("ErrorFields")}),
    "ErrorFields": _object({"message": STRING, "type": STRING, "param": STRING_OR_NULL, "code": STRING_OR_NULL}),
    "Model": _object({"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING}),
    "Models": _object({"object": {"const": "list"}, "data": _array("Model")}),
    "Health": _object(
        {**_STATE, "draining": BOOLEAN},
        {"refused_content": STRING_OR_NULL, **_LOAD, "models": _array("ModelState")},
        "The first three for everybody, the rest for whoever has a key, where the server asks for keys.",
    ),
    "ModelState": _object({"name": STRING, "ready": BOOLEAN, "replicas": _array("ReplicaState")}),
    "ReplicaState": _object(
        {"ready": BOOLEAN, **_LOAD},
        {
            "error": STRING,
            "replica": STRING,
            "pid": INTEGER,
            "asleep": BOOLEAN,
            "weights": {"type": "object"},
            "adapters": {"type": "object"},
            "refused_content": STRING_OR_NULL,
            "forwards": INTEGER,
            "backend": STRING,
            "tensor_parallel": INTEGER,
            "rank_sums": {"type": ["object", "null"]},
            "attention": {"type": "object"},
            "defaults": {"type": "object"},
            "speed_front": {"anyOf": [_refer("Front"), {"type": "null"}]},
            "engine": {"type": "object"},
            "kv_cache": {"type": "object"},
            "graphs": {"type": "object"},
            "prefix_cache": {"type": "object"},
        },
        "Of a replica that does not answer, `error` says why, and the rest is missing.",
    ),
    "Front": _object({"tasks": STRINGS, "num_samples": INTEGER, "points": _array("FrontPoint")}),
    "FrontPoint": _object({"speed": NUMBER, "decoding": {"type": "object"}, "accuracy": NUMBER, "tpf": NUMBER}),
    "Ready": _object(_STATE),
    "Version": _object({"version": STRING}),
    "TokenIds": _object(
        {
            "count": INTEGER,
            "max_model_len": INTEGER,
            "tokens": INTEGERS,
            "token_strs": {"type": ["array", "null"], "items": STRING},
        }
    ),
    "TokenText": _object({"prompt": STRING}),
    "TokenizerInfo": _object(
        {
            "tokenizer_class": STRING,
            "vocab_size": INTEGER,
            "bos_token": STRING_OR_NULL,
            "eos_token": STRING_OR_NULL,
            "pad_token": STRING_OR_NULL,
            "unk_token": STRING_OR_NULL,
            "chat_template": {"type": ["string", "object", "null"]},
        }
    ),
    "Order": _object(
        {"replicas": INTEGER},
        {
            "folder": STRING,
            "version": INTEGER,
            "aborted": INTEGER,
            "asleep": BOOLEAN,
            "freed_bytes": INTEGER,
        },
        "What the replicas of a model have done.",
    ),
}

SHAPES = {**ANSWERS, **STATES}
