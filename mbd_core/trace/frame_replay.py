"""The frames of a request that a server sends, in the form that the replay page draws."""

from collections.abc import Sequence

from mbd_core.decoding.answers.slots import Frame, FrameSlot
from mbd_core.trace.recorder import STATES
from mbd_core.trace.replay import ReplayFrame, ReplaySide, ReplaySlot, caption
from mbd_core.trace.traced_run import ACTIVE, DUMMY, TO_CACHE


def frame_side(
    frames: Sequence[Frame], *, name: str, block_size: int, prompt: Sequence[int], num_tokens: int, ended: bool
) -> ReplaySide:
    """One side of the replay page: a request's frames in their order.

    prompt      the request's prompt; its end stands in the first block
    num_tokens  useful tokens of the answer
    ended       whether an EOS or a stop string ended the answer, so that later tokens do not count
    """
    start = frames[0].position
    num_prompt = max(0, -start)
    end = num_prompt + num_tokens
    num_blocks = max((f.position - start) // block_size + len(f.slots) for f in frames)
    cells = [-1] * (num_blocks * block_size)
    prompt_tokens = tuple(prompt[len(prompt) - num_prompt :])
    cells[:num_prompt] = prompt_tokens
    sides = []
    for number, frame in enumerate(frames):
        first = (frame.position - start) // block_size
        slots = [_slot(slot, first + place, block_size) for place, slot in enumerate(frame.slots)]
        for place, slot in enumerate(frame.slots):
            at = (first + place) * block_size
            cells[at : at + len(slot.tokens)] = [-1 if token is None else token for token in slot.tokens]
        cached = first + _num_stored(frame)
        if number + 1 < len(frames):
            cached = (frames[number + 1].position - start) // block_size
        is_filled = [token >= 0 for token in cells[num_prompt:end]]
        sides.append(
            ReplayFrame(
                caption=caption(slots),
                store_only=all(slot.state != STATES[ACTIVE] for slot in slots),
                slots=(*slots, *[_empty(block_size)] * (frame.num_slots - len(slots))),
                num_tokens=sum(is_filled),
                num_committed=sum(is_filled[: max(0, cached * block_size - num_prompt)]),
                num_cached_blocks=cached,
            )
        )
    return ReplaySide(
        name=name,
        block_size=block_size,
        num_slots=max(len(side.slots) for side in sides),
        num_blocks=num_blocks,
        num_prompt=num_prompt,
        prompt_tokens=prompt_tokens,
        end=end if ended and end < num_blocks * block_size else None,
        frames=tuple(sides),
    )


def _num_stored(frame: Frame) -> int:
    """The leading slots whose blocks the forward stored."""
    return next((place for place, slot in enumerate(frame.slots) if slot.state != "IN_CACHE"), len(frame.slots))


def _slot(slot: FrameSlot, block: int, size: int) -> ReplaySlot:
    tokens = [-1 if token is None else token for token in slot.tokens]
    num_masked = sum(token < 0 for token in tokens) + len(slot.accepted)
    state = slot.state
    if state == "IN_CACHE":  # an exact verification stores the tokens that it accepts
        state = STATES[ACTIVE if slot.accepted else TO_CACHE]
    return ReplaySlot(
        block=block + 1,
        state=state,
        mask_ratio=round(num_masked / size, 4),
        tokens=(*tokens, *[-1] * (size - len(tokens))),
        confidences=None,
        new=slot.accepted,
        edited=slot.edited,
        verdict=slot.verdict,
    )


def _empty(size: int) -> ReplaySlot:
    return ReplaySlot(
        block=1,
        state=STATES[DUMMY],
        mask_ratio=0.0,
        tokens=(-1,) * size,
        confidences=None,
        new=(),
        edited=(),
    )
