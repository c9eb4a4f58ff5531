"""Tensor parallelism: two processes serve what one serves, hold the same bits, and never wait for the dead."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.decoding_config import T2T, DecodingConfig, Soft
from mbd_core.decoding.request import Output, Request
from mbd_core.decoding.sampling import Sampling
from mbd_core.engine.engine import Engine
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.models.quantize import Parts, quantize_weights
from mbd_core.models.shard import Shard, split_dim
from mbd_core.ops.attention_dense import DenseAttention
from mbd_core.ops.fp8 import Fp8Module, dequantize
from mbd_core.parallel import kv_agreement, start
from mbd_core.parallel.follower import OutOfStep, run_follower
from mbd_core.parallel.followers import Followers
from mbd_core.parallel.group import Rank, RankLost, init_group, load_shard, open_store
from mbd_core.parallel.leader import ParallelEngine
from mbd_core.parallel.start import check_size, start_parallel
from mbd_core.serving.load import LoadedModel, load_engine

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
SIZES_OF_TINY = EngineConfig(max_rows=3, num_pages=48)
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
    with closing(start_parallel(folders[name], SIZES, size=2, timeout=20)) as engine:
        found = serve(engine)
        assert engine.generate(requests(2)), "the group serves on after a first load"
    assert {i: gist(o) for i, o in found.items()} == {i: gist(o) for i, o in wanted.items()}
    for i, output in found.items():
        assert output.logprobs == pytest.approx(wanted[i].logprobs, abs=1e-3)
    assert not dist.is_initialized()


def test_all_ranks_have_the_pages_of_the_rank_where_the_fewest_fit(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower has less room than rank 0: it measures by itself, in a process of its own."""
    monkeypatch.setattr(start, "run_follower", run_follower_with_little_memory)
    sizes = replace(SIZES, num_pages=None, kv_memory_fraction=0.5)
    whole = Engine(load_model(folders["dense"]), sizes)
    with closing(start_parallel(folders["dense"], sizes, size=2, timeout=20)) as engine:
        assert engine.num_pages == engine.config.num_pages == 17 < whole.num_pages
        assert engine.kv_tokens == 16 * 8
        assert {i: gist(o) for i, o in serve(engine).items()}


def run_follower_with_little_memory(folder: Path, rank: Rank, dtype: torch.dtype | None) -> None:
    def few_pages(model: Decoder, config: EngineConfig) -> int:
        assert config.kv_memory_fraction == 0.25, "two ranks share a machine's memory"
        return 17

    kv_agreement.fitting_pages = few_pages
    run_follower(folder, rank, dtype)


def test_idle_followers_stay(folders: dict[str, Path]) -> None:
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=4)) as engine:
        (first_request,) = requests(1)
        first = engine.generate([first_request])
        time.sleep(5)
        assert list(map(gist, engine.generate(requests(1)))) == list(map(gist, first))
        assert engine.abort("nobody") is None and engine.preempt() is None and engine.step() == []
        with pytest.raises(ValueError, match="empty"):
            engine.add(replace(requests(1)[0], prompt=()))
        assert engine.generate(requests(3)), "what was refused has not reached the follower"
        assert engine.prepare(first_request.decoding) == 0
        engine.add(first_request)
        with pytest.raises(ValueError, match=r"prepare\(\) needs an idle engine"):
            engine.prepare(first_request.decoding)
        while not engine.step():
            pass


def test_a_step_ahead_whose_request_was_aborted_is_taken_by_all(folders: dict[str, Path]) -> None:
    ahead = replace(SIZES, static_shapes=True, overlap=True)
    first, second = requests(2)
    wanted = gist(Engine(load_model(folders["dense"]), SIZES).generate([second])[0])
    with closing(start_parallel(folders["dense"], ahead, size=2, timeout=10)) as engine:
        engine.add(first)
        while engine.ahead.step is None:
            engine.step()
        assert engine.abort(first.request_id) is not None
        assert gist(engine.generate([second])[0]) == wanted


