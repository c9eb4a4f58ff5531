"""Small models and requests for tensor-parallel groups, and a way to drive an engine through all it can do."""

import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, Soft
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.parallel.group import Rank
from mbd_core.engine.parallel.leader import ParallelEngine
from mbd_core.models.model_config import ModelConfig, MoEConfig

LIMIT = 120.0  # seconds to wait for what comes by itself, however busy the machine is
B, VOCAB = 4, 48
DENSE = ModelConfig(
    architecture="SDARForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=256,
    tie_word_embeddings=False,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=B,
)
SDAR_MOE = replace(
    DENSE,
    architecture="SDARMoeForCausalLM",
    moe=MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=16, score="softmax", norm_topk_prob=True),
)
LLADA2_MOE = replace(
    DENSE,
    architecture="LLaDA2MoeModelLM",
    rotary_dim=4,
    moe=MoEConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=16,
        score="sigmoid",
        norm_topk_prob=True,
        num_shared_experts=1,
        expert_bias=True,
        num_groups=4,
        topk_groups=2,
        routed_scaling=2.5,
        first_dense_layers=1,
    ),
)
assert LLADA2_MOE.moe is not None
LLADA22_MOE = replace(LLADA2_MOE, moe=replace(LLADA2_MOE.moe, expert_capacity=3))
FAST_DLLM_V2 = replace(
    DENSE, architecture="Fast_dLLM_QwenForCausalLM", head_dim=4, qk_norm=False, qkv_bias=True, shift_logits=True
)
CONFIGS = {
    "dense": DENSE,
    "llada2-moe": LLADA2_MOE,
    "llada2.2-moe": LLADA22_MOE,
    "sdar-moe": SDAR_MOE,
    "fast-dllm-v2": FAST_DLLM_V2,
    "nemotron": replace(DENSE, architecture="NemotronLabsDiffusionModel", qk_norm=False, attention="causal"),
}
SIZES = EngineConfig(max_rows=3, num_pages=24, page_size=8, max_prefill_tokens=12)
METHODS: tuple[dict[str, Any], ...] = (
    {"buffer_size": 1, "tau_m2t": 0.4},
    {"buffer_size": 3, "tau_m2t": 0.4, "tau_add": 0.1},
    {"buffer_size": 2, "tau_m2t": 0.4, "t2t": T2T(tau=0.2, max_edits=4)},
    {"buffer_size": 3, "tau_m2t": 0.4, "soft": Soft(stop_confidence=0.5)},
)


CAUSAL_METHODS = tuple(
    {"causal": causal} for causal in (Causal(), Causal(method="ar"), Causal(method="dlm", tau=0.4), Causal(tau=0.2))
)
VERIFY_METHODS = tuple({"verify": verify} for verify in (Verify(min_span=2), Verify(exact=True, store="causal")))
CARRY_METHODS = tuple(method | {"sub_block": 2, "carry": True} for method in METHODS[:2])


def methods_of(config: ModelConfig) -> tuple[dict[str, Any], ...]:
    """Methods that a model can decode with."""
    if config.attention == "causal":
        return CAUSAL_METHODS
    if config.shift_logits:
        return (*CARRY_METHODS, {"tau_m2t": 0.4, "carry": True, "verify": Verify()})
    return METHODS if config.moe is not None else (*METHODS, *VERIFY_METHODS)


def requests(count: int, methods: tuple[dict[str, Any], ...] = METHODS) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            request_id=f"r{i}",
            prompt=tuple(rng.choices(range(2, VOCAB), k=rng.randint(1, 20))),
            max_tokens=rng.randint(12, 30),
            decoding=DecodingConfig(block_size=B, **methods[i % len(methods)]),
            sampling=Sampling(temperature=0.8 if i % 3 == 2 else 0.0, seed=i),
            logprobs=True,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def serve(engine: Engine) -> dict[str, Output]:
    """Seven requests for three rows: two come late, one is aborted while it runs and one that waits, two preempted."""
    todo, outputs = requests(7, methods_of(engine.model.config)), {}
    for request in todo[:5]:
        engine.add(request)
    for number in range(200):
        if number == 3:
            engine.preempt()
            for request in todo[5:]:
                engine.add(request)
        if number == 5:
            for name in ("r1", "r6"):
                aborted = engine.abort(name)
                assert aborted is not None
                outputs[name] = aborted
        if number == 9:
            engine.preempt()
        for step in engine.step():
            if step.output is not None:
                outputs[step.request_id] = step.output
        if not engine.has_work:
            engine.check_integrity()
            return outputs
    raise AssertionError("the requests did not end")


def gist(output: Output) -> tuple[Any, ...]:
    c = output.counts
    return output.tokens, output.finish_reason, c.num_forwards, c.num_store_forwards, c.num_preemptions


def rank_of(rank: int, size: int, port: int, timeout: float = 20.0, device: str = "cpu") -> Rank:
    return Rank(rank=rank, size=size, address="127.0.0.1", port=port, timeout=timeout, device=device)


def child(engine: ParallelEngine) -> int:
    assert engine.followers is not None
    (pid,) = engine.followers.pids
    return pid


def gone(pid: int, seconds: float = LIMIT) -> bool:
    """Whether the process ends within that time; one that has ended and was not waited for counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    return False


def break_off(*_: Any) -> None:
    raise OSError("no such\ndevice")
