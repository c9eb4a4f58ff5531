"""Answers of small engines, with what a learner replays of them."""

import random
from collections.abc import Sequence
from typing import Any

from small_engines import VOCAB, B, engine

from mbd_core.decoding.blocks.config import DecodingConfig, EntropyBound
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.states.answer import ReplayedAnswer

METHODS: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.3},
    "two slots": {"buffer_size": 2, "tau_m2t": 0.3, "tau_add": 0.1, "tau_semi": 0.5},
    "four slots": {"buffer_size": 4, "tau_m2t": 0.3, "tau_add": 0.1, "tau_semi": 0.5},
    "quota": {"buffer_size": 2, "tokens_per_step": 2, "fallback": "leftmost", "tau_m2t": 0.6},
    "entropy": {"buffer_size": 3, "entropy": EntropyBound(gamma=4.0, rule="jetengine")},
    "parts": {"buffer_size": 2, "tau_m2t": 0.4, "sub_block": 2},
    "carry": {"buffer_size": 3, "tau_m2t": 0.4, "sub_block": 2, "carry": True},
    "d2f": {"buffer_size": 3, "tau_m2t": 0.3, "prompt_attention": "full"},
}


def rollout_request(seed: int, method: str, **changes: Any) -> Request:
    """A request for a rollout: every second one is drawn, and all but every fourth end at many tokens."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {
        "prompt": tuple(rng.choices(range(2, VOCAB), k=rng.randint(1, 21))),
        "max_tokens": rng.randint(1, 30),
        "sampling": Sampling(temperature=(0.0, 1.0)[seed % 2], seed=seed),
        "ignore_eos": seed % 4 == 0,
        "stop_token_ids": () if seed % 4 == 0 else tuple(range(30, VOCAB)),
        "rollout": True,
    }
    decoding = DecodingConfig(block_size=B, **METHODS[method])
    return Request(request_id=f"{method} {seed}", decoding=decoding, **fields | changes)


def replayed(request: Request, output: Output, *, advantage: float = 1.0, correct: bool = True) -> ReplayedAnswer:
    """What a learner replays of an answer."""
    return ReplayedAnswer(
        prompt=request.prompt,
        answer=output.piece,
        tail=output.tail,
        experts=output.experts,
        decoding=request.decoding,
        max_tokens=request.max_tokens,
        advantage=advantage,
        correct=correct,
        template=request.template,
    )


def answers_of(model: Decoder, requests: Sequence[Request], **changes: Any) -> list[ReplayedAnswer]:
    """The engine's answers to requests for rollouts; their advantages are 1, -0.5, 1, ..."""
    outputs = engine(model, **changes).generate(list(requests))
    return [
        replayed(request, output, advantage=(1.0, -0.5)[number % 2], correct=number % 2 == 0)
        for number, (request, output) in enumerate(zip(requests, outputs, strict=True))
    ]
