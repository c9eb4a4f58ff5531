"""Int8 products: what rounding may cost, and what no product may depend on."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mbd_core.models.layer_parts import together
from mbd_core.models.mlp import Experts
from mbd_core.models.model_config import MoEConfig
from mbd_core.models.quantize import weight_bytes
from mbd_core.ops.experts.choice import loop_experts
from mbd_core.ops.layer import int8
from mbd_core.ops.layer.int8 import (
    LARGEST,
    LARGEST_PACKED_WEIGHT,
    Int8Experts,
    Int8Joint,
    Int8Linear,
    Int8Part,
    int8_product,
    pack,
    packed_product,
    packs_weights,
    to_int8,
)


@pytest.fixture(params=[False, True], ids=["int_mm", "fbgemm"])
def largest_weight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Either way to multiply, whichever this machine would take; the largest value of a weight."""
    if request.param and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no FBGEMM")
    monkeypatch.setattr(int8, "packs_weights", lambda: request.param)
    return LARGEST_PACKED_WEIGHT if request.param else LARGEST


@pytest.mark.parametrize(
    ("instructions", "packs"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_vnni": False, "amx_int8": False}, True),
        ({"architecture": "x86_64", "avx2": True, "avx512_vnni": True, "amx_int8": False}, False),
        ({"architecture": "x86_64", "avx2": True, "avx512_vnni": False, "amx_int8": True}, False),
        ({"architecture": "x86_64", "avx2": False, "avx512_vnni": False, "amx_int8": False}, False),
        ({"architecture": "arm64"}, False),
    ],
)
def test_an_x86_cpu_without_vnni_multiplies_by_fbgemm(
    instructions: dict[str, str | bool], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert packs_weights.__wrapped__() == (packs and "fbgemm" in torch.backends.quantized.supported_engines)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM")
def test_no_sum_of_a_packed_product_overflows() -> None:
    x, values = torch.full((9, 130), 127.0), torch.full((33, 130), LARGEST_PACKED_WEIGHT, dtype=torch.int8)
    x[1::2], values[::2] = -127.0, -LARGEST_PACKED_WEIGHT
    product = packed_product(x, pack(values), torch.ones(33))
    assert torch.equal(product, x @ values.float().t())


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
def test_a_layer_is_the_product_of_its_rounded_factors(
    shape: tuple[int, ...], bias: bool, largest_weight: int
) -> None:
    torch.manual_seed(1)
    wide, x = nn.Linear(48, 20, bias=bias), torch.randn(shape)
    layer = Int8Linear(wide)
    (values, scale), (rows, row_scale) = to_int8(wide.weight, largest_weight), to_int8(x)
    expected = F.linear((rows * row_scale).double(), (values * scale).double())
    expected = expected if wide.bias is None else expected + wide.bias.double()
    assert torch.allclose(layer(x).double(), expected, atol=1e-5)
    error = (layer(x) - wide(x)).norm() / wide(x).norm()
    assert 0 < error.item() < 0.02


@pytest.mark.parametrize("bias", [False, True])
def test_the_parts_of_a_joint_product_are_their_layers(bias: bool, largest_weight: int) -> None:
    torch.manual_seed(5)
    wides, x = [nn.Linear(48, size, bias=bias) for size in (20, 8, 12)], torch.randn(2, 5, 48)
    parts = Int8Part.of(wides)
    model = nn.ModuleList(parts)
    for part, wide, out in zip(parts, wides, together(parts, x), strict=True):
        assert torch.equal(out, Int8Linear(wide)(x))
        assert torch.equal(part(x), out)
    assert all(torch.equal(a(x), b(x)) for a, b in zip(copy.deepcopy(model), parts, strict=True))
    bytes_of_biases = sum(4 * wide.out_features for wide in wides) if bias else 0
    assert weight_bytes(model) == weight_bytes(Int8Joint(wides)) + bytes_of_biases


def test_no_token_gives_no_row(largest_weight: int) -> None:
    assert Int8Linear(nn.Linear(48, 20))(torch.zeros(0, 48)).shape == (0, 20)


def test_a_token_does_not_depend_on_the_tokens_beside_it(largest_weight: int) -> None:
    torch.manual_seed(2)
    layer, x = Int8Linear(nn.Linear(64, 96)), torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    together = layer(x)
    for start, stop in ((0, 1), (3, 11), (11, 40)):
        assert torch.equal(layer(x[start:stop]), together[start:stop])


def test_experts_are_the_loop_over_their_rounded_products(largest_weight: int) -> None:
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


def test_a_copy_multiplies_alike_and_a_packed_weight_is_counted(largest_weight: int) -> None:
    """FBGEMM fills a weight of 20 x 48 up to blocks of 8 x 512, with AVX512 to blocks of 32 x 256."""
    layer, x = Int8Linear(nn.Linear(48, 20, bias=False)), torch.randn(3, 48)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    packed = 32 * 256 if torch.cpu.get_capabilities().get("avx512_f") else 24 * 512
    assert weight_bytes(layer) == (packed if largest_weight == LARGEST_PACKED_WEIGHT else 20 * 48) + 20 * 4


def test_a_weight_is_rounded_anew_in_place(largest_weight: int) -> None:
    torch.manual_seed(4)
    layer, other = Int8Linear(nn.Linear(8, 8, bias=False)), nn.Linear(8, 8, bias=False)
    places = dict(layer.named_buffers())
    layer.round_weight("weight", other.weight)
    assert all(layer.get_buffer(name) is place for name, place in places.items())
    x, (values, scale) = torch.randn(3, 8), to_int8(other.weight, largest_weight)
    assert torch.equal(layer(x), int8_product(x, values, scale.squeeze(-1)))
