"""The provisional events of a stream: what each forward left in a request's Block Buffer, as typed JSON."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mbd_core.decoding.frame import Frame
from mbd_core.serving.logprobs import TokenTexts

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
