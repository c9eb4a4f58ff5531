"""Touched experts are counted, not assumed, and a routing that touches them evenly can be asked for."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.commands import engine as bench_engine
from benchmarks.roofline import counted_experts, distinct_experts, moe_layers, route_uniformly, step_cost
from mbd_core.models.shapes import SHAPES, random_model

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
