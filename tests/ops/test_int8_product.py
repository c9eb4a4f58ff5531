"""Int8 products: what rounding may cost, and what no product may depend on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mbd_core.models.mlp import Experts
from mbd_core.models.model_config import MoEConfig
from mbd_core.ops.experts.choice import loop_experts
from mbd_core.ops.layer.int8 import Int8Experts, Int8Linear, int8_product, to_int8


def test_rounding_is_off_by_half_a_step_at_most_and_zeros_stay() -> None:
    wide = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    wide[2] = 0.0
    values, scale = to_int8(wide)
    assert values.dtype == torch.int8
    assert bool(((values * scale - wide).abs() <= scale / 2 + 1e-6).all())
    assert torch.equal(scale.squeeze(-1)[[0, 1]], wide.abs().amax(-1)[[0, 1]] / 127)
    assert not (values * scale)[2].any()


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 3, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_product_of_its_rounded_factors(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    wide, x = nn.Linear(48, 20, bias=bias), torch.randn(shape)
    layer = Int8Linear(wide)
    (values, scale), (rows, row_scale) = to_int8(wide.weight), to_int8(x)
    expected = F.linear((rows * row_scale).double(), (values * scale).double())
    expected = expected if wide.bias is None else expected + wide.bias.double()
    assert torch.allclose(layer(x).double(), expected, atol=1e-5)
    error = (layer(x) - wide(x)).norm() / wide(x).norm()
    assert 0 < error.item() < 0.02


def test_a_token_does_not_depend_on_the_tokens_beside_it() -> None:
    torch.manual_seed(2)
    layer, x = Int8Linear(nn.Linear(64, 96)), torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    together = layer(x)
    for start, stop in ((0, 1), (3, 11), (11, 40)):
        assert torch.equal(layer(x[start:stop]), together[start:stop])


def test_experts_are_the_loop_over_their_rounded_products() -> None:
    torch.manual_seed(3)
    moe = MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=24, score="softmax", norm_topk_prob=True)
    wide = Experts(16, moe)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.normal_(std=0.3)
    x, ids, weights = torch.randn(9, 16), torch.randint(0, 6, (9, 2)), torch.rand(9, 2)
    ids[4] = 6  # no expert
    out = Int8Experts(wide)(x, ids, weights)
    assert not out[4].any()
    stacks = wide.gate_proj, wide.up_proj, wide.down_proj
    expected = loop_experts(x, *stacks, ids, weights)
    assert 0 < ((out - expected).norm() / expected.norm()).item() < 0.05
    assert torch.equal(Int8Experts(wide)(x[2:3], ids[2:3], weights[2:3]), out[2:3])


def test_a_weight_is_rounded_anew_in_place() -> None:
    torch.manual_seed(4)
    layer, other = Int8Linear(nn.Linear(8, 8, bias=False)), nn.Linear(8, 8, bias=False)
    place = layer.get_buffer("weight_values")
    layer.round_weight("weight", other.weight)
    assert layer.get_buffer("weight_values") is place
    x = torch.randn(3, 8)
    assert torch.equal(
        layer(x), int8_product(x, *(t.squeeze(-1) if t.dtype != torch.int8 else t for t in to_int8(other.weight)))
    )