def child(engine: ParallelEngine) -> int:
    assert engine.followers is not None
    (pid,) = engine.followers.pids
    return pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_follower_is_an_error(folders: dict[str, Path], how: signal.Signals) -> None:
    started = 0.0
    with (  # noqa: PT012
        pytest.raises(RankLost, match=r"rank 0 of 2 could not .* within 4 s; start the group anew"),
        closing(start_parallel(folders["dense"], SIZES, size=2, timeout=4)) as engine,
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
            assert time.monotonic() - started < 9
            with pytest.raises(RankLost, match="an earlier step"):
                engine.step()
    assert not dist.is_initialized()


def test_a_follower_out_of_step_says_so(folders: dict[str, Path]) -> None:
    with (  # noqa: PT012
        pytest.raises(RankLost) as caught,
        closing(start_parallel(folders["dense"], SIZES, size=2, timeout=10)) as engine,
    ):
        engine.add(replace(requests(1)[0], max_tokens=24, ignore_eos=True))
        while not engine.buffer.resident_RN.any():
            engine.step()
        engine.buffer.tokens_RNB[0, 0, 0] += 1  # the next report tells of it, and the step after that compares
        while engine.has_work:
            engine.step()
    assert f"rank 1: {OutOfStep.__name__}: " in caught.value.__notes__[0]


def test_what_does_not_divide_is_named_before_anything_starts(folders: dict[str, Path]) -> None:
    for size, sentence in (
        (3, "num_key_value_heads=4 does not divide among 3 tensor-parallel ranks"),
        (0, "tensor_parallel=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            start_parallel(folders["dense"], SIZES, size=size)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_size(DENSE, 1, device="cuda")
    check_size(DENSE, 2, device="cpu")
    with pytest.raises(ValueError, match="tensor_parallel=2 needs a GPU for each rank; this process sees 1"):
        check_size(DENSE, 2, device="cuda")


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
    """A group of one, in this process: the leader's checks, and what is left after `close()`."""
    store = open_store("127.0.0.1", size=1, timeout=5)
    group = init_group(rank_of(0, 1, store.port), store=store)
    try:
        with pytest.raises(ValueError, match="belongs to a group already"):
            init_group(rank_of(0, 1, store.port), store=store)
        engine = ParallelEngine(load_shard(folders["dense"], group), SIZES, group=group)
        assert serve(engine).keys() == {f"r{i}" for i in range(7)}
        group.rank = replace(group.rank, rank=1, size=2)
        with pytest.raises(ValueError, match="rank 1 cannot lead"):
            ParallelEngine(load_model(folders["dense"]), SIZES, group=group)
        group.rank = replace(group.rank, rank=0)
        with pytest.raises(ValueError, match="use load_shard"):
            ParallelEngine(load_model(folders["dense"]), SIZES, group=group)
        engine.close()
        engine.close()
        assert not dist.is_initialized()
        engine.add(requests(1)[0])
        with pytest.raises(RankLost, match="was closed"):
            engine.step()
    finally:
        if dist.is_initialized():
            group.close()


# -- through load_engine --------------------------------------------------------------------------------------------


def asked(loaded: LoadedModel) -> list[Request]:
    prompts, methods = ((9, 9), (5, 6, 7, 8, 9, 10), (40,)), ({}, {"buffer_size": 1, "tau_m2t": 0.3}, {"t2t": {}})
    return [
        Request(request_id=f"r{i}", prompt=prompt, max_tokens=24, decoding=loaded.decoding(fields), logprobs=True)
        for i, (prompt, fields) in enumerate(zip(prompts, methods, strict=True))
    ]


def with_more_eos(tiny_model_dir: Path, folder: Path) -> Path:
    """A copy whose generation_config.json names one EOS id more than config.json, one that the model answers with."""
    shutil.copytree(tiny_model_dir, folder)
    with load_engine(folder, SIZES_OF_TINY) as loaded:
        (whole, *_) = loaded.engine.generate(asked(loaded))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, whole.tokens[9]]}))
    return folder


def test_load_engine_over_two_ranks_serves_as_over_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The EOS ids that count are generation_config.json's on every rank: else the followers fall out of step."""
    folder = with_more_eos(tiny_model_dir, tmp_path / "model")
    with load_engine(folder, SIZES_OF_TINY) as one:
        wanted = one.engine.generate(asked(one))
        assert wanted[0].finish_reason == "stop" and len(wanted[0].tokens) < 10
        one.check_health()
    with load_engine(folder, SIZES_OF_TINY, tensor_parallel=2) as two:
        assert isinstance(two.engine, ParallelEngine)
        found = two.engine.generate(asked(two))
        pid = child(two.engine)
        two.check_health()
        assert (two.config, two.defaults) == (one.config, one.defaults)
        assert two.backend == f"{one.backend}, tensor parallel over 2 ranks"
    assert list(map(gist, found)) == list(map(gist, wanted))
    for two_ranks, one_rank in zip(found, wanted, strict=True):
        assert two_ranks.logprobs == pytest.approx(one_rank.logprobs, abs=1e-3)
    assert gone(pid) and not dist.is_initialized()
    with pytest.raises(RankLost, match="was closed"):
        two.check_health()


