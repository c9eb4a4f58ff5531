"""The leader and its followers serve what one engine serves, and never wait for the dead."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_folders import rounded_folder
from small_groups import (
    CONFIGS,
    LIMIT,
    METHODS,
    SIZES,
    break_off,
    child,
    gist,
    methods_of,
    rank_of,
    requests,
    serve,
)

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.request import Output
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.num_pages import bytes_per_page
from mbd_core.engine.parallel import group as kv_agreement
from mbd_core.engine.parallel import leader
from mbd_core.engine.parallel.follow import OutOfStep, run_follower
from mbd_core.engine.parallel.group import Rank, RankLost, init_group, open_store
from mbd_core.engine.parallel.leader import ParallelEngine, start_parallel
from mbd_core.engine.parallel.shared_sums import load_shard
from mbd_core.engine.schedule.pacing import Pacer
from mbd_core.engine.schedule.scheduler import PrefillChunk
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import Fp8Parts
from mbd_core.models.quantize import quantize_weights, quantized_parts
from mbd_core.models.shard import Shard, served_dim
from mbd_core.ops.experts.fp8 import Fp8Module, dequantize

pytestmark = pytest.mark.usefixtures("warm_followers")


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_serve_as_one_does(folders: dict[str, Path], name: str) -> None:
    wanted = serve(Engine(load_model(folders[name]), SIZES))
    assert {o.finish_reason for o in wanted.values()} == {"length", "abort"}
    assert any(o.counts.num_preemptions for o in wanted.values())
    with closing(start_parallel(folders[name], SIZES, size=2, timeout=LIMIT)) as engine:
        found = serve(engine)
        again = requests(2, methods_of(engine.model.config))
        assert engine.generate(again), "the group serves on after a first load"
    assert {i: gist(o) for i, o in found.items()} == {i: gist(o) for i, o in wanted.items()}
    for i, output in found.items():
        assert output.piece.logprobs == pytest.approx(wanted[i].piece.logprobs, abs=1e-3)
    assert not dist.is_initialized()


def test_each_rank_keeps_its_own_part_of_pages_on_the_host(folders: dict[str, Path]) -> None:
    """Prompts that the device cannot hold together, twice: the second time both find as many of their tokens."""
    sizes, outputs, restored = replace(SIZES, num_pages=12), [], []
    prompts = [replace(r, prompt=r.prompt * 3, max_tokens=8) for r in requests(6, METHODS[:1])]
    for ranks in (1, 2):
        page_bytes = bytes_per_page(CONFIGS["dense"], 8, torch.float32) // ranks
        config = replace(sizes, host_kv_bytes=40 * page_bytes)
        with closing(start_parallel(folders["dense"], config, size=ranks, timeout=LIMIT)) as engine:
            first = engine.generate(prompts)
            second = engine.generate([replace(r, request_id=f"{r.request_id}+") for r in prompts])
            restored.append(engine.measures().pages_from_host)
        assert [gist(o)[:2] for o in second] == [gist(o)[:2] for o in first]
        outputs.append([(*gist(o), o.counts.num_cached_tokens) for o in second])
    assert outputs[0] == outputs[1] and restored[0] == restored[1] > 0


def test_all_ranks_have_the_pages_of_the_rank_where_the_fewest_fit(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower has less room than rank 0: it measures by itself, in a process of its own."""
    monkeypatch.setattr(leader, "run_follower", run_follower_with_little_memory)
    sizes = replace(SIZES, num_pages=None, kv_memory_fraction=0.5)
    whole = Engine(load_model(folders["dense"]), sizes)
    with closing(start_parallel(folders["dense"], sizes, size=2, timeout=LIMIT)) as engine:
        assert engine.num_pages == engine.config.num_pages == 17 < whole.num_pages
        assert engine.kv_tokens == 16 * 8
        assert {i: gist(o) for i, o in serve(engine).items()}


def test_a_rank_without_room_for_a_page_is_an_error_on_rank_0(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "run_follower", run_follower_without_memory)
    with pytest.raises(ValueError, match="rank 1: no KV page fits"):
        start_parallel(folders["dense"], replace(SIZES, num_pages=None), size=2, timeout=LIMIT)


