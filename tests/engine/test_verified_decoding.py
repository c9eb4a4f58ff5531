"""Drafts that the same model verifies at block size 1: exact where it says so, in distribution where it is drawn, and
refused in a sentence where it cannot be had."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from drawn_counts import MANY_ROWS, chi_square
from small_engines import B, build, engine, request

from mbd_core.decoding.blocks.config import T2T, DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab, choose, distribution
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verification import Draft, HashedNoise, VerifyRouter, first_run, judge
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder, init_weights

EXACT = Verify(exact=True, store="causal")
SHIFTED = {"shift_logits": True, "qk_norm": False, "qkv_bias": True}


def at_block_size_1(model: Decoder) -> Decoder:
    """The same weights, decoded position by position."""
    alone = Decoder(dataclasses.replace(model.config, block_size=1))
    alone.load_state_dict(model.state_dict())
    return alone.eval()


def random_requests(number: int, decoding: DecodingConfig) -> list[Request]:
    """Greedy requests of random prompts and lengths."""
    rng = random.Random(1)
    return [
        request(
            f"r{i}",
            i,
            "single",
            max_tokens=rng.randint(1, 24),
            prompt=tuple(rng.choices(range(2, 40), k=rng.randint(1, 13))),
            sampling=Sampling(),
            decoding=decoding,
        )
        for i in range(number)
    ]


@pytest.mark.parametrize("kind", ["in place", "shifted"])
@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_an_exact_answer_is_the_answer_at_block_size_1(kind: str, number: int) -> None:
    """Greedy, over random prompts and lengths, in batches: no token differs, and there are fewer forwards."""
    shift = kind == "shifted"
    model = build("Fast_dLLM_QwenForCausalLM", **SHIFTED) if shift else build()
    init_weights(model, seed=11, std=0.12)
    requests = random_requests(number, DecodingConfig(block_size=B, verify=EXACT, carry=shift))
    alone = DecodingConfig(block_size=1, carry=shift)
    wanted = engine(at_block_size_1(model)).generate([dataclasses.replace(r, decoding=alone) for r in requests])
    found = engine(model, batch_invariant=False).generate(requests)
    assert [(o.tokens, o.finish_reason) for o in found] == [(o.tokens, o.finish_reason) for o in wanted]
    for output in found:
        assert 0 <= output.counts.num_confirmed_tokens <= output.counts.num_drafted_tokens
    assert any(o.counts.num_confirmed_tokens for o in found)
    forwards = [sum(o.counts.num_forwards for o in outputs) for outputs in (found, wanted)]
    assert forwards[0] < forwards[1]


def test_a_judgement_counts_the_positions_of_its_copies() -> None:
    """Of an answer of one block, all of whose judged runs reach its end: each forward has the block, and a judgement
    the copies."""
    decoding = DecodingConfig(block_size=B, verify=EXACT)
    one = request("a", 3, "single", prompt=(5, 9, 14, 33) * B, max_tokens=B, decoding=decoding, sampling=Sampling())
    (output,) = engine(build()).generate([dataclasses.replace(one, ignore_eos=True)])
    counts = output.counts
    assert counts.num_positions == counts.num_forwards * B + counts.num_drafted_tokens > counts.num_forwards * B


def test_a_drawn_token_has_the_distribution_at_block_size_1() -> None:
    """Chi-square over 100,000 judged drafts, with and without truncation: what is decided at a position is q."""
    generator = torch.Generator().manual_seed(3)
    p_V, q_V = torch.randn(2, 9, generator=generator) * 1.5
    number, vocab = 100_000, Vocab(0, 8)
    for truncates in (False, True):
        draw = draws(number, top_k=5 if truncates else 0, truncates=truncates)
        drafted = choose(p_V.expand(number, 9), vocab, dataclasses.replace(draw, forward_P=draw.forward_P - 1))[0]
        draft = Draft(drafted, p_V.expand(number, 9), Verify(), HashedNoise())
        token_2P, own_2P, accepted_2P = judge(q_V.expand(number, 9), draft, draw, vocab, greedy=False)
        decided = torch.where(accepted_2P[:number] > 0, token_2P[:number], token_2P[number:]).long()
        wanted_V = distribution(q_V[None], vocab, dataclasses.replace(draw.select(slice(0, 1))))[0]
        counts_V = torch.bincount(decided, minlength=9).double()
        live_V = wanted_V > 0
        assert not counts_V[~live_V].any() and 0.2 < float(accepted_2P.mean()) < 0.95
        expected_V = wanted_V[live_V].double() * number
        chi_square = float(((counts_V[live_V] - expected_V) ** 2 / expected_V).sum())
        assert chi_square < 26.1  # the 0.999 quantile for 8 degrees of freedom; there are at most 6
        torch.testing.assert_close(own_2P.float(), q_V.softmax(-1)[token_2P.long()])


def draws(number: int, *, top_k: int, truncates: bool) -> Draw:
    """The noise of so many requests at one position, in their second forward."""
    ones = torch.ones(number, dtype=torch.int64)
    return Draw(
        temperature_P=ones.float(),
        top_p_P=ones.float(),
        top_k_P=ones * top_k,
        seed_P=torch.arange(number),
        position_P=ones * 17,
        forward_P=ones,
        truncates=truncates,
    )


def test_exact_answers_are_drawn_as_at_block_size_1() -> None:
    """Two tokens drawn together, 1,000 times each way: the engine's pairs have one distribution."""
    model = build()
    init_weights(model, seed=4, std=0.25)
    counts = []
    for served, decoding in (
        (engine(model, batch_invariant=False, **MANY_ROWS), DecodingConfig(block_size=B, verify=EXACT)),
        (engine(at_block_size_1(model), batch_invariant=False, **MANY_ROWS), DecodingConfig(block_size=1)),
    ):
        requests = [
            Request(
                request_id=f"r{i}",
                prompt=(5, 9, 14, 33, 7),
                max_tokens=2,
                decoding=decoding,
                sampling=Sampling(temperature=1.0, top_k=3, seed=i),
                ignore_eos=True,
            )
            for i in range(1000)
        ]
        counts.append(Counter(o.tokens for o in served.generate(requests)))
    assert len(counts[0] | counts[1]) <= 9 and chi_square(*counts) < 26.1