def test_a_follower_s_death_is_known_before_anything_is_asked(tiny_model_dir: Path) -> None:
    with load_engine(tiny_model_dir, SIZES_OF_TINY, tensor_parallel=2) as loaded:
        assert isinstance(loaded.engine, ParallelEngine)
        loaded.check_health()
        os.kill(child(loaded.engine), signal.SIGKILL)
        deadline = time.monotonic() + 5
        with pytest.raises(RankLost, match="has ended"):  # noqa: PT012
            while time.monotonic() < deadline:
                loaded.check_health()
        with pytest.raises(RankLost) as caught:
            loaded.engine.generate(asked(loaded))
        assert caught.value.__notes__ == ["rank 1: ended by SIGKILL"]


def test_a_follower_that_hangs_while_nothing_is_asked_is_known_and_nobody_waits(folders: dict[str, Path]) -> None:
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=4)) as engine:
        engine.check_health()
        os.kill(child(engine), signal.SIGSTOP)
        deadline, longest = time.monotonic() + 12, 0.0
        with pytest.raises(RankLost, match="could not reach the others: a rank ended, or did not answer within 4 s"):  # noqa: PT012
            while (asked := time.monotonic()) < deadline:
                engine.check_health()
                longest = max(longest, time.monotonic() - asked)
                time.sleep(0.02)
        assert longest < 1
        with pytest.raises(RankLost, match="did not answer"):
            engine.generate(requests(1))


def test_a_step_that_fails_is_for_good(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=4)) as engine:
        engine.generate(requests(1))
        engine.check_health()
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", break_off)
            engine.add(requests(1)[0])
            with pytest.raises(OSError, match="no such"):
                engine.step()
        for call in (engine.check_health, engine.step):
            with pytest.raises(RankLost, match="an earlier step of the tensor-parallel group failed"):
                call()


def test_a_device_by_number_cannot_be_cut(tiny_model_dir: Path) -> None:
    with pytest.raises(ValueError, match="device=cuda:1 cannot be honoured with tensor_parallel"):
        load_engine(tiny_model_dir, SIZES_OF_TINY, device=torch.device("cuda:1"), tensor_parallel=2)


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """All weights by the names they have before rounding, FP8 ones widened."""
    found = {n: t for n, t in model.state_dict().items() if not n.endswith(("_values", "_scale"))}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Module):
            held = [n.removesuffix("_values") for n, _ in module.named_buffers() if n.endswith("_values")]
            found |= {f"{name}.{n}": dequantize(module.weight(n), torch.float32) for n in held}
    return found