def test_rank_0_says_how_long_prompt_chunks_are(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower's clock says that a token takes an hour: by itself it would store a block a step."""
    monkeypatch.setattr(leader, "run_follower", run_follower_with_slow_clock)
    stream, *prompts = (replace(r, sampling=Sampling()) for r in requests(4))
    stream = replace(stream, max_tokens=120)
    prompts = [replace(r, prompt=tuple(2 + (i * n) % 40 for i in range(60))) for n, r in enumerate(prompts, 1)]
    sizes = replace(SIZES, num_pages=64, max_step_seconds=LIMIT)
    with closing(start_parallel(folders["dense"], sizes, size=2, timeout=LIMIT)) as engine:
        engine.add(stream)
        outputs: dict[str, Output] = {}
        for number in range(400):
            if number % 5 == 4 and prompts and engine.num_known < SIZES.max_rows:
                engine.add(prompts.pop(0))
            outputs |= {step.request_id: step.output for step in engine.step() if step.output is not None}
            if not engine.has_work and not prompts:
                break
        assert len(outputs) == 4 and engine.pacer.token_seconds > 0
        assert {o.counts.num_prefill_forwards for i, o in outputs.items() if i != stream.request_id} == {60 // 12 - 1}


def run_follower_with_slow_clock(folder: Path, rank: Rank, dtype: torch.dtype | None, fp8: Fp8Parts | None) -> None:
    observe = Pacer.observe

    def slow(pacer: Pacer, chunks: Sequence[PrefillChunk], *, decodes: bool, seconds: float) -> None:
        observe(pacer, chunks, decodes=decodes, seconds=seconds * 1e7)

    Pacer.observe = slow  # type: ignore[method-assign]
    run_follower(folder, rank, dtype, fp8)


def run_follower_with_little_memory(folder: Path, rank: Rank, dtype: torch.dtype | None, fp8: Fp8Parts | None) -> None:
    def few_pages(model: Decoder, config: EngineConfig) -> int:
        assert config.kv_memory_fraction == 0.25, "two ranks share a machine's memory"
        return 17

    kv_agreement.fitting_pages = few_pages
    run_follower(folder, rank, dtype, fp8)


def run_follower_without_memory(folder: Path, rank: Rank, dtype: torch.dtype | None, fp8: Fp8Parts | None) -> None:
    def no_pages(model: Decoder, config: EngineConfig) -> int:
        raise ValueError("no KV page fits")

    kv_agreement.fitting_pages = no_pages
    run_follower(folder, rank, dtype, fp8)


def test_idle_followers_stay(folders: dict[str, Path]) -> None:
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=8)) as engine:
        (first_request,) = requests(1)
        first = engine.generate([first_request])
        time.sleep(9)
        assert list(map(gist, engine.generate(requests(1)))) == list(map(gist, first))
        assert engine.abort("nobody") is None and engine.preempt() is None and engine.step() == []
        with pytest.raises(ValueError, match="empty"):
            engine.add(replace(requests(1)[0], prompt=()))
        assert engine.generate(requests(3)), "what was refused has not reached the follower"
        assert engine.prepare(first_request.decoding) == 0
        engine.add(first_request)
        with pytest.raises(ValueError, match=r"needs an idle engine"):
            engine.prepare(first_request.decoding)
        while not engine.step():
            pass


def test_a_step_ahead_whose_request_was_aborted_is_taken_by_all(folders: dict[str, Path]) -> None:
    ahead = replace(SIZES, static_shapes=True, overlap=True)
    first, second = requests(2)
    wanted = gist(Engine(load_model(folders["dense"]), SIZES).generate([second])[0])
    with closing(start_parallel(folders["dense"], ahead, size=2, timeout=LIMIT)) as engine:
        engine.add(first)
        while engine.ahead.step is None:
            engine.step()
        assert engine.abort(first.request_id) is not None
        assert gist(engine.generate([second])[0]) == wanted


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_follower_is_an_error(folders: dict[str, Path], how: signal.Signals) -> None:
    started = 0.0
    with (  # noqa: PT012
        pytest.raises(RankLost, match=r"rank 0 of 2 could not .* within 8 s"),
        closing(start_parallel(folders["dense"], SIZES, size=2, timeout=8)) as engine,
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
            assert time.monotonic() - started < LIMIT
            with pytest.raises(RankLost, match="an earlier step"):
                engine.step()
    assert not dist.is_initialized()


def test_a_follower_out_of_step_says_so(folders: dict[str, Path]) -> None:
    with (  # noqa: PT012
        pytest.raises(RankLost) as caught,
        closing(start_parallel(folders["dense"], SIZES, size=2, timeout=LIMIT)) as engine,
    ):
        engine.add(replace(requests(1)[0], max_tokens=24, ignore_eos=True))
        while not engine.buffer.resident_RN.any():
            engine.step()
        engine.buffer.tokens_RNB[0, 0, 0] += 1  # the next report tells of it, and the step after that compares
        while engine.has_work:
            engine.step()
    assert f"rank 1: {OutOfStep.__name__}: " in caught.value.__notes__[0]


def test_a_follower_that_hangs_while_nothing_is_asked_is_known_and_nobody_waits(folders: dict[str, Path]) -> None:
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=8)) as engine:
        engine.check_health()
        os.kill(child(engine), signal.SIGSTOP)
        deadline, longest = time.monotonic() + LIMIT, 0.0
        with pytest.raises(RankLost, match="could not reach the others"):  # noqa: PT012
            while (asked := time.monotonic()) < deadline:
                engine.check_health()
                longest = max(longest, time.monotonic() - asked)
                time.sleep(0.02)
        assert longest < 4, "it waited for the follower, which does not answer for 8 s"
        with pytest.raises(RankLost, match="did not answer"):
            engine.generate(requests(1))