def test_scores_choose_what_is_verified() -> None:
    """E[K] of accepted tokens, its cost, and a state that stays between two thresholds."""
    assert [first_run(masks) for masks in ([3], [1, 2, 4], [0, 2], [2, 3, 4])] == [1, 2, 1, 3]
    sure, unsure = torch.zeros(3).numpy(), torch.full((3,), -5.0).numpy()
    score = VerifyRouter(Verify(route="score", cost=2.0, tau_score=1.0), 40)
    assert score.verifies(sure, 0) and not score.verifies(unsure, 0)
    margin = VerifyRouter(Verify(route="score", estimate="margin", tau_margin=0.3), 40)
    assert margin.verifies(torch.tensor([0.4, 0.2, 0.9]).numpy(), 0) and not margin.verifies(sure, 0)
    state = VerifyRouter(Verify(route="hysteresis", tau_on=1.0, tau_off=-1.0, cost_of="confident"), 40)
    assert [state.verifies(sure, n) for n in (2, 1, 2, 4, 5, 2)] == [False, True, True, True, False, False]
    assert state.verifies(sure, 0)
    state.skip()
    assert not state.verifies(sure, 3)


def test_block_stored_pages_are_shared_and_causal_ones_are_not() -> None:
    """Pages of verified blocks are those of other methods, as long as they are stored by blocks."""
    model, prompt = build(), tuple(range(2, 35))
    served = engine(model)
    for verify, cached in ((Verify(), 0), (Verify(store="causal"), 0), (None, 32), (EXACT, 32)):
        decoding = DecodingConfig(block_size=B, verify=verify)
        one = Request(request_id="a", prompt=prompt, max_tokens=9, decoding=decoding, ignore_eos=True)
        (output,) = served.generate([one])
        assert output.counts.num_cached_tokens == cached
        assert output.tokens == engine(model, prefix_caching=False).generate([one])[0].tokens


