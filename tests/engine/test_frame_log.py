"""Frames are what a trace says of the same steps, for every method; without them nothing of them is there."""

from dataclasses import replace
from typing import Any

import pytest
from small_engines import B, build

from mbd_core.decoding.answers.slots import Frame, StepTrace
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, Soft
from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder
from mbd_core.trace.recorder import TraceRecorder

METHODS: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.3},
    "multi": {"buffer_size": 3, "tau_m2t": 0.3, "tau_semi": 0.5},
    "t2t": {"buffer_size": 3, "tau_m2t": 0.1, "t2t": T2T(tau=0.2)},
    "soft": {"buffer_size": 2, "tau_m2t": 0.2, "soft": Soft()},
    "d2f": {"buffer_size": 3, "tau_m2t": 0.3, "prompt_attention": "full"},
    "carry": {"buffer_size": 3, "tau_m2t": 0.3, "sub_block": 2, "carry": True},
}


@pytest.fixture(scope="module")
def models() -> dict[bool, Decoder]:
    """A model that attends in blocks, and one with full attention."""

    shifted = {"attention": "full", "shift_logits": True, "qk_norm": False, "qkv_bias": True}
    return {False: build("SDARForCausalLM"), True: build("DreamModel", **shifted)}


def asked(seed: int, method: str, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "prompt": tuple(2 + (seed * 7 + i * 5) % 30 for i in range(1 + seed * 3)),
        "max_tokens": 5 + 6 * seed,
        "sampling": Sampling(temperature=(0.0, 0.9)[seed % 2], seed=seed),
        "ignore_eos": seed % 3 == 0,
        "frames": True,
    }
    decoding = DecodingConfig(block_size=B, **METHODS[method])
    return Request(request_id=f"{method} {seed}", decoding=decoding, **fields | changes)


def traced(
    model: Decoder, requests: list[Request], *, preempts: bool = False, **changes: Any
) -> tuple[dict[str, list[StepOutput]], dict[str, list[list[StepTrace]]]]:
    """The steps of each request, and the rows of each step that its trace has of it."""
    trace = TraceRecorder(detail=True)
    sizes: dict[str, Any] = {"max_rows": 4, "num_pages": 200, "page_size": 8, "max_prefill_tokens": 12}
    engine = Engine(model, EngineConfig(**(sizes | changes)), trace=trace)
    steps: dict[str, list[StepOutput]] = {r.request_id: [] for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for step in engine.step():
            steps[step.request_id].append(step)
        if preempts and engine.measures().counts.forwards["decode"] % 3 == 1:
            engine.preempt()
    rows: dict[str, dict[int, list[StepTrace]]] = {r.request_id: {} for r in requests}
    for row in trace.rows:
        if row.state != "DUMMY":
            rows[row.request_id].setdefault(row.step, []).append(row)
    return steps, {name: list(of.values()) for name, of in rows.items()}


def check(request: Request, steps: list[StepOutput], rows: list[list[StepTrace]]) -> int:
    """The frames agree with the trace and with what was committed; how many tokens were edited."""
    frames = [step.frame for step in steps if step.frame is not None]
    origin, end = request.decoding.grid_origin(len(request.prompt)), len(request.prompt) + request.max_tokens
    assert [f.forward for f in frames] == list(range(1, len(frames) + 1))
    assert len(frames) == len(rows) == steps[-1].counts.num_forwards
    fixed = set(range(len(request.prompt)))
    fixed |= {len(request.prompt) + i for i, token in enumerate(request.template) if token is not None}
    held: dict[int, int | None] = {}
    stored: dict[int, int | None] = {}
    edits = 0
    for frame, slots in zip(frames, rows, strict=True):
        assert frame.num_slots == request.decoding.buffer_size and len(frame.slots) == len(slots)
        behind: set[int] = set()
        for index, (slot, row) in enumerate(zip(frame.slots, slots, strict=True)):
            start = frame.position + len(request.prompt) + index * B
            assert start == origin + row.block * B
            assert slot.state in ("IN_CACHE", row.state)
            assert row.tokens is not None
            assert slot.tokens == tuple(None if t < 0 else t for t in row.tokens)[: max(0, end - start)]
            before = {offset: held.get(start + offset) for offset in range(len(slot.tokens))}
            now = dict(enumerate(slot.tokens))
            free = [offset for offset in now if start + offset not in fixed]
            assert list(slot.accepted) == [o for o in free if before[o] is None and now[o] is not None]
            assert list(slot.edited) == [o for o in free if before[o] is not None and now[o] != before[o]]
            if not request.template:
                assert (len(slot.accepted), len(slot.edited)) == (row.accepted, row.edited)
            edits += len(slot.edited)
            held |= {start + offset: token for offset, token in now.items()}
            if slot.state == "IN_CACHE":
                stored |= {start + offset: token for offset, token in now.items()}
                behind = {start + B} if request.carries else set()
        fixed |= behind
    tokens = [token for step in steps for token in step.piece.tokens]
    assert [stored[len(request.prompt) + i] for i in range(len(tokens))] == tokens
    return edits


@pytest.mark.parametrize("static", [False, True], ids=["packed", "static"])
@pytest.mark.parametrize("method", METHODS)
def test_frames_are_what_the_trace_says(models: dict[bool, Decoder], method: str, static: bool) -> None:
    requests = [asked(seed, method) for seed in range(5)]
    steps, rows = traced(models[method in ("d2f", "carry")], requests, static_shapes=static)
    edits = sum(check(r, steps[r.request_id], rows[r.request_id]) for r in requests)
    assert (edits > 0) == (method in ("t2t", "soft"))


def test_frames_go_on_after_a_preemption(models: dict[bool, Decoder]) -> None:
    requests = [asked(seed, "multi", max_tokens=30, ignore_eos=True) for seed in range(3)]
    steps, rows = traced(models[False], requests, preempts=True)
    assert sum(steps[r.request_id][-1].counts.num_preemptions for r in requests) > 3
    for request in requests:
        check(request, steps[request.request_id], rows[request.request_id])


def test_fixed_text_is_in_no_forward_s_share(models: dict[bool, Decoder]) -> None:
    template = (None, 7, 8, None, None, None, 9, 9, 9, 9, None)
    request = asked(1, "multi", template=template, max_tokens=len(template), ignore_eos=True)
    steps, rows = traced(models[False], [request])
    check(request, steps[request.request_id], rows[request.request_id])


def test_a_request_that_asks_for_none_has_none_and_the_same_tokens(models: dict[bool, Decoder]) -> None:
    requests = [asked(seed, "multi") for seed in range(4)]
    with_frames, _ = traced(models[False], requests, batch_invariant=True)
    mixed = [replace(r, frames=i == 0) for i, r in enumerate(requests)]
    without, _ = traced(models[False], mixed, batch_invariant=True)
    for i, request in enumerate(requests):
        steps = without[request.request_id]
        assert [t for s in steps for t in s.piece.tokens] == [
            t for s in with_frames[request.request_id] for t in s.piece.tokens
        ]
        frames: list[Frame] = [s.frame for s in steps if s.frame is not None]
        assert bool(frames) == (i == 0)


def test_a_canvas_has_no_slots_to_show(models: dict[bool, Decoder]) -> None:
    decoding = DecodingConfig(block_size=B, canvas=Canvas())
    engine = Engine(models[True], EngineConfig(max_rows=2, num_pages=50))
    with pytest.raises(RequestRefused, match="frames") as caught:
        engine.add(replace(asked(1, "single"), decoding=decoding, max_tokens=32))
    assert caught.value.field == "frames"
