"""Steps by the data sheet, what fits, and how many replicas a load needs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.capacity.beyond import Turns, host_tier_rows, pool_rows
from benchmarks.capacity.chips import CHIPS, chip_of
from benchmarks.capacity.commands import beyond, capacity, place_of
from benchmarks.capacity.counted_blocks import rate_for
from benchmarks.capacity.plan import Demand, best_plan, plans, prompt_forwards
from benchmarks.capacity.step_model import Deployment, StepModel, Work, prompt_work
from benchmarks.roofline import ForwardCost, step_cost
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.models.shapes import DIFFUSION_GEMMA, SHAPES

# The estimates of benchmarks/README.md ("by kernels"): LLaDA2-mini behind 512 tokens, one sequence, in milliseconds.
ESTIMATES = [(1, None, 1, 8.3), (1, None, 2, 11.0), (2, None, 1, 4.9), (2, None, 2, 6.3), (1, "experts", 2, 6.5)]


@pytest.mark.parametrize(("ranks", "fp8", "slots", "ms"), ESTIMATES)
def test_a_step_takes_what_the_pages_estimate(ranks: int, fp8: str | None, slots: int, ms: float) -> None:
    deployment = Deployment(tensor_parallel=ranks, fp8=fp8)  # type: ignore[arg-type]
    tokens = 32 * slots
    work = Work(tokens=tokens, live_tokens=tokens, scores=0, kv_tokens=512 + 2 * tokens, logit_tokens=tokens)
    assert 1e3 * deployment.steps().forward(work) == pytest.approx(ms, rel=0.1)


def test_a_forwards_cost_is_the_steps() -> None:
    config = SHAPES["llada2-mini"]
    cost = ForwardCost(config).of(tokens=64, scores=32 * (544 + 576), kv_tokens=512 + 128, logit_tokens=64)
    assert cost == step_cost(config, rows=1, buffer_size=2, prefix=512)


def test_layers_that_are_not_counted_are_refused() -> None:
    with pytest.raises(ValueError, match="Gemma"):
        ForwardCost(DIFFUSION_GEMMA)


@pytest.mark.parametrize("model", ["sdar-8b", "llada2-mini", "fast-dllm-v2-1.5b"])
def test_the_ranks_hold_all_weights(model: str) -> None:
    """But for norms, biases, and the routers, of which each rank has its own."""
    config = SHAPES[model]
    for ranks in (1, 2):
        routers = 0 if config.moe is None else (ranks - 1) * 19 * config.hidden_size * config.moe.num_experts * 2
        stored = ranks * ForwardCost(config, ranks=ranks).stored_bytes - routers
        assert stored == pytest.approx(2 * config.num_parameters, rel=1e-3)


def test_a_chunk_attends_block_by_block() -> None:
    blocks = [(start, start + 4) for start in range(8, 20, 4)]
    assert prompt_work(8, 20, block_size=4).scores == sum(4 * stop for _, stop in blocks)


def test_the_longest_term_is_named() -> None:
    steps = Deployment(model="sdar-8b").steps()
    few = Work(tokens=32, live_tokens=32, scores=32 * 512, kv_tokens=512, logit_tokens=32)
    assert steps.step([few]).bound == "bandwidth"
    assert steps.step([prompt_work(0, 2048, block_size=32)]).bound == "arithmetic"
    assert replace(steps, host=1.0).step([few]) == replace(steps.step([few]), seconds=1.0, bound="host")
    assert replace(steps, fixed=1.0).step([few]).bound == "launches"
    after = replace(steps, overlap=False, host=0.001)
    assert after.step([few]).seconds == pytest.approx(steps.step([few]).seconds + 0.001)


def test_a_chip_is_known_by_its_whole_name() -> None:
    assert chip_of("NVIDIA H100 80GB HBM3") is CHIPS["h100"] and chip_of("NVIDIA H200") is CHIPS["h200"]
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA B200", "cpu (1 threads)"):
        assert chip_of(other) is None


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = capacity(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "llada2-flash"), "of an H100 are 72 GB; it fits with --tensor-parallel 4"),
        (("--model", "sdar-8b", "--context", "500"), None),
        (("--model", "sdar-8b", "--memory-fraction", "0.2", "--context", "2000"), "with --tensor-parallel 2"),
        (("--model", "sdar-8b", "--context", "40000"), "exceed the 32768 positions of sdar-8b"),
        (("--model", "sdar-8b", "--fp8", "experts"), "sdar-8b has no experts"),
        (("--model", "sdar-9b"), "model=sdar-9b must be one of"),
        (("--chip", "b200"), "chip=b200 must be one of h100, h200, cpu"),
        (("--chip", "cpu", "--tensor-parallel", "2"), "chip=cpu is measured as it is: leave out tensor_parallel"),
        (("--tensor-parallel", "3"), "does not divide among 3 tensor-parallel ranks"),
        (("--rate", "1e308"), "--rate 1e308 must be at most 2147483647"),
        (("--buffer", "1"), "tpf has 2 numbers and buffer 1"),
        (("--ttft", "1"), "alone a request has its first tokens after"),
        (("--tpf", "40,50"), "tpf=40 cannot be reached"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    arguments: tuple[str, ...], sentence: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == (2 if sentence else 0)
    assert err.count("\n") == (1 if sentence else 0) and (sentence or "") in err
    assert bool(out.strip()) == (sentence is None)


def test_a_buffer_that_misses_the_limits_leaves_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    code, out, _ = run(capsys, "--rate", "20", "--speed", "500", "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert code == 0 and row["buffer"] == 2 and row["speed"] >= 500
    assert "with 1 slots cannot meet the limits" in out


def test_more_of_everything_needs_fewer_replicas() -> None:
    demand = Demand(rate=200, context=4096, speed=150)
    h100, h200 = (place_of(Deployment(chip=chip)) for chip in ("h100", "h200"))

    def replicas(place: object, demand: Demand) -> int:
        return int(best_plan(place, demand, buffer_size=2, tpf=6.19)["replicas"])  # type: ignore[arg-type]

    assert replicas(h200, demand) < replicas(h100, demand)
    assert replicas(h100, replace(demand, found=0.9)) < replicas(h100, demand)
    assert replicas(h100, replace(demand, rate=400)) > 1.9 * replicas(h100, demand)
    assert replicas(h100, replace(demand, speed=None)) <= replicas(h100, demand)


def test_memory_that_binds_is_named() -> None:
    place = place_of(Deployment(model="sdar-8b"))
    small = replace(place, page_bytes=place.page_bytes / 16)
    demand = Demand(rate=1000, context=2048, found=1.0)
    wide, narrow = (best_plan(p, demand, buffer_size=1, tpf=3.47) for p in (place, small))
    assert narrow["bound"] == "memory" and narrow["replicas"] > wide["replicas"]
    assert narrow["rows"] * (2048 + 256 + 32) <= small.page_tokens
    with pytest.raises(ValueError, match="need 9216"):
        best_plan(replace(place, page_bytes=place.page_bytes / 128), demand, buffer_size=1, tpf=3.47)


def test_a_step_is_never_below_its_floor() -> None:
    place = place_of(Deployment())
    decoding = DecodingConfig(block_size=32, buffer_size=2)
    demand = Demand(context=1024, output=128)
    chip = CHIPS["h100"]
    assert isinstance(place.steps, StepModel)
    for row in plans(place, demand, decoding, rate_for(6.19, decoding, length=128)):
        cost = step_cost(place.config, rows=row["batch"], buffer_size=1, prefix=1024)
        assert row["step_seconds"] > cost.bytes / chip.bandwidth
    assert sum(work.tokens for work in prompt_forwards(place, replace(demand, found=0.5))) == 512


def test_pages_that_are_copied_pay_and_two_pools_hardly() -> None:
    """What benchmarks/capacity/README.md decides by."""
    host, pools = list(host_tier_rows(Turns())), list(pool_rows(Turns(), speed=100.0))
    for row in host:
        assert row["live"] > row["fit"], "pages fall out"
        assert row["copy_gain"] > 10 and row["turn_gain"] > 3
        assert row["turn_gain"] == pytest.approx(row["turns_copy"] / row["turns_anew"])
    assert all(0.9 < row["gain"] < 1.7 for row in pools)
    quiet = list(host_tier_rows(Turns(think=0.1)))
    assert all(row["host_gb"] == 0 for row in quiet), "sessions that come back at once are still there"


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert beyond([]) == 0
    assert capsys.readouterr().out.count("\n| llada2.2-mini, 1 x H200 |") == 6
