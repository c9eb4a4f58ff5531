"""The least time of a step, and the experts that a step touches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.commands import engine as bench_engine
from benchmarks.roofline import (
    Machine,
    StepCost,
    counted_experts,
    distinct_experts,
    floor_seconds,
    measure_bandwidth,
    measure_flops,
    moe_layers,
    route_uniformly,
    step_cost,
)
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.models.shapes import SHAPES, random_model

DENSE = ModelConfig(
    architecture="SDARForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_positions=512,
    tie_word_embeddings=False,
    mask_token_id=999,
    eos_token_ids=(998,),
    block_size=4,
)
SPARSE = replace(
    DENSE,
    moe=MoEConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=32,
        score="sigmoid",
        norm_topk_prob=True,
        num_shared_experts=1,
        first_dense_layers=1,
    ),
)


def matrices(config: ModelConfig) -> int:
    """Elements of everything that multiplies: all parameters but norms and the input embedding."""
    norms = config.num_layers * (2 * config.hidden_size + 2 * config.head_dim) + config.hidden_size
    return config.num_parameters - norms - config.vocab_size * config.hidden_size


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_a_step_with_every_expert_touched_reads_every_matrix_once(config: ModelConfig) -> None:
    cost = step_cost(config, rows=500, buffer_size=2, prefix=0, dtype_bytes=2)
    tokens = 500 * 2 * 4
    embedded = tokens * config.hidden_size
    assert cost.weight_bytes == pytest.approx(2 * (matrices(config) + embedded), rel=1e-9)


def test_a_dense_steps_flops_are_two_a_weight_and_token_and_four_a_score() -> None:
    cost = step_cost(DENSE, rows=3, buffer_size=2, prefix=20)
    tokens, scores = 3 * 2 * 4, 3 * 4 * (24 + 28)
    assert cost.flops == 2 * tokens * matrices(DENSE) + 4 * 3 * 4 * 16 * scores
    fewer = step_cost(DENSE, rows=3, buffer_size=2, prefix=20, logit_tokens=5)
    assert cost.flops - fewer.flops == 2 * (tokens - 5) * 1000 * 64
    assert cost.weight_bytes - step_cost(DENSE, rows=3, buffer_size=2, prefix=20, logit_tokens=0).weight_bytes == (
        2 * 1000 * 64
    )


def test_sparse_flops_count_a_tokens_own_experts() -> None:
    moe = SPARSE.moe
    assert moe is not None
    all_experts = replace(SPARSE, moe=replace(moe, experts_per_token=8))
    step = {"rows": 1, "buffer_size": 1, "prefix": 0}
    difference = step_cost(all_experts, **step).flops - step_cost(SPARSE, **step).flops
    assert difference == 2 * 4 * 2 * 6 * 3 * 64 * 32  # 2 FLOPs, 4 tokens, 2 sparse layers, 6 more experts


def test_expected_distinct_experts_is_the_mean_of_random_picks() -> None:
    generator = torch.Generator().manual_seed(0)
    picks = torch.rand(4000, 5, 8, generator=generator).topk(2, dim=-1).indices.flatten(1)
    seen = torch.zeros(4000, 8).scatter_(1, picks, 1.0).sum(1).mean()
    assert distinct_experts(8, 2, 5) == pytest.approx(float(seen), rel=0.01)
    assert distinct_experts(8, 2, 1) == pytest.approx(2) and distinct_experts(8, 8, 1) == 8


def test_keys_are_read_once_a_sequence_and_written_for_the_buffer() -> None:
    short, long = (step_cost(DENSE, rows=2, buffer_size=2, prefix=p) for p in (0, 100))
    per_token = 2 * 3 * 2 * 16 * 2
    assert long.kv_bytes - short.kv_bytes == 2 * 100 * per_token
    assert short.kv_bytes == 2 * (2 * 2 * 4) * per_token


def test_narrow_experts_save_their_share_only() -> None:
    step = {"rows": 500, "buffer_size": 1, "prefix": 0}
    wide, narrow = step_cost(SPARSE, **step), step_cost(SPARSE, **step, expert_bytes=1)
    assert wide.weight_bytes - narrow.weight_bytes == pytest.approx(2 * 8 * 3 * 64 * 32)
    assert wide.flops == narrow.flops


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    cost = StepCost(weight_bytes=60.0, kv_bytes=40.0, flops=1000.0)
    assert floor_seconds(cost, Machine(bandwidth=10.0, flops=1e9)) == 10.0
    assert floor_seconds(cost, Machine(bandwidth=1e9, flops=10.0)) == 100.0


def test_counts_must_be_counts() -> None:
    with pytest.raises(ValueError, match="buffer_size=0"):
        step_cost(DENSE, rows=1, buffer_size=0, prefix=0)
    with pytest.raises(ValueError, match="prefix=-4"):
        step_cost(DENSE, rows=1, buffer_size=1, prefix=-4)


def test_measured_speeds_are_of_this_machine() -> None:
    """Between a slow disk and a chip of the next decade: units are right."""
    device = torch.device("cpu")
    bandwidth = measure_bandwidth(device, num_bytes=2**24, repeats=2)
    flops = measure_flops(device, torch.float32, size=256, repeats=2)
    assert 1e8 < bandwidth < 1e13 and 1e8 < flops < 1e15


@pytest.mark.parametrize(("bytes_each", "gigabytes"), [(2.0, (20.9, 27.9)), (1.0, (11.1, 14.6))])
def test_the_bytes_of_llada2_mini_stay_within_their_budget(bytes_each: float, gigabytes: tuple[float, float]) -> None:
    """One sequence behind 512 tokens, with one slot and with two; experts in bfloat16, and in FP8."""
    for slots, most in zip((1, 2), gigabytes, strict=True):
        cost = step_cost(SHAPES["llada2-mini"], rows=1, buffer_size=slots, prefix=512, expert_bytes=bytes_each)
        assert 0.99 * most < cost.bytes / 1e9 <= most


CPU = torch.device("cpu")
CONFIG = SHAPES["tiny-llada2"]


class FixedRouter(nn.Module):
    """Every token chooses the same experts."""

    def __init__(self, like: nn.Module, ids: list[int]) -> None:
        super().__init__()
        self.config, self.ids = like.config, torch.tensor(ids)

    def forward(self, x_TD: Tensor, live_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ids = self.ids.expand(len(x_TD), -1)
        ids = ids if live_T is None else ids.masked_fill(~live_T[:, None], self.config.num_experts)
        return ids, torch.ones(len(x_TD), len(self.ids))


def test_a_layers_experts_are_counted_once_and_the_sentinel_never() -> None:
    model = random_model(CONFIG, device=CPU, dtype=torch.float32)
    layers = moe_layers(model)
    assert CONFIG.moe is not None and len(layers) == 2 and CONFIG.moe.num_experts == 16
    layers[0].gate = FixedRouter(layers[0].gate, [1, 2, 3, 4])  # type: ignore[assignment]
    layers[1].gate = FixedRouter(layers[1].gate, [5, 5, 5, 9])  # type: ignore[assignment]
    x = torch.randn(6, CONFIG.hidden_size)
    live = torch.tensor([True, True, False, True, False, True])
    with torch.inference_mode(), counted_experts(model) as mean:
        for layer in layers:
            layer.routed(x, live)
        assert mean() == (4 + 2) / 2
    assert not layers[0].gate._forward_hooks


def test_uniform_routing_touches_what_independent_draws_do() -> None:
    model = route_uniformly(random_model(CONFIG, device=CPU, dtype=torch.float32), num_tokens=8)
    x = torch.randn(8, CONFIG.hidden_size)
    assert CONFIG.moe is not None
    with torch.inference_mode(), counted_experts(model) as mean:
        for layer in moe_layers(model):
            layer.routed(x)
        touched = mean()
    assert touched is not None and abs(touched - distinct_experts(16, CONFIG.moe.experts_per_token, 8)) < 2
    ids, weights = moe_layers(model)[0].gate(x)
    assert all(len(set(row)) == CONFIG.moe.experts_per_token for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.full((8,), CONFIG.moe.routed_scaling))


def test_the_floor_reads_the_experts_that_were_counted() -> None:
    sizes = {"rows": 1, "buffer_size": 1, "prefix": 32}
    few, many = (step_cost(CONFIG, touched_experts=n, **sizes).weight_bytes for n in (3, 9))
    assert CONFIG.moe is not None
    assert many - few == 2 * 6 * 3 * CONFIG.hidden_size * CONFIG.moe.intermediate_size * 2  # two layers, six experts


@pytest.mark.parametrize("uniform", [False, True])
def test_a_benchmark_states_the_experts_it_counted(uniform: bool, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    argv = ["--model", "tiny-llada2", "--rows", "1", "--buffer", "2", "--prefix", "64", "--steps", "2"]
    argv += ["--device", "cpu", "--json", str(out), *(["--uniform-routing"] if uniform else [])]
    assert bench_engine(argv) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["routing"] == ("uniform" if uniform else "the router's")
    assert 4 <= row["touched_experts"] <= 16 and (not uniform or row["touched_experts"] == 16)
    assert row["step_over_floor"] >= 1


def test_uniform_routing_needs_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine(["--model", "sdar-null", "--device", "cpu", "--uniform-routing"]) == 2
    assert "sdar-null has no experts" in capsys.readouterr().err