@pytest.mark.parametrize("method", ["verify", "verify exact", "verify t2t"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_goes_on_in_another_engine(method: str, temperature: float) -> None:
    """From a whole block, with the same noise; the state of a hysteresis begins anew."""
    model = build()
    r = request("a", 3, method, max_tokens=24, ignore_eos=True, sampling=Sampling(temperature=temperature, seed=5))
    if method == "verify t2t":
        r = dataclasses.replace(r, decoding=dataclasses.replace(r.decoding, verify=Verify(min_span=2)))
    (whole,) = engine(model).generate([r])
    cut = 3 * B - len(r.prompt) % B
    (rest,) = engine(model).generate([dataclasses.replace(r, committed=whole.tokens[:cut], first_forward=9)])
    assert rest.tokens == whole.tokens


def test_named_methods_and_overrides_are_read() -> None:
    for name, fields in METHODS.items():
        if "verify" in fields:
            decoding = decoding_config({"buffer_size": 4, "tau_add": 0.5, "tau_m2t": 0.9}, fields, block_size=32)
            assert decoding.verify is not None and decoding.buffer_size == 1, name


def test_what_cannot_be_had_is_refused_in_a_sentence() -> None:
    served, base = engine(build()), DecodingConfig(block_size=B, verify=Verify())
    plain = request("a", 4, "verify", decoding=base, sampling=Sampling())
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"grammar": Grammar(syntax="regex", text="a*"), "ignore_eos": False}, "let verify.exact be true"),
        ({"rollout": True}, "with verify"),
        ({"top_logprobs": 2}, "with verify"),
        ({"sampling": Sampling(frequency_penalty=0.5)}, "no logit_bias, penalty"),
        ({"decoding": dataclasses.replace(base, carry=True)}, "let carry be False"),
        ({"decoding": dataclasses.replace(base, block_size=8)}, "differs from the model's 4"),
    )
    for changes, message in cases:
        with pytest.raises(RequestRefused, match=message) as caught:
            served.add(dataclasses.replace(plain, **changes))
        assert "\n" not in str(caught.value)
    others = (
        (build("NemotronLabsDiffusionModel", attention="causal", qk_norm=False), "take ar or linear-spec"),
        (build("LLaDAModelLM", attention="full"), "take a canvas"),
        (build("Fast_dLLM_QwenForCausalLM", **SHIFTED), "let carry be True"),
    )
    for model, message in others:
        with pytest.raises(RequestRefused, match=message):
            engine(model).add(plain)
    for verify, message in (
        ({"tau_score": 1.0}, "no effect with verify.route='span'"),
        ({"route": "score", "min_span": 3}, "no effect with verify.route='score'"),
        ({"route": "score", "tau_margin": 0.3}, "let estimate be margin"),
        ({"route": "hysteresis", "tau_on": -9.0}, "exceeds verify.tau_on"),
        ({"temper": 0.0}, "temper"),
        ({"exact": True}, "let verify.store be causal"),
        ({"exact": True, "store": "causal", "min_span": 2}, "no meaning with verify.exact"),
        ({"lead": "causal"}, "let verify.store be causal too"),
    ):
        with pytest.raises(ValueError, match=message):
            decoding_config({}, {"verify": verify}, block_size=B)
    for fields, message in (
        ({"adaptive": False}, "adaptive=False has no meaning with verify"),
        ({"verify": EXACT, "tau_m2t": 0.5}, "tau_m2t=0.5 has no meaning with verify.exact"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodingConfig(block_size=B, **({"verify": Verify()} | fields))
    with pytest.raises(ValueError, match="max_edits=0"):
        DecodingConfig(block_size=B, t2t=T2T(max_edits=0))
