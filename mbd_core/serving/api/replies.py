"""OpenAI's reply shapes: the whole answer, its chunks, usage, the `mbd` field, frames; and their JSON schemas.

Members that an answer always has are required; the others are there where they were asked for, or have a value.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mbd_core.decoding.blocks.request import Counts, Frame
from mbd_core.serving.text.logprobs import TokenTexts

# The JSON shapes of what the endpoint answers, as the components of its OpenAPI document.

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


# The provisional events of a stream: what each forward left in a request's Block Buffer, as typed JSON.

FRAME = "frame"  # the type of the server-sent events


class EventFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SlotFields(EventFields):
    """A slot that held a block in this forward.

    `state` is what the forward saw, or IN_CACHE for a block that it stored, which leaves the buffer. `tokens` and
    `texts` are its positions after the forward, null where they are masked; `accepted` and `edited` are the offsets of
    those that this forward filled, and overwrote.
    """

    state: Literal["ACTIVE", "TO_CACHE", "IN_CACHE"]
    tokens: list[int | None]
    texts: list[str | None]
    accepted: list[int]
    edited: list[int]


class FrameFields(EventFields):
    """The slots of choice `index` after its forward number `forward`, counted from 1.

    `position` is where the first slot begins, counted from the answer's first token; it is negative where the prompt's
    end stands in the same block. `num_slots` is the size of the buffer: slots without a block are not listed.
    """

    index: int
    forward: int
    position: int
    num_slots: int
    slots: list[SlotFields]


class FrameEvent(EventFields):
    """The data of an event of type `frame`. Nothing in it is final but what the chunks beside it say too.

    It is a chunk without choices, so that clients which know no frames find nothing in it.
    """

    id: str
    object: Literal["mbd.frame"] = "mbd.frame"
    created: int
    model: str
    choices: list[Any] = Field(default=[], max_length=0)
    frame: FrameFields


def frame_fields(frame: Frame, index: int, texts: TokenTexts) -> FrameFields:
    """The frame of choice `index`; `texts` gives the text of each token."""
    slots = [
        SlotFields.model_validate(
            {
                "state": slot.state,
                "tokens": list(slot.tokens),
                "texts": [None if token is None else texts(token)[0] for token in slot.tokens],
                "accepted": list(slot.accepted),
                "edited": list(slot.edited),
            }
        )
        for slot in frame.slots
    ]
    return FrameFields(
        index=index, forward=frame.forward, position=frame.position, num_slots=frame.num_slots, slots=slots
    )


@dataclass(frozen=True, kw_only=True)
class ReplyChoice:
    """One finished answer, its `calls` of functions, `logprobs` in the shape of its route, where asked for, and
    `details`, fields of its tokens and its prompt."""

    text: str
    reason: str
    calls: Sequence[dict[str, Any]] = ()
    logprobs: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The fields that all JSON objects of one answer share, and those objects' shapes.

    Choices are numbered prompt by prompt, `num_choices` of each. `seed` is set where tokens are drawn, `speed` where
    the client chose a point of the model's front: the speed at which it stands. Counts are those of all choices, in
    their order.
    """

    id: str
    created: int
    model: str
    chat: bool
    num_choices: int = 1
    seed: int | None = None
    speed: float | None = None

    def _object(self, kind: str, **rest: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **rest}

    def full(
        self, choices: Sequence[ReplyChoice], counts: Sequence[Counts], weights: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """The whole answer in one object."""
        objects = [
            {"index": index, **self._content(c), "logprobs": c.logprobs, "finish_reason": c.reason, **c.details}
            for index, c in enumerate(choices)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, choices=objects, usage=self.usage(counts), mbd=self.measures(counts, weights))

    def _content(self, choice: ReplyChoice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": list(choice.calls)}
        return {"message": message}

    def chunk(
        self,
        index: int,
        *,
        text: str = "",
        calls: Sequence[dict[str, Any]] = (),
        first: bool = False,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One streamed chunk of choice `index`: its beginning, some text or parts of calls, or its end."""
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
            if reason is None and not first and (text or not calls):
                delta["content"] = text
            if calls:
                delta["tool_calls"] = list(calls)
            choice: dict[str, Any] = {"index": index, "delta": delta}
        else:
            choice = {"index": index, "text": text}
        choice |= {"logprobs": logprobs, "finish_reason": reason, **(details or {})}
        return self._object(self._chunk_kind, choices=[choice])

    def usage_chunk(self, counts: Sequence[Counts], weights: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The extra last chunk for `stream_options.include_usage`."""
        return self._object(self._chunk_kind, choices=[], usage=self.usage(counts), mbd=self.measures(counts, weights))

    def frame(self, fields: FrameFields) -> dict[str, Any]:
        """The data of a provisional event."""
        return FrameEvent(id=self.id, created=self.created, model=self.model, frame=fields).model_dump()

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def usage(self, counts: Sequence[Counts]) -> dict[str, Any]:
        """OpenAI's token counts: each prompt once, with its first choice's cached tokens, and all choices' tokens."""
        prompts = counts[:: self.num_choices]
        prompt, completion = sum(c.num_prompt_tokens for c in prompts), sum(c.num_tokens for c in counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in prompts)},
        }

    def measures(self, counts: Sequence[Counts], weights: Sequence[tuple[int, int]]) -> dict[str, float]:
        """The `mbd` field: sums of the raw counts over all choices, tokens per forward as their ratio, seed, speed,
        the oldest and the newest weights that decoded any of them (`StepOutput.weights`)."""
        columns = [asdict(c) for c in counts]
        total = Counts(**{name: sum(c[name] for c in columns) for name in columns[0]})
        versions = {"oldest_weights": min(w[0] for w in weights), "newest_weights": max(w[1] for w in weights)}
        chosen = {name: value for name, value in (("seed", self.seed), ("speed", self.speed)) if value is not None}
        return {**asdict(total), "tpf": total.tpf, **versions, **chosen}
