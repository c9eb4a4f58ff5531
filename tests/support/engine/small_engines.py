"""Small engines with random weights, and requests of every method for them."""

import random
from typing import Any

from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Leap, MultiBlock, Refresh
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Levenshtein, Soft
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig, MoEConfig

B, MASK, EOS, VOCAB = 4, 0, 1, 40

BLOCKWISE: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.4},
    "multi": {"buffer_size": 3, "tau_m2t": 0.4, "tau_add": 0.1},
    "t2t": {"buffer_size": 2, "tau_m2t": 0.4, "t2t": T2T(tau=0.2, max_edits=4)},
    "soft": {"buffer_size": 3, "tau_m2t": 0.4, "soft": Soft(stop_confidence=0.5)},
    "entropy": {"buffer_size": 3, "entropy": EntropyBound(gamma=4.0)},
    "parts": {"buffer_size": 2, "tau_m2t": 0.4, "sub_block": 2},
}
VERIFY: dict[str, dict[str, Any]] = {  # the same model at block size 1 judges drafts
    "verify": {"tau_m2t": 0.4, "verify": Verify(min_span=2)},
    "verify score": {"tau_m2t": 0.4, "verify": Verify(route="score", cost=0.5, store="causal", lead="causal")},
    "verify t2t": {"tau_m2t": 0.4, "t2t": T2T(tau=0.3, max_edits=3), "verify": Verify(route="hysteresis", tau_on=0.5)},
    "verify exact": {"verify": Verify(exact=True, store="causal")},
}
SHIFTED_VERIFY: dict[str, dict[str, Any]] = {
    "verify carry": {"tau_m2t": 0.4, "sub_block": 2, "carry": True, "verify": Verify()},
    "verify carry exact": {"carry": True, "verify": Verify(exact=True, store="causal", lead="causal")},
}
SHIFTED: dict[str, dict[str, Any]] = {  # models that attend in blocks, whose logits predict the next position
    "carry": {"tau_m2t": 0.4, "sub_block": 2, "carry": True},
    "multi carry": {"buffer_size": 3, "tau_m2t": 0.4, "sub_block": 2, "carry": True},
    "entropy carry": {"buffer_size": 2, "entropy": EntropyBound(gamma=4.0, rule="jetengine"), "carry": True},
}
EDITS: dict[str, dict[str, Any]] = {
    "edit": {"tau_m2t": 0.3, "edit": Levenshtein(steps=B, max_post_steps=5)},
    "edit sglang": {"tau_m2t": 0.3, "edit": Levenshtein(variant="sglang", max_post_steps=5, tau=0.2)},
}
FULL: dict[str, dict[str, Any]] = {
    "d2f": {"buffer_size": 3, "tau_m2t": 0.3, "prompt_attention": "full"},
    "d2f block-causal": {"buffer_size": 3, "tau_m2t": 0.3},
    "quota": {"canvas": Canvas(block_length=8, accept="quota", steps=12)},
    "prefix": {"canvas": Canvas(block_length=8, cache="prefix", tau=0.3)},
    "dual": {"canvas": Canvas(block_length=8, cache="dual", tau=0.3)},
    "leap": {"canvas": Canvas(block_length=8, tau=0.5, leap=Leap(tau_relaxed=0.3, radius=2))},
    "refresh": {"canvas": Canvas(block_length=8, tau=0.3, refresh=Refresh(prompt_interval=4, response_interval=2))},
    "d3llm": {"canvas": Canvas(block_length=4, multi_block=MultiBlock(tau_entropy=3.0))},
    "d3llm cache": {
        "canvas": Canvas(block_length=4, multi_block=MultiBlock(tau_entropy=3.0, cache_delay=1, refresh=5))
    },
    "branches": {"canvas": Canvas(tau=0.3, branches=Branches(block_lengths=(4, 8, 16), tau_sync=3, refresh=8))},
}
CAUSAL: dict[str, dict[str, Any]] = {  # models that store their keys by causal rows
    "ar": {"causal": Causal(method="ar")},
    "linear spec": {"causal": Causal(block_length=5)},
    "linear spec ahead": {"causal": Causal(block_length=3, ahead=True)},
    "linear spec tau": {"causal": Causal(tau=0.2)},
    "dlm": {"causal": Causal(method="dlm", tau=0.3)},
    "dlm full": {"causal": Causal(method="dlm", context="full", block_length=6)},
}

ALL_METHODS = BLOCKWISE | SHIFTED | VERIFY | SHIFTED_VERIFY | EDITS | FULL | CAUSAL

EXPERTS = MoEConfig(
    num_experts=8,
    experts_per_token=2,
    intermediate_size=16,
    score="sigmoid",
    norm_topk_prob=True,
    num_shared_experts=1,
    expert_bias=True,
    num_groups=4,
    topk_groups=2,
    first_dense_layers=1,
)


def build(architecture: str = "SDARForCausalLM", **changes: Any) -> Decoder:
    """A model of two layers with random weights."""
    config = ModelConfig(
        architecture=architecture,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_positions=256,
        tie_word_embeddings=False,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        block_size=B,
        **changes,
    )
    model = Decoder(config)
    init_weights(model, seed=3, std=0.35)
    return model.eval()


def request(name: str, seed: int, method: str, **changes: Any) -> Request:
    rng = random.Random(seed)
    fields = {
        "prompt": tuple(rng.choices(range(VOCAB), k=rng.randint(1, 25))),
        "max_tokens": rng.randint(1, 30),
        "decoding": DecodingConfig(block_size=B, **ALL_METHODS[method]),
        "sampling": Sampling(temperature=rng.choice((0.0, 0.8)), top_p=0.9, top_k=rng.choice((0, 20)), seed=seed),
        "logprobs": True,
        "ignore_eos": rng.random() < 0.3,
    }
    if "steps" in repr(fields["decoding"]) and getattr(fields["decoding"].canvas, "steps", None):
        fields["max_tokens"] = 24
    if fields["decoding"].edit is not None:
        fields["sampling"] = Sampling(seed=seed)
    return Request(request_id=name, **(fields | changes))


def engine(model: Decoder, **changes: Any) -> Engine:
    sizes = {"max_rows": 6, "num_pages": 200, "page_size": 8, "max_prefill_tokens": 12, "batch_invariant": True}
    return Engine(model, EngineConfig(**(sizes | changes)))


def gist(output: Output) -> tuple[Any, ...]:
    counts = output.counts
    return output.tokens, output.piece.logprobs, output.finish_reason, counts.num_forwards, counts.num_store_forwards


def run_with_preemption(served: Engine, requests: list[Request], rng: random.Random) -> list[Output]:
    for r in requests:
        served.add(r)
    outputs: dict[str, Output] = {}
    while served.has_work:
        if rng.random() < 0.2:
            served.preempt()
        for step in served.step():
            if step.output is not None:
                outputs[step.request_id] = step.output
    assert sum(o.counts.num_preemptions for o in outputs.values()) > 0
    return [outputs[r.request_id] for r in requests]
