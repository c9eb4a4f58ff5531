"""The same request gives the same tokens, bit for bit, however it is served: alone, in a batch, static or dynamic,
from a warm prefix cache, after preemption; and no order of events loses a page."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_engines import (
    BLOCKWISE,
    CAUSAL,
    EDITS,
    EOS,
    EXPERTS,
    FULL,
    MASK,
    SHIFTED,
    SHIFTED_VERIFY,
    VERIFY,
    VOCAB,
    B,
    build,
    engine,
    gist,
    request,
    run_with_preemption,
)

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab, uniform
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.causal.planned import planned_decoder
from mbd_core.models.decoder import Decoder
from mbd_core.plain_loops import multi_bd, prefix_rows, run_planned


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    return {
        "block_causal": build(),
        "experts by block": build(
            "LLaDA2MoeModelLM",
            moe=dataclasses.replace(EXPERTS, expert_capacity=3),
            delete_token_id=38,
            split_token_id=39,
        ),
        "full": build(architecture="LLaDAModelLM", attention="full"),
        "shifted blocks": build("Fast_dLLM_QwenForCausalLM", shift_logits=True, qk_norm=False, qkv_bias=True),
        "causal": build("NemotronLabsDiffusionModel", attention="causal", qk_norm=False),
        "shifted": build(architecture="DreamModel", attention="full", shift_logits=True, qk_norm=False, qkv_bias=True),
    }


METHODS: dict[str, tuple[str, ...]] = {
    "block_causal": (*BLOCKWISE, *VERIFY),
    "experts by block": (*BLOCKWISE, *EDITS),
    "shifted blocks": (*SHIFTED, "multi", *SHIFTED_VERIFY),
    "causal": (*CAUSAL,),
    "full": (*FULL,),
    "shifted": (*FULL,),
}


@pytest.fixture(scope="module")
def decode_alone(models: dict[str, Decoder]) -> Callable[[str, Request], tuple[Any, ...]]:
    """A request's gist in an engine of its own; each request of a model is decoded once."""
    return functools.cache(lambda kind, r: gist(engine(models[kind]).generate([r])[0]))


# Methods that another kind of model decodes in a case that is not slow.
ALSO_ELSEWHERE = {("experts by block", "soft"), ("full", "prefix"), ("full", "branches"), ("shifted", "d2f")}
ALSO_ELSEWHERE |= {("shifted", "refresh")}


def batches() -> list[Any]:
    """Three methods of a kind of model a case; the last case of a kind is filled with the kind's first methods."""
    return [
        pytest.param(
            kind,
            (*methods[start : start + 3], *methods)[:3],
            id=f"{kind}-{methods[start]}",
            marks=pytest.mark.slow if (kind, methods[start]) in ALSO_ELSEWHERE else (),
        )
        for kind, methods in METHODS.items()
        for start in range(0, len(methods), 3)
    ]


@pytest.mark.parametrize(("kind", "chosen"), batches())
def test_alone_is_in_a_batch_is_static_is_preempted_is_cached(
    models: dict[str, Decoder],
    decode_alone: Callable[[str, Request], tuple[Any, ...]],
    kind: str,
    chosen: tuple[str, str, str],
) -> None:
    model, others = models[kind], METHODS[kind]
    requests = [request(f"r{i}", 100 * i + 7, method) for i, method in enumerate([*chosen, *chosen])]
    alone = [decode_alone(kind, r) for r in requests]

    warm = engine(model)
    assert [gist(o) for o in warm.generate(requests)] == alone
    static = {"static_shapes": True, "buffer_size": 3}  # no method here has more slots
    assert [gist(o) for o in engine(model, **static).generate(requests)] == alone

    again = warm.generate(requests)
    assert [gist(o) for o in again] == alone  # every prefix is known now
    shared = [o.counts.num_cached_tokens for o, r in zip(again, requests, strict=True) if may_share(r)]
    assert sum(shared) > 0 or not shared

    by_host = any("canvas" in FULL.get(m, {}) or m in (*EDITS, *CAUSAL, *VERIFY, *SHIFTED_VERIFY) for m in others)
    for changes in ({}, static | {"overlap": True}):
        preempted = engine(model, **changes)
        assert [gist(o) for o in run_with_preemption(preempted, requests, random.Random(5))] == alone
        assert preempted.ahead.num_ahead > 0 or by_host or not changes
        preempted.check_integrity()
        assert preempted.scheduler.pool.num_free == preempted.scheduler.pool.capacity