@pytest.mark.parametrize(("name", "parts"), [("dense", "all"), ("sdar-moe", "experts")])
def test_each_rank_rounds_what_it_holds(folders: dict[str, Path], name: str, parts: Parts) -> None:
    """What is cut by output rows is rounded as in the whole model; what is cut by input columns by scales of its own,
    so two ranks compute the model that is put together from their rounded parts, and no other."""
    whole = weights_of(quantize_weights(load_model(folders[name]), parts))
    parts_of = [
        weights_of(quantize_weights(load_model(folders[name], shard=Shard(rank=r, size=2), reduce=abs), parts))
        for r in range(2)
    ]
    joined, plain, other = load_model(folders[name]), load_model(folders[name]), []
    with torch.no_grad():
        for tensor, weight in joined.state_dict().items():
            dim = split_dim(tensor)
            pieces = [part[tensor] for part in parts_of]
            weight.copy_(pieces[0] if dim is None else torch.cat(pieces, dim))
            if not torch.equal(weight, whole[tensor]):
                other.append(tensor)
    assert other and all(n.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")) for n in other)
    todo = requests(3)
    wanted = Engine(joined, SIZES).generate(todo)
    with closing(start_parallel(folders[name], SIZES, size=2, fp8=parts, timeout=20)) as engine:
        found = engine.generate(todo)
    assert list(map(gist, found)) == list(map(gist, wanted))
    unrounded = Engine(plain, SIZES).generate(todo)
    for output, right, wrong in zip(found, wanted, unrounded, strict=True):
        assert output.logprobs == pytest.approx(right.logprobs, abs=1e-3)
        assert output.logprobs != pytest.approx(wrong.logprobs, abs=1e-3), "FP8 should show"


# -- what goes wrong ------------------------------------------------------------------------------------------------


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether the process ends within that time; one that has ended and was not waited for counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    return False


def unloadable(folders: dict[str, Path], folder: Path) -> Path:
    """A model of which rank 1's half is not finite, and rank 0's is."""
    model = load_model(folders["dense"])
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[-1, 0] = torch.inf
    save_model(folder, model)
    return folder


def break_off(*_: Any) -> None:
    raise OSError("no such\ndevice")


def run_out_of_memory(folder: Path, rank: Rank, dtype: torch.dtype | None) -> None:
    group = init_group(rank)
    load_shard(folder, group, dtype=dtype)
    group.receive()
    raise MemoryError("no room for pages")


@pytest.mark.parametrize("when", ["before it joins", "loading", "building its engine"])
def test_a_rank_that_cannot_start_is_one_sentence_at_once_and_leaves_nobody(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    started: list[Followers] = []

    def recorded(*args: Any) -> Followers:
        started.append(Followers(*args))
        return started[0]

    monkeypatch.setattr(start, "Followers", recorded)
    if when == "loading":
        folder, sentence = unloadable(folders, tmp_path / "bad"), "rank 1: ValueError: .*q_proj.* not finite"
    elif when == "before it joins":
        monkeypatch.setattr(start, "run_follower", break_off)
        folder, sentence = folders["dense"], "rank 1: OSError: no such device$"
    else:
        monkeypatch.setattr(start, "run_follower", run_out_of_memory)
        folder, sentence = folders["dense"], "rank 1: MemoryError: no room for pages$"
    begun = time.monotonic()
    with pytest.raises(ValueError, match=f"^the 2 tensor-parallel ranks could not start: {sentence}"):
        start_parallel(folder, SIZES, size=2, timeout=60)
    assert time.monotonic() - begun < 30
    assert not dist.is_initialized()
    (followers,) = started
    assert all(gone(pid) for pid in followers.pids)


ENGINE = "start_parallel(Path(sys.argv[1]), EngineConfig(max_rows=1, num_pages=8), size=2).followers"
ASLEEP = "Followers(time.sleep, [(60,)])"


@pytest.mark.parametrize("followers", [ENGINE, ASLEEP], ids=["engine", "no group at all"])
def test_followers_end_with_a_killed_leader(folders: dict[str, Path], followers: str) -> None:
    """The leader is a script on standard input: it has neither a file nor a main guard, nothing that can be imported.
    Without a group, only the connection can tell a follower."""
    script = f"""
import sys, time
from pathlib import Path
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.parallel.followers import Followers
from mbd_core.parallel.start import start_parallel
followers = {followers}
print(*followers.pids, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-", str(folders["dense"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdin is not None and leader.stdout is not None
        leader.stdin.write(script)
        leader.stdin.close()
        pid = int(leader.stdout.readline())
        try:
            assert not gone(pid, 1.5), "it lives as long as the leader"
        finally:
            leader.kill()
    assert gone(pid)


def test_followers_outlive_the_thread_that_started_them_and_a_terminal_s_ctrl_c() -> None:
    made: list[Followers] = []
    thread = threading.Thread(target=lambda: made.append(Followers(time.sleep, [(60,), (60,)])))
    thread.start()
    thread.join()
    (followers,) = made
    try:
        time.sleep(1.5)  # they have come to sleep by then
        os.kill(followers.pids[0], signal.SIGINT)
        assert followers.failure(wait=0.5) is None and followers.alive
        os.kill(followers.pids[1], signal.SIGKILL)
        assert followers.failure(wait=0.5) == "rank 2: ended by SIGKILL"
        assert not followers.alive
    finally:
        followers.end()
    assert all(gone(pid) for pid in followers.pids)


def test_a_reason_is_told_as_often_as_it_is_asked_for() -> None:
    followers = Followers(break_off, [()])
    try:
        reasons = {followers.failure(wait=10) for _ in range(3)}
    finally:
        followers.end(5)
    assert reasons | {followers.failure(wait=0.1)} == {"rank 1: OSError: no such device"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_two_gpus_serve_as_one_does(folders: dict[str, Path], name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    wanted = serve(Engine(load_model(folders[name], device="cuda:0"), SIZES))
    with closing(start_parallel(folders[name], SIZES, size=2, device="cuda", timeout=60)) as engine:
        found = serve(engine)
    assert {i: gist(o) for i, o in found.items()} == {i: gist(o) for i, o in wanted.items()}
