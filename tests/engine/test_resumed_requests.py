"""A request that goes on after tokens that another engine committed: the rest is what would have followed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_engines import build

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused

PROMPT = tuple(range(20, 33))  # 13 tokens: the boundary block begins with a remainder of the prompt
BLOCK_SIZE = 4


@pytest.fixture(scope="module", params=[False, True], ids=["packed", "static"])
def engine(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Engine:
    config = EngineConfig(max_rows=3, num_pages=64, static_shapes=request.param, batch_invariant=not request.param)
    return Engine(load_model(tiny_model_dir), config)


def asked(**fields: Any) -> Request:
    settings = {"request_id": "r", "prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "logprobs": True}
    decoding = DecodingConfig(block_size=BLOCK_SIZE, buffer_size=fields.pop("buffer_size", 1), tau_m2t=0.9)
    return Request(**settings | fields, decoding=decoding)


def steps_of(engine: Engine, request: Request) -> tuple[list[StepOutput], Output]:
    engine.add(request)
    steps = []
    while engine.has_work:
        steps += engine.step()
    assert steps[-1].output is not None
    return steps, steps[-1].output


def test_single_block_decoding_goes_on_as_if_nothing_had_happened(engine: Engine) -> None:
    steps, whole = steps_of(engine, asked())
    assert [s.counts.num_tokens for s in steps][-1] == whole.counts.num_tokens == 30
    for cut in range(1, len(steps)):
        committed = tuple(t for s in steps[:cut] for t in s.piece.tokens)
        rest_steps, rest = steps_of(engine, asked(committed=committed))
        assert tuple(t for s in rest_steps for t in s.piece.tokens) == whole.tokens[len(committed) :]
        assert (rest.tokens, rest.finish_reason) == (whole.tokens, whole.finish_reason)
        assert rest.piece.logprobs == pytest.approx(whole.piece.logprobs[len(committed) :], abs=1e-5)
        assert rest.counts.num_forwards == whole.counts.num_forwards - steps[cut - 1].counts.num_forwards
        assert rest.counts.num_prompt_tokens == len(PROMPT)


def test_a_carried_token_comes_from_the_block_that_is_stored_again() -> None:
    model = build("Fast_dLLM_QwenForCausalLM", shift_logits=True, qk_norm=False, qkv_bias=True)
    served = Engine(model, EngineConfig(max_rows=2, num_pages=40))
    decoding = DecodingConfig(block_size=BLOCK_SIZE, tau_m2t=0.4, sub_block=2, carry=True)
    request = replace(asked(), decoding=decoding)
    steps, whole = steps_of(served, request)
    cuts = [n for n, step in enumerate(steps, start=1) if step.piece.tokens and step.output is None]
    assert len(cuts) > 5
    for cut in cuts:
        committed = tuple(t for s in steps[:cut] for t in s.piece.tokens)
        _, rest = steps_of(served, replace(request, committed=committed))
        assert (rest.tokens, rest.finish_reason) == (whole.tokens, whole.finish_reason)
        assert rest.piece.logprobs == pytest.approx(whole.piece.logprobs[len(committed) :], abs=1e-5)
        # the last block is stored once more
        assert rest.counts.num_forwards == whole.counts.num_forwards - steps[cut - 1].counts.num_forwards + 1


def test_a_template_on_a_model_that_carries_keeps_its_text() -> None:
    model = build("Fast_dLLM_QwenForCausalLM", shift_logits=True, qk_norm=False, qkv_bias=True)
    served = Engine(model, EngineConfig(max_rows=2, num_pages=40))
    template = tuple(None if i % 3 == 0 else 5 + i for i in range(14))
    decoding = DecodingConfig(block_size=BLOCK_SIZE, tau_m2t=0.4, sub_block=2, carry=True)
    for prompt in (PROMPT, PROMPT[:12]):
        request = replace(asked(max_tokens=14, template=template, prompt=prompt), decoding=decoding)
        _, output = steps_of(served, request)
        assert [(a, b) for a, b in zip(template, output.tokens, strict=True) if a not in (None, b)] == []


@pytest.mark.parametrize("buffer_size", [1, 3])
@pytest.mark.parametrize("num_committed", [0, 1, 3, 6, 29])
def test_any_beginning_is_kept_and_nothing_is_handed_out_twice(
    engine: Engine, buffer_size: int, num_committed: int
) -> None:
    committed = tuple(range(100, 100 + num_committed))
    request = asked(committed=committed, buffer_size=buffer_size, sampling=Sampling(temperature=1.0, seed=3))
    steps, output = steps_of(engine, request)
    assert output.tokens[:num_committed] == committed
    assert output.tokens[num_committed:] == tuple(t for s in steps for t in s.piece.tokens)
    assert len(output.tokens) == output.counts.num_tokens == 30
    assert len(output.piece.logprobs) == 30 - num_committed
    engine.check_integrity()


def test_a_preempted_resumed_request_goes_on(engine: Engine) -> None:
    request = asked(committed=(7, 8, 9), buffer_size=2)
    _, undisturbed = steps_of(engine, request)
    engine.add(request)
    steps = engine.step() + engine.step()
    assert engine.preempt() == "r"
    while engine.has_work:
        steps += engine.step()
    assert steps[-1].output is not None
    assert steps[-1].output.tokens == undisturbed.tokens


@pytest.mark.parametrize(
    ("fields", "names"),
    [({"committed": tuple(range(30))}, "nothing is left"), ({"committed": (9999,)}, "committed token 9999")],
)
def test_what_cannot_go_on_is_refused(engine: Engine, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(RequestRefused, match=names):
        engine.add(replace(asked(), **fields))
