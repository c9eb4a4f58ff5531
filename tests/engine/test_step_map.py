"""A rollout's step map and log-probabilities, run again with the definition, give the same tokens and numbers."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_engines import EOS, VOCAB, B, build
from step_replay import check_replay

from mbd_core.decoding.answers.piece import Edit
from mbd_core.decoding.answers.slots import Frame
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.engine.sequences.slot_logs import OPEN, StepMap
from mbd_core.models.decoder import Decoder

METHODS: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.3},
    "multi": {"buffer_size": 3, "tau_m2t": 0.3, "tau_add": 0.1, "tau_semi": 0.5},
    "quota": {"buffer_size": 2, "tokens_per_step": 2, "fallback": "leftmost", "tau_m2t": 0.6},
    "d2f": {"buffer_size": 3, "tau_m2t": 0.3, "prompt_attention": "full"},
    "entropy": {"buffer_size": 3, "entropy": EntropyBound(gamma=4.0, rule="jetengine")},
    "t2t": {"buffer_size": 3, "tau_m2t": 0.1, "t2t": T2T(tau=0.2)},
    "soft": {"buffer_size": 2, "tau_m2t": 0.2, "soft": Soft()},
    "canvas": {"canvas": Canvas(block_length=8, cache="dual", tau=0.3)},
}


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    return {
        "blocks": build(),
        "shifted": build("DreamModel", attention="full", shift_logits=True, qk_norm=False, qkv_bias=True),
    }


def asked(seed: int, method: str, **changes: Any) -> Request:
    rng = random.Random(seed)
    fields: dict[str, Any] = {
        "prompt": tuple(rng.choices(range(2, VOCAB), k=rng.randint(1, 21))),
        "max_tokens": rng.randint(1, 30),
        "sampling": Sampling(temperature=(0.0, 0.9)[seed % 2], top_k=(0, 12)[seed % 3 == 0], seed=seed),
        "ignore_eos": seed % 4 == 0,
        "rollout": True,
        "logprobs": seed % 5 == 0,
    }
    decoding = DecodingConfig(block_size=B, **METHODS[method])
    return Request(request_id=f"{method} {seed}", decoding=decoding, **fields | changes)


def engine_of(model: Decoder, **changes: Any) -> Engine:
    sizes = {"max_rows": 4, "num_pages": 200, "page_size": 8, "max_prefill_tokens": 12}
    return Engine(model, EngineConfig(**(sizes | changes)))


def check(model: Decoder, request: Request, output: Output) -> None:
    tail = output.tail
    assert output.piece.steps is not None
    if output.finish_reason == "stop":
        assert tail.tokens[0] == EOS
        end = len(request.prompt) + len(output.tokens) + len(tail.tokens)
        last = len(request.prompt) + request.max_tokens
        assert end == last or (end - request.decoding.grid_origin(len(request.prompt))) % B == 0
    else:
        assert not tail.tokens
    assert check_replay(model, request, output) <= output.counts.num_forwards - output.counts.num_store_forwards


@pytest.mark.parametrize("static", [False, True])
def test_a_replay_of_the_step_map_gives_tokens_and_log_probabilities(models: dict[str, Decoder], static: bool) -> None:
    requests = [asked(s, m) for s, m in enumerate(("single", "multi", "quota") * 4)]
    engine = engine_of(models["blocks"], static_shapes=static, overlap=static)
    outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        check(models["blocks"], request, output)
    assert {o.finish_reason for o in outputs} == {"stop", "length"}


@pytest.mark.parametrize("method", ["d2f", "multi"])
def test_shifted_logits_and_prompts_under_full_attention_replay(models: dict[str, Decoder], method: str) -> None:
    requests = [asked(s, method) for s in range(6)]
    for request, output in zip(requests, engine_of(models["shifted"]).generate(requests), strict=True):
        check(models["shifted"], request, output)


@pytest.mark.parametrize(
    ("buffer_size", "static"),
    [
        (1, False),
        (3, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_a_carried_token_has_the_forward_of_its_store(buffer_size: int, static: bool) -> None:
    model = build("Fast_dLLM_QwenForCausalLM", shift_logits=True, qk_norm=False, qkv_bias=True)
    decoding = DecodingConfig(block_size=B, buffer_size=buffer_size, tau_m2t=0.4, sub_block=2, carry=True)
    requests = [replace(asked(s, "single"), decoding=decoding) for s in range(8)]
    requests.append(replace(asked(8, "single", prompt=(5,) * B, max_tokens=3 * B, ignore_eos=True), decoding=decoding))
    outputs = engine_of(model, static_shapes=static, overlap=static).generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output.piece.steps is not None
        check_replay(model, request, output)
    assert output.piece.steps is not None
    steps = output.piece.steps
    if buffer_size == 1:  # the prompt is one block, and its store is the first forward
        assert steps[0] == 1
        blocks = [steps[i : i + B] for i in range(0, 3 * B, B)]
        assert all(max(one) < two[0] < min(two[1:]) for one, two in itertools.pairwise(blocks))


@pytest.mark.parametrize("static", [False, True])
def test_a_preemption_leaves_the_step_map_as_it_is(models: dict[str, Decoder], static: bool) -> None:
    engine, rng = engine_of(models["blocks"], static_shapes=static), random.Random(5)
    requests = [asked(s, m) for s, m in enumerate(("multi", "single") * 3)]
    alone = [engine.generate([r])[0] for r in requests]
    for r in requests:
        engine.add(r)
    outputs: dict[str, Output] = {}
    while engine.has_work:
        if rng.random() < 0.3:
            engine.preempt()
        outputs |= {s.request_id: s.output for s in engine.step() if s.output is not None}
    assert sum(o.counts.num_preemptions for o in outputs.values()) > 3
    for request, before in zip(requests, alone, strict=True):
        output = outputs[request.request_id]
        assert output.piece.steps is not None and before.piece.steps is not None
        assert output.piece.steps == before.piece.steps
        check(models["blocks"], request, output)


def test_steps_join_to_the_output_and_a_resumed_request_goes_on_counting(models: dict[str, Decoder]) -> None:
    engine = engine_of(models["blocks"])
    request = asked(8, "multi", max_tokens=25, ignore_eos=True, prompt=tuple(range(5, 18)))
    engine.add(request)
    steps = []
    while engine.has_work:
        steps += engine.step()
    whole = steps[-1].output
    assert whole is not None and whole.piece.steps is not None
    assert tuple(n for s in steps for n in s.piece.steps or ()) == whole.piece.steps
    assert all(len(s.piece.steps) == len(s.piece) for s in steps if s.piece.steps is not None)
    for cut in range(1, len(steps)):
        committed = tuple(t for s in steps[:cut] for t in s.piece.tokens)
        forwards = steps[cut - 1].counts.num_forwards
        rest = engine.generate([replace(request, committed=committed, first_forward=forwards)])[0]
        assert rest.piece.steps is not None and len(rest.piece.steps) == 25 - len(committed)
        assert min(rest.piece.steps) == forwards + 1
        check_replay(models["blocks"], replace(request, committed=committed), rest)


@pytest.mark.parametrize("part", [{"t2t": T2T()}, {"soft": Soft()}])
def test_where_tokens_change_a_step_map_is_refused(models: dict[str, Decoder], part: dict[str, Any]) -> None:
    decoding = DecodingConfig(block_size=B, **part)
    with pytest.raises(RequestRefused, match="a step map") as caught:
        engine_of(models["blocks"]).add(replace(asked(1, "single"), decoding=decoding))
    assert caught.value.field == "rollout"


def test_where_tokens_stay_a_replay_is_the_rollout(models: dict[str, Decoder]) -> None:
    engine, request = engine_of(models["blocks"]), asked(4, "multi")
    looked_at = engine.generate([replace(request, rollout=False, replay=True)])[0]
    assert looked_at.piece == engine.generate([request])[0].piece and looked_at.piece.steps is not None


def writes(frames: list[Frame]) -> dict[int, list[tuple[int, int | None]]]:
    """By place in the answer: each forward that wrote there, and the token, as the frames say."""
    found: dict[int, list[tuple[int, int | None]]] = {}
    for frame in frames:
        for index, slot in enumerate(frame.slots):
            for offset in (*slot.accepted, *slot.edited):
                found.setdefault(frame.position + index * B + offset, []).append((frame.forward, slot.tokens[offset]))
    return found


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("method", ["multi", "t2t", "soft"])
def test_a_replay_has_what_every_forward_wrote(models: dict[str, Decoder], method: str, static: bool) -> None:
    engine, rng = engine_of(models["blocks"], static_shapes=static), random.Random(2)
    requests = [asked(s, method, rollout=False, replay=True, frames=True) for s in range(6)]
    steps: dict[str, list[StepOutput]] = {r.request_id: [] for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        if rng.random() < 0.2:
            engine.preempt()
        for step in engine.step():
            steps[step.request_id].append(step)
    num_edits = 0
    for of_request in steps.values():
        output = of_request[-1].output
        assert output is not None and output.piece.steps is not None
        assert len(output.piece.steps) == len(output.tokens)
        expected = writes([step.frame for step in of_request if step.frame is not None])
        found: dict[int, list[tuple[int, int | None]]] = {place: [] for place in range(len(output.tokens))}
        for edit in output.piece.edits:
            found[edit.index].append((edit.step, edit.token))
        for place, (step, token) in enumerate(zip(output.piece.steps, output.tokens, strict=True)):
            found[place].append((step, token))
        assert found == {place: expected[place] for place in found}
        num_edits += len(output.piece.edits)
    assert sum(of_request[-1].counts.num_preemptions for of_request in steps.values()) > 0
    assert (num_edits > 10) == (method != "multi")


def test_a_canvas_that_begins_anew_counts_anew(models: dict[str, Decoder]) -> None:
    request = asked(4, "canvas", max_tokens=24, rollout=False, replay=True)
    engine = engine_of(models["shifted"])
    alone = engine.generate([request])[0]
    assert alone.piece.steps is not None and set(alone.piece.steps) == set(range(1, alone.counts.num_forwards + 1))
    engine.add(request)
    first = [step for _ in range(alone.counts.num_forwards - 2) for step in engine.step()]
    early = [token for step in first for token in step.piece.tokens]
    engine.preempt()
    ended = [step.output for step in [s for _ in range(99) if engine.has_work for s in engine.step()] if step.output]
    assert 0 < len(early) < 24 and ended[0].tokens == alone.tokens and ended[0].piece.steps is not None
    assert ended[0].counts.num_preemptions == 1 and ended[0].counts.num_forwards == alone.counts.num_forwards
    assert ended[0].piece.steps == alone.piece.steps


def test_a_step_map_keeps_what_was_overwritten_until_its_block_leaves() -> None:
    step_map, none, half = StepMap(2, 2, edits=True), np.zeros((2, 2), dtype=bool), np.array([[False] * 2, [True] * 2])
    step_map.update(np.array([[5, 6], [0, 0]]), half, 1)
    step_map.update(np.array([[5, 7], [8, 8]]), none, 2)
    step_map.update(np.array([[5, 6], [8, 9]]), none, 4)
    assert step_map.take(1) == ((1, 4), (Edit(1, 1, 6), Edit(1, 2, 7)))
    step_map.update(np.array([[8, 4], [0, 0]]), half, 5)
    assert step_map.take(1) == ((2, 5), (Edit(1, 2, 8), Edit(1, 4, 9)))


def test_a_step_map_moves_with_its_slots() -> None:
    step_map = StepMap(2, 3)
    tokens = np.zeros((2, 3))
    step_map.update(tokens, np.array([[False, True, False], [True, True, True]]), 4)
    step_map.update(tokens, np.array([[False, False, False], [True, False, True]]), 5)
    assert step_map.take(1) == ((4, 5, 4), ())
    assert step_map.take(2) == ((OPEN, 5, OPEN, OPEN, OPEN, OPEN), ())
