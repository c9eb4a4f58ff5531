"""The plain loops against the engine, and against forwards without a cache: same tokens, same counts."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Refresh
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.plain_loops import multi_bd, run_planned

PROMPT = [5, 9, 14, 33, 21, 8, 77]


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Decoder:
    model = load_model(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)  # else random weights are sure of nothing
    return model


@pytest.mark.parametrize("length", [3, 4, 7])
@pytest.mark.parametrize(
    "config",
    [
        DecodingConfig(block_size=4, tau_m2t=0.3),
        DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3),
        DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.3, fallback="margin"),
        DecodingConfig(block_size=4, buffer_size=3, entropy=EntropyBound(gamma=4.0)),
        DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.3, t2t=T2T(tau=0.5)),
        DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.3, soft=Soft()),
    ],
)
def test_the_plain_block_loop_is_the_engine(model: Decoder, config: DecodingConfig, length: int) -> None:
    prompt = PROMPT[:length]
    plain = multi_bd(model, prompt, 10, config, ignore_eos=True)
    request = Request(request_id="a", prompt=tuple(prompt), max_tokens=10, decoding=config, ignore_eos=True)
    output = Engine(model, EngineConfig(max_rows=1)).generate([request])[0]
    assert plain.tokens == list(output.tokens) and len(plain.tokens) == 10
    assert plain.finish_reason == output.finish_reason == "length"
    counts = output.counts
    assert (plain.num_forwards, plain.num_store_forwards) == (counts.num_forwards, counts.num_store_forwards)


@pytest.mark.parametrize("buffer_size", [1, 3])
@pytest.mark.parametrize("length", [3, 4, 7])
def test_the_plain_block_loop_carries_as_the_engine(length: int, buffer_size: int) -> None:
    config = replace(SHAPES["tiny-fast-dllm-v2"], block_size=4)
    shifted = random_model(config, device=torch.device("cpu"), dtype=torch.float64, std=0.3)
    decoding = DecodingConfig(block_size=4, buffer_size=buffer_size, tau_m2t=0.3, sub_block=2, carry=True)
    test_the_plain_block_loop_is_the_engine(shifted, decoding, length)


def test_the_plain_block_loop_refuses_what_it_cannot_decode(model: Decoder) -> None:
    base = DecodingConfig(block_size=4)
    for config, named in (
        (DecodingConfig(block_size=4, canvas=Canvas()), "canvas"),
        (replace(base, prompt_attention="full"), "prompt_attention"),
    ):
        with pytest.raises(ValueError, match=named):
            multi_bd(model, PROMPT, 4, config)


def uncached(model: Decoder, canvas: Canvas, *, shift: bool) -> tuple[list[int], int]:
    """The decoder under whole forwards through dense attention: no cache, no lanes, no windows."""
    decoder = make(model, canvas, shift=shift)
    see_all = DenseAttention(torch.ones(1, 1, decoder.length, decoder.length, dtype=torch.bool))
    with torch.inference_mode():
        while not decoder.done:
            rows: list[Tensor] = []
            for q in decoder.plan().queries:
                hidden = model(q.tokens[None], torch.arange(decoder.length)[None], see_all)
                rows.append(model.logits(hidden[0, q.logits_at]))
            decoder.update(rows)
    return decoder.tokens, decoder.num_forwards


def make(model: Decoder, canvas: Canvas, *, shift: bool = False):  # type: ignore[no-untyped-def]
    return canvas_decoder(
        tuple(PROMPT),
        13,
        canvas,
        Sampling(),
        eos_token_ids=(),
        vocab=Vocab(model.config.mask_token_id, model.config.vocab_size),
        shift=shift,
    )


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(
    "canvas",
    [
        Canvas(block_length=4, tau=0.3),
        Canvas(block_length=4, tau=0.3, cfg_scale=1.0),
        Canvas(block_length=4, accept="quota", refresh=Refresh(prompt_interval=1, response_interval=1)),
        Canvas(block_length=None, accept="schedule", steps=5, score="neg_entropy"),
    ],
)
def test_cached_whole_forwards_are_dense_ones(model: Decoder, canvas: Canvas, shift: bool) -> None:
    run = run_planned(model, make(model, canvas, shift=shift))
    assert (run.tokens, run.num_forwards) == uncached(model, canvas, shift=shift)
    assert run.finish_reason == "length" and len(run.log_probs) == 13


def test_branches_that_never_meet_each_have_a_cache_of_their_own(model: Decoder) -> None:
    apart = Branches(block_lengths=(2, 4, 8), tau_merge=1.0, tau_sync=1000, refresh=1000)
    together = make(model, Canvas(tau=0.3, branches=apart))
    run_planned(model, together)
    for branch in together.branches:
        own = replace(apart, block_lengths=(branch.block_length,))
        assert (
            branch.lane.tokens[len(PROMPT) :].tolist()
            == run_planned(model, make(model, Canvas(tau=0.3, branches=own))).tokens
        )


def test_branches_of_one_length_are_the_dual_cache(model: Decoder) -> None:
    dual = run_planned(model, make(model, Canvas(block_length=4, tau=0.3, cache="dual")))
    alone = run_planned(model, make(model, Canvas(tau=0.3, branches=Branches(block_lengths=(4,), refresh=4))))
    assert alone == dual


@functools.cache
def tiny(name: str) -> Decoder:
    return random_model(SHAPES[name], device=torch.device("cpu"), dtype=torch.float64, std=0.2)


@pytest.mark.parametrize("shape", ["tiny-llada", "tiny-dream"])
@pytest.mark.parametrize("length", [5, 8, 11])
@pytest.mark.parametrize(
    "config",
    [
        DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3, prompt_attention="full"),
        DecodingConfig(block_size=4, tau_m2t=0.3, prompt_attention="full"),
        DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3),
        DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.3, t2t=T2T(tau=0.5)),
    ],
    ids=["pipelined", "cache only", "block-causal", "t2t"],
)
def test_the_plain_d2f_loop_is_the_engine(shape: str, length: int, config: DecodingConfig) -> None:
    model = tiny(shape)
    prompt = [(7 * i * i + 3 * i + 5) % 250 for i in range(length)]
    plain = multi_bd(model, prompt, 18, config, ignore_eos=True)
    request = Request(request_id="a", prompt=tuple(prompt), max_tokens=18, decoding=config, ignore_eos=True)
    engine = Engine(model, EngineConfig(max_rows=1, buffer_size=3, block_size=4))
    output = engine.generate([request])[0]
    assert plain.tokens == list(output.tokens) and len(plain.tokens) == 18
    assert plain.num_forwards == output.counts.num_forwards
    assert plain.num_store_forwards == output.counts.num_store_forwards