@pytest.mark.parametrize("length", [3, 16, 23])
def test_a_block_chooses_its_experts_whole_however_a_prompt_is_cut(models: dict[str, Decoder], length: int) -> None:
    """One forward of the whole prompt is the yardstick; chunks of one block, of two, and a resumed answer match."""
    model, prompt = models["experts by block"], tuple(range(2, 2 + length))
    r = request("a", 5, "single", prompt=prompt, max_tokens=22, sampling=Sampling(), ignore_eos=True)
    wanted = multi_bd(model, list(prompt), 22, r.decoding, ignore_eos=True)
    for chunk in (B, 2 * B, 64):
        output = engine(model, max_prefill_tokens=chunk).generate([r])[0]
        assert list(output.tokens) == wanted.tokens and output.counts.num_forwards == wanted.num_forwards
    stored = (length + 8) // B * B - length
    rest = engine(model).generate([dataclasses.replace(r, committed=tuple(wanted.tokens[:stored]))])[0]
    assert list(rest.tokens) == wanted.tokens


def may_share(r: Request) -> bool:
    """Whether a page of its prompt can be known: pages hold 8 tokens, and a shifted model computes the last block."""
    return r.decoding.canvas is None and not r.decoding.attends_in_full and len(r.prompt) > 12


CANVASES = [m for m in FULL if "canvas" in FULL[m]]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((k, m) for k in ("full", "shifted") for m in CANVASES),
        *(("causal", m) for m in CAUSAL),
        *(("block_causal", m) for m in VERIFY),
        *(("shifted blocks", m) for m in SHIFTED_VERIFY),
    ],
)
def test_planned_rows_in_the_engine_are_the_plain_loop(models: dict[str, Decoder], kind: str, method: str) -> None:
    model = models[kind]
    r = request("a", 11, method, max_tokens=24, replay=True)
    decoder = planned_decoder(r, eos_token_ids=(EOS,), vocab=Vocab(MASK, VOCAB), shift=model.config.shift_logits)
    run_planned(model, decoder, prefix=prefix_rows(r))
    output = engine(model).generate([r])[0]
    plain = (
        decoder.tokens[: decoder.tokens.index(EOS)] if EOS in decoder.tokens and not r.ignore_eos else decoder.tokens
    )
    assert list(output.tokens) == plain and output.piece.steps is not None
    assert output.piece.steps == tuple(decoder.steps[: len(plain)])
    assert output.counts.num_forwards == decoder.num_forwards


def test_the_second_turn_reuses_the_first_answer(models: dict[str, Decoder]) -> None:
    served = engine(models["block_causal"])
    first = request("a", 3, "multi", max_tokens=24, ignore_eos=True, prompt=tuple(range(2, 15)))
    answer = served.generate([first])[0]
    prompt = (*first.prompt, *answer.tokens, 5, 6, 7)
    second = request("b", 4, "multi", prompt=prompt, max_tokens=9)
    again = served.generate([second])[0]
    assert again.counts.num_cached_tokens == (len(first.prompt) + 24) // 8 * 8 > len(first.prompt)
    assert gist(again) == gist(engine(models["block_causal"], prefix_caching=False).generate([second])[0])


def test_seeds_and_only_seeds_make_samples_differ(models: dict[str, Decoder]) -> None:
    hot = [
        request(f"r{i}", 3, "multi", max_tokens=20, sampling=Sampling(temperature=1.5, seed=i % 3)) for i in range(6)
    ]
    tokens = [o.tokens for o in engine(models["block_causal"]).generate(hot)]
    assert tokens[:3] == tokens[3:] and len(set(tokens)) == 3


