"""Drafts of several slots under one verification: the literal loop and the engine agree, exact answers are those of
block size 1, and what cannot be had is refused."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from drawn_counts import MANY_ROWS, chi_square
from small_engines import EOS, MASK, VOCAB, B, build, engine, request
from test_verified_decoding import at_block_size_1, random_requests

from mbd_core.decoding.blocks.config import T2T, DecodingConfig, decoding_config
from mbd_core.decoding.blocks.literal_algorithms import BlockTokens
from mbd_core.decoding.blocks.literal_verified import MaskDrafts, verified_multibd
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab, choose
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verification import Draft, HashedNoise, judge
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.canvas.unmasking import noise_source
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder, init_weights

EXACT = Verify(exact=True, store="causal")
METHODS: dict[str, dict[str, Any]] = {
    "span": {"tau_m2t": 0.4, "verify": Verify(min_span=2)},
    "every draft": {"tau_add": 0.3, "verify": Verify()},
    "in order": {"tau_m2t": 0.4, "tokens_per_step": 2, "verify": Verify(min_span=3, store="causal", lead="causal")},
    "exact": {"verify": EXACT},
    "exact in order": {"tau_add": 0.0, "verify": dataclasses.replace(EXACT, lead="causal")},
}
# Of slots and methods: every method with several slots, and a rule and an exact one with a single slot.
QUICK = {
    (1, "span"),
    (1, "exact"),
    (2, "every draft"),
    (2, "exact in order"),
    (3, "span"),
    (3, "in order"),
    (3, "exact"),
}


class WholeTexts:
    """The drafting and the judging model of the literal loop: every forward computes its whole text under a mask."""

    def __init__(self, model: Decoder, r: Request) -> None:
        assert r.decoding.verify is not None
        self.model, self.r, self.rule = model, r, r.decoding.verify
        self.vocab = Vocab(MASK, VOCAB)
        self.logits: dict[int, torch.Tensor] = {}  # of the last drafts, by position
        self.num_stored = 0

    def draft(self, cached: list[int], blocks: list[BlockTokens], forward: int) -> MaskDrafts:
        num_final = next((n for n, block in enumerate(blocks) if None in block), len(blocks))
        self.num_stored = len(cached) + num_final * B  # behind this forward
        ids, limits = list(cached), self.limits(len(cached))
        for block in blocks:
            start, masks = len(ids), [i for i, t in enumerate(block) if t is None]
            in_order = self.rule.store if not masks else self.rule.lead
            lead = (masks[0] if masks else B) if in_order == "causal" else 0
            limits += [start + i + 1 if i < lead else start + B for i in range(B)]
            ids += [MASK if t is None else t for t in block]
        logits_LV = self.logits_of(ids, limits)
        drafts: MaskDrafts = []
        end = len(self.r.prompt) + self.r.max_tokens
        for n, block in enumerate(blocks):
            start = len(cached) + n * B
            drafts.append({})
            for i in (i for i, t in enumerate(block) if t is None and start + i < end):
                self.logits[start + i] = logits_LV[start + i]
                token, confidence = self.choose(logits_LV[start + i], start + i, forward)
                drafts[-1][i] = (token, confidence)
        return drafts

    def judge(self, text: list[int], drafted: int, forward: int) -> tuple[bool, int]:
        position = len(text)
        limits = self.limits(self.num_stored) + list(range(self.num_stored + 1, position + 2))
        q_1V = self.logits_of([*text, MASK], limits)[-1:]
        draw = noise_source(torch.tensor([position]), self.r.sampling, forward)
        draft = Draft(torch.tensor([drafted]), self.logits[position][None], self.rule, HashedNoise())
        verdict = judge(q_1V, draft, draw, self.vocab, greedy=not self.r.sampling.draws)
        return bool(verdict[2, 0]), int(verdict[0, 1])

    def limits(self, stored: int) -> list[int]:
        """The number of keys that each stored token saw."""
        if self.rule.store == "causal":
            return list(range(1, stored + 1))
        return [(i // B + 1) * B for i in range(stored)]

    def choose(self, logits_V: torch.Tensor, position: int, forward: int) -> tuple[int, float]:
        draw = noise_source(torch.tensor([position]), self.r.sampling, forward) if self.r.sampling.draws else None
        token_1, confidence_1 = choose(logits_V[None], self.vocab, draw)
        return int(token_1), float(confidence_1)

    @torch.inference_mode()
    def logits_of(self, ids: list[int], limits: list[int]) -> torch.Tensor:
        mask_LL = torch.arange(len(ids)) < torch.tensor(limits)[:, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL, enable_gqa=True)
            return out[0].transpose(0, 1)

        return self.model.logits(self.model(torch.tensor(ids), torch.arange(len(ids)), attend))


@pytest.mark.parametrize(
    ("slots", "method"),
    [
        pytest.param(slots, method, marks=() if (slots, method) in QUICK else pytest.mark.slow)
        for slots in (1, 2, 3)
        for method in METHODS
    ],
)
def test_the_engine_follows_the_literal_loop(slots: int, method: str) -> None:
    """Tokens, reasons and numbers of forwards, greedy and drawn, of requests side by side."""
    model = build()
    init_weights(model, seed=11, std=0.14)
    rng = random.Random(slots)
    requests = [
        request(
            f"r{i}",
            i,
            "single",
            prompt=tuple(rng.choices(range(2, 40), k=rng.randint(1, 13))),
            max_tokens=rng.randint(1, 22),
            sampling=Sampling(temperature=rng.choice((0.0, 0.9)), top_k=rng.choice((0, 8)), seed=i),
            decoding=DecodingConfig(block_size=B, **({"buffer_size": slots} | METHODS[method])),
        )
        for i in range(8)
    ]
    outputs = engine(model, buffer_size=3).generate(requests)
    confirmed = 0
    for r, output in zip(requests, outputs, strict=True):
        texts = WholeTexts(model, r)
        eos = () if r.ignore_eos else (EOS,)
        run = verified_multibd(list(r.prompt), r.max_tokens, r.decoding, texts.draft, texts.judge, eos=eos)
        assert (list(output.tokens), output.finish_reason) == (run.tokens, run.finish_reason)
        assert output.counts.num_forwards == run.num_forwards
        confirmed += output.counts.num_confirmed_tokens
    assert confirmed


@pytest.mark.parametrize("slots", [2, 4])
def test_exact_answers_of_several_slots_are_those_of_block_size_1(slots: int) -> None:
    model = build()
    init_weights(model, seed=11, std=0.12)
    requests = random_requests(30, DecodingConfig(block_size=B, buffer_size=slots, verify=EXACT))
    alone = DecodingConfig(block_size=1)
    wanted = engine(at_block_size_1(model)).generate([dataclasses.replace(r, decoding=alone) for r in requests])
    found = engine(model, batch_invariant=False, buffer_size=slots).generate(requests)
    assert [(o.tokens, o.finish_reason) for o in found] == [(o.tokens, o.finish_reason) for o in wanted]


def test_an_exact_answer_never_fills_a_third_slot() -> None:
    """Behind a refusal nothing is kept, so the second block has no progress, and no third one begins."""
    model = build()
    init_weights(model, seed=11, std=0.12)
    two, four = (
        engine(model, buffer_size=4).generate(
            random_requests(20, DecodingConfig(block_size=B, buffer_size=slots, verify=EXACT))
        )
        for slots in (2, 4)
    )
    forwards, positions = ([getattr(o.counts, n) for o in two] for n in ("num_forwards", "num_positions"))
    assert forwards == [o.counts.num_forwards for o in four] and positions == [o.counts.num_positions for o in four]


@pytest.mark.slow
def test_exact_answers_of_two_slots_are_drawn_as_at_block_size_1() -> None:
    """Three tokens of two blocks, 1,000 times each way: the engine's triples have one distribution."""
    model = build()
    init_weights(model, seed=4, std=0.25)
    counts, crossed = [], 0
    for served, decoding in (
        (
            engine(model, batch_invariant=False, **MANY_ROWS, buffer_size=2),
            DecodingConfig(block_size=B, buffer_size=2, tau_add=0.0, verify=EXACT),
        ),
        (engine(at_block_size_1(model), batch_invariant=False, **MANY_ROWS), DecodingConfig(block_size=1)),
    ):
        requests = [
            Request(
                request_id=f"r{i}",
                prompt=(5, 9, 14, 33, 7, 21),
                max_tokens=3,
                decoding=decoding,
                sampling=Sampling(temperature=1.0, top_k=2, seed=i),
                ignore_eos=True,
            )
            for i in range(1000)
        ]
        outputs = served.generate(requests)
        crossed = crossed or sum(o.counts.num_drafted_tokens == 4 for o in outputs)
        counts.append(Counter(o.tokens for o in outputs))
    assert crossed > 50  # two, then the last of the first block together with the second block's
    assert 4 < len(counts[0] | counts[1]) <= 8
    assert chi_square(*counts) < 24.3, counts  # the 0.999 quantile for 7 degrees of freedom


