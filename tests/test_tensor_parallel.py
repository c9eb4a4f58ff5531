"""Tensor parallelism: two processes serve what one serves, hold the same bits, and never wait for the dead."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from mbd_core.decoding.config import T2T, DecodingConfig, Soft
from mbd_core.decoding.sampling import Sampling
from mbd_core.engine.engine import Engine, EngineConfig
from mbd_core.engine.group import Rank, RankLost, init_group, load_shard, open_store
from mbd_core.engine.parallel import OutOfStep, ParallelEngine, run_parallel
from mbd_core.models.config import ModelConfig, MoEConfig
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.loader import load_model, save_model
from mbd_core.ops.dense import DenseAttention
from mbd_core.types import Output, Request

B, VOCAB = 4, 48
DENSE = ModelConfig(
    architecture="SDARForCausalLM", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=8, rope_theta=1e4, rms_norm_eps=1e-6, max_positions=256, tie_word_embeddings=False,
    mask_token_id=0, eos_token_ids=(1,), block_size=B,
)  # fmt: skip
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
        num_experts=8, experts_per_token=2, intermediate_size=16, score="sigmoid", norm_topk_prob=True,
        num_shared_experts=1, expert_bias=True, num_groups=4, topk_groups=2, routed_scaling=2.5, first_dense_layers=1,
    ),
)  # fmt: skip
CONFIGS = {"dense": DENSE, "llada2-moe": LLADA2_MOE, "sdar-moe": SDAR_MOE}
SIZES = EngineConfig(max_rows=3, num_pages=24, page_size=8, max_prefill_tokens=12)
METHODS: tuple[dict[str, Any], ...] = (
    {"buffer_size": 1, "tau_m2t": 0.4},
    {"buffer_size": 3, "tau_m2t": 0.4, "tau_add": 0.1},
    {"buffer_size": 2, "tau_m2t": 0.4, "t2t": T2T(tau=0.2, max_edits=4)},
    {"buffer_size": 3, "tau_m2t": 0.4, "soft": Soft(stop_confidence=0.5)},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name, config in CONFIGS.items():
        model = Decoder(config)
        init_weights(model, seed=3, std=0.35)
        out[name] = tmp_path_factory.mktemp("models") / name
        save_model(out[name], model)
    return out


def requests(count: int) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            request_id=f"r{i}",
            prompt=tuple(rng.choices(range(2, VOCAB), k=rng.randint(1, 20))),
            max_tokens=rng.randint(12, 30),
            decoding=DecodingConfig(block_size=B, **METHODS[i % len(METHODS)]),
            sampling=Sampling(temperature=0.8 if i % 3 == 2 else 0.0, seed=i),
            logprobs=True,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def serve(engine: Engine) -> dict[str, Output]:
    """Seven requests for three rows: two come late, one is aborted while it runs and one that waits, two preempted."""
    todo, outputs = requests(7), {}
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


def logits(model: Decoder) -> torch.Tensor:
    device = model.model.norm.weight.device
    tokens = torch.randint(2, VOCAB, (2, 37), generator=torch.Generator().manual_seed(1)).to(device)
    sees = torch.ones(1, 1, 37, 37, dtype=torch.bool, device=device)
    positions = torch.arange(37, device=device).expand(2, -1)
    with torch.inference_mode():
        return model.logits(model(tokens, positions, DenseAttention(sees)))


def check_logits(index: int, folders: dict[str, Path], size: int, port: int) -> None:
    """In every rank: shards' logits are near the whole model's and the same bits everywhere."""
    torch.set_num_threads(1)
    group = init_group(rank_of(index + 1, size, port))
    try:
        compare_logits(folders, size, load_shard, group)
    finally:
        group.close()


def compare_logits(folders: dict[str, Path], size: int, load: Any, group: Any) -> None:
    for folder in folders.values():
        found = logits(load(folder, group))
        torch.testing.assert_close(found, logits(load_model(folder)), atol=1e-4, rtol=1e-4)
        everywhere = [torch.empty_like(found) for _ in range(size)]
        dist.all_gather(everywhere, found.contiguous())
        assert all(torch.equal(found, other) for other in everywhere)


@pytest.mark.parametrize(("size", "names"), [(2, tuple(CONFIGS)), (4, ("llada2-moe",))])
def test_logits_are_near_the_whole_models_and_the_same_bits_on_every_rank(
    folders: dict[str, Path], size: int, names: tuple[str, ...]
) -> None:
    folders = {name: folders[name] for name in names}
    store = open_store("127.0.0.1", size=size, timeout=20)
    others = multiprocessing.spawn(check_logits, (folders, size, store.port), nprocs=size - 1, join=False, daemon=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    group = init_group(rank_of(0, size, store.port), store=store)
    try:
        compare_logits(folders, size, load_shard, group)
        while not others.join():
            pass
    finally:
        group.close()
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_serve_as_one_does(folders: dict[str, Path], name: str) -> None:
    wanted = serve(Engine(load_model(folders[name]), SIZES))
    assert {o.finish_reason for o in wanted.values()} == {"length", "abort"}
    assert any(o.counts.num_preemptions for o in wanted.values())
    with run_parallel(folders[name], SIZES, size=2, timeout=20) as engine:
        found = serve(engine)
        assert engine.generate(requests(2)), "the group serves on after a first load"
    assert {i: gist(o) for i, o in found.items()} == {i: gist(o) for i, o in wanted.items()}
    for i, output in found.items():
        assert output.logprobs == pytest.approx(wanted[i].logprobs, abs=1e-3)
    assert not dist.is_initialized()


def test_idle_followers_stay(folders: dict[str, Path]) -> None:
    with run_parallel(folders["dense"], SIZES, size=2, timeout=1.5) as engine:
        first = engine.generate(requests(1))
        time.sleep(2)
        assert list(map(gist, engine.generate(requests(1)))) == list(map(gist, first))
        assert engine.abort("nobody") is None and engine.preempt() is None and engine.step() == []
        with pytest.raises(ValueError, match="empty"):
            engine.add(replace(requests(1)[0], prompt=()))
        assert engine.generate(requests(3)), "what was refused has not reached the follower"


def child(engine: ParallelEngine) -> int:
    (process,) = (p for p in multiprocessing.get_context("spawn").active_children() if p.is_alive())
    assert process.pid is not None
    return process.pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_follower_is_an_error(folders: dict[str, Path], how: signal.Signals) -> None:
    started = 0.0
    with (  # noqa: PT012
        pytest.raises(RankLost, match=r"rank 0 of 2 could not .* within 2 s; start the group anew"),
        run_parallel(folders["dense"], SIZES, size=2, timeout=2) as engine,
    ):
        for request in requests(3):
            engine.add(request)
        engine.step()
        os.kill(child(engine), how)
        started = time.monotonic()
        try:
            while engine.has_work:
                engine.step()
        finally:
            assert time.monotonic() - started < 6
            with pytest.raises(RankLost, match="an earlier step"):
                engine.step()
    assert not dist.is_initialized()


def test_a_follower_out_of_step_says_so(folders: dict[str, Path]) -> None:
    with (  # noqa: PT012
        pytest.raises(RankLost) as caught,
        run_parallel(folders["dense"], SIZES, size=2, timeout=10) as engine,
    ):
        engine.add(replace(requests(1)[0], max_tokens=24, ignore_eos=True))
        while not engine.buffer.resident_RN.any():
            engine.step()
        engine.buffer.tokens_RNB[0, 0, 0] += 1  # the next report tells of it, and the step after that compares
        while engine.has_work:
            engine.step()
    assert OutOfStep.__name__ in caught.value.__notes__[0]


def test_what_does_not_divide_is_named_before_anything_starts(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="num_key_value_heads=4 does not divide among 3 tensor-parallel ranks"):  # noqa: SIM117
        with run_parallel(folders["dense"], SIZES, size=3):
            raise AssertionError("it started")


def test_places_are_checked(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        init_group(rank_of(2, 2, 0))
    with pytest.raises(ValueError, match="device='meta'"):
        rank_of(0, 2, 0, device="meta")
    with pytest.raises(ValueError, match="timeout=0"):
        rank_of(0, 2, 0, timeout=0)


def test_a_missing_rank_is_an_error() -> None:
    store = open_store("127.0.0.1", size=2, timeout=1)
    with pytest.raises(RankLost, match="did not meet all 2 ranks"):
        init_group(rank_of(0, 2, store.port, timeout=1), store=store)
    assert not dist.is_initialized()


def test_one_rank_alone_is_the_engine(folders: dict[str, Path]) -> None:
    """A group of one, in this process: the leader's checks, and a follower's against another model."""
    store = open_store("127.0.0.1", size=1, timeout=5)
    group = init_group(rank_of(0, 1, store.port), store=store)
    try:
        with pytest.raises(ValueError, match="belongs to a group already"):
            init_group(rank_of(0, 1, store.port), store=store)
        engine = ParallelEngine(load_shard(folders["dense"], group), SIZES, group=group)
        assert serve(engine).keys() == {f"r{i}" for i in range(7)}
        engine.close()
        engine.close()
        engine.add(requests(1)[0])
        with pytest.raises(RankLost, match="was closed"):
            engine.step()
        group.rank = replace(group.rank, rank=1, size=2)
        with pytest.raises(ValueError, match="rank 1 cannot lead"):
            ParallelEngine(load_model(folders["dense"]), SIZES, group=group)
        group.rank = replace(group.rank, rank=0)
        with pytest.raises(ValueError, match="use load_shard"):
            ParallelEngine(load_model(folders["dense"]), SIZES, group=group)
    finally:
        group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_two_gpus_serve_as_one_does(folders: dict[str, Path], name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    wanted = serve(Engine(load_model(folders[name], device="cuda:0"), SIZES))
    with run_parallel(folders[name], SIZES, size=2, device="cuda", timeout=60) as engine:
        found = serve(engine)
    assert {i: gist(o) for i, o in found.items()} == {i: gist(o) for i, o in wanted.items()}