def test_a_step_that_fails_is_for_good(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(start_parallel(folders["dense"], SIZES, size=2, timeout=8)) as engine:
        engine.generate(requests(1))
        engine.check_health()
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", break_off)
            engine.add(requests(1)[0])
            with pytest.raises(OSError, match="no such"):
                engine.step()
        for call in (engine.check_health, engine.step):
            with pytest.raises(RankLost, match="an earlier step"):
                call()


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


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    """All weights by the names they have before rounding, FP8 ones widened."""
    found = {n: t for n, t in model.state_dict().items() if not n.endswith(("_values", "_scale"))}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Module):
            held = [n.removesuffix("_values") for n, _ in module.named_buffers() if n.endswith("_values")]
            found |= {f"{name}.{n}": dequantize(module.weight(n), torch.float32) for n in held}
    return found


@pytest.mark.parametrize(("name", "parts"), [("dense", "all"), ("sdar-moe", "experts")])
def test_each_rank_rounds_what_it_holds(folders: dict[str, Path], name: str, parts: Fp8Parts) -> None:
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
            dim = served_dim(tensor)
            pieces = [part[tensor] for part in parts_of]
            weight.copy_(pieces[0] if dim is None else torch.cat(pieces, dim))
            if not torch.equal(weight, whole[tensor]):
                other.append(tensor)
    assert other and all(n.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")) for n in other)
    todo = requests(3)
    wanted = Engine(joined, SIZES).generate(todo)
    with closing(start_parallel(folders[name], SIZES, size=2, fp8=parts, timeout=LIMIT)) as engine:
        found = engine.generate(todo)
    assert list(map(gist, found)) == list(map(gist, wanted))
    unrounded = Engine(plain, SIZES).generate(todo)
    for output, right, wrong in zip(found, wanted, unrounded, strict=True):
        assert output.piece.logprobs == pytest.approx(right.piece.logprobs, abs=1e-3)
        assert output.piece.logprobs != pytest.approx(wrong.piece.logprobs, abs=1e-3), "FP8 should show"


@pytest.mark.slow
def test_ranks_of_kept_blocks_serve_as_one_does(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "m", "llada2", blocks=(3, 3), gain=20.0)
    asked = [
        replace(
            r,
            prompt=tuple(t % 60 + 2 for t in r.prompt[:20]),
            max_tokens=10,
            decoding=replace(r.decoding, block_size=32),
        )
        for r in requests(3)
    ]
    sizes = replace(SIZES, page_size=None, max_prefill_tokens=64)
    wanted = Engine(load_model(tmp_path / "m", dtype=torch.float32, fp8="blocks"), sizes).generate(asked)
    with closing(
        start_parallel(tmp_path / "m", sizes, size=2, dtype=torch.float32, fp8="blocks", timeout=LIMIT)
    ) as engine:
        assert quantized_parts(engine.model) == "blocks"
        found = engine.generate(asked)
    assert list(map(gist, found)) == list(map(gist, wanted))
    rounded_folder(tmp_path / "cut", "llada2", blocks=(4, 3))
    with pytest.raises(ValueError, match="cannot be honoured with tensor_parallel=2"):
        start_parallel(tmp_path / "cut", sizes, size=2, fp8="blocks")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_two_gpus_serve_as_one_does(folders: dict[str, Path], name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    wanted = serve(Engine(load_model(folders[name], device="cuda:0"), SIZES))
    with closing(start_parallel(folders[name], SIZES, size=2, device="cuda", timeout=60)) as engine:
        found = serve(engine)
    assert {i: gist(o) for i, o in found.items()} == {i: gist(o) for i, o in wanted.items()}