def test_several_slots_are_refused_where_they_do_not_hold() -> None:
    for fields, message in (
        ({"t2t": T2T()}, "cannot be had with verify and buffer_size=2; let buffer_size be 1"),
        ({"sub_block": 2}, "cannot be had with verify and buffer_size=2; let buffer_size be 1"),
        ({"carry": True}, "cannot be had with verify and buffer_size=2; let buffer_size be 1"),
        ({"verify": Verify(route="hysteresis")}, "let route be span or score"),
        ({"verify": EXACT, "tau_semi": 0.5}, "tau_semi=0.5 has no meaning with verify.exact"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodingConfig(block_size=B, **({"buffer_size": 2, "verify": Verify()} | fields))
    decoding = DecodingConfig(block_size=B, buffer_size=2, verify=Verify())
    with pytest.raises(RequestRefused, match="exceeds this engine's 1 slots"):
        engine(build(), buffer_size=1).add(request("a", 4, "verify", decoding=decoding, sampling=Sampling()))
    of_model = {"buffer_size": 4, "tau_add": 0.5, "tau_m2t": 0.9}
    assert decoding_config(of_model, {"verify": {}}, block_size=B).buffer_size == 1
    both = decoding_config(of_model, {"verify": {}, "buffer_size": 2}, block_size=B)
    assert (both.buffer_size, both.tau_add) == (2, 0.5)