def test_logprobs_are_those_of_the_accepting_forward(models: dict[str, Decoder]) -> None:
    """With one open position a forward its confidence can be computed from the tokens alone."""
    r = request("a", 9, "single", max_tokens=1, prompt=(5, 6, 7), sampling=Sampling(), ignore_eos=True)
    model = models["block_causal"]
    output = engine(model).generate([r])[0]
    from mbd_core.ops.attention.whole import DenseAttention

    ids, positions = torch.tensor([[5, 6, 7, MASK]]), torch.arange(4)[None]
    with torch.no_grad():
        logits = model.logits(model(ids, positions, DenseAttention(torch.ones(1, 1, 4, 4, dtype=torch.bool))))[0, 3]
    assert output.piece.logprobs is not None
    assert output.piece.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[output.tokens[0]]), abs=1e-5)
    assert math.exp(output.piece.logprobs[0]) <= 1.0


@pytest.mark.parametrize(
    ("kind", "overlap", "num_operations"),
    [
        ("block_causal", False, 300),
        ("shifted", False, 200),
        ("causal", False, 200),
        ("block_causal", True, 300),
        pytest.param("block_causal", False, 800, marks=pytest.mark.slow),
        pytest.param("shifted", False, 800, marks=pytest.mark.slow),
        pytest.param("causal", False, 800, marks=pytest.mark.slow),
        pytest.param("block_causal", True, 10_000, marks=pytest.mark.slow),
    ],
)
def test_random_operations_lose_nothing(
    models: dict[str, Decoder], kind: str, overlap: bool, num_operations: int
) -> None:
    """add, step, abort and preempt in any order, with fewer pages than the requests could use."""
    rng = random.Random(kind)
    methods = list({"block_causal": BLOCKWISE, "causal": CAUSAL}.get(kind, FULL))
    served = engine(
        models[kind], num_pages=40, batch_invariant=False, max_rows=5, static_shapes=overlap, overlap=overlap
    )
    known: list[str] = []
    done, preemptions, number = 0, 0, 0
    for _ in range(num_operations):
        act = rng.choices(("add", "step", "abort", "preempt"), (3, 10, 0.5, 0.5))[0]
        if act == "add" and len(known) < 12:
            r = request(f"r{number}", number, rng.choice(methods), logprobs=False)
            number += 1
            served.add(r)
            known.append(r.request_id)
        elif act == "abort" and known:
            name = known.pop(rng.randrange(len(known)))
            assert served.abort(name) is not None
            if rng.random() < 0.3:  # its id is free at once
                served.add(request(name, number, rng.choice(methods), logprobs=False))
                known.append(name)
        elif act == "preempt":
            preemptions += served.preempt() is not None
        else:
            for step in served.step():
                if step.output is not None:
                    known.remove(step.request_id)
                    done += 1
                    assert MASK not in step.output.tokens
        served.check_integrity()
    while served.has_work:
        served.step()
        served.check_integrity()
    pool = served.scheduler.pool
    assert done > num_operations / 20 and preemptions > num_operations / 50
    assert pool.num_free == pool.capacity


def test_no_noise_lets_a_forbidden_token_through(models: dict[str, Decoder]) -> None:
    """Noise is finite even where every hashed bit is set; with 24 bits one of these seeds once drew the mask."""
    draw = Draw(*(torch.zeros(1, dtype=torch.int64) for _ in range(6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mbd_core.decoding.blocks.sampling._mix", lambda x: torch.full_like(x, 0xFFFFFFFF))
        assert 0.0 < float(uniform(draw, torch.zeros((1, 1), dtype=torch.int64))) < 1.0
    hot = [
        request(str(seed), 1, "single", prompt=(5, 6, 7), max_tokens=1, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (46651533, *range(200))
    ]
    assert all(MASK not in output.tokens for output in engine(models["block_causal"], max_rows=32).generate(hot))


def test_top_k_one_and_almost_no_temperature_are_greedy(models: dict[str, Decoder]) -> None:
    for seed in range(4):
        r = request("a", seed, "multi", max_tokens=20, sampling=Sampling(), ignore_eos=True)
        greedy = gist(engine(models["block_causal"]).generate([r])[0])
        for sampling in (Sampling(temperature=1.0, top_k=1), Sampling(temperature=1e-6)):
            drawn = dataclasses.replace(r, sampling=sampling)
            assert gist(engine(models["block_causal"]).generate([drawn])[0]) == greedy
