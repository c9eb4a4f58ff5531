"""FP8 weights stay within their bound, and what is computed with them is what the rounded weights give."""

import pytest
import torch
from expert_layers import layer
from torch import nn
from torch.nn import functional as F

from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import loop_experts


@pytest.mark.parametrize("block", [None, (1, 16), (5, 12)])
@pytest.mark.parametrize("shape", [(24, 32), (3, 24, 32)])
def test_fp8_weights_are_within_half_a_step(block: fp8.BlockShape | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-6, 1, shape[-2])[:, None]
    weight[..., 5, :] = 0
    rounded = fp8.quantize(weight, block=block)
    rows, columns = block or (1, 32)
    scale = rounded.scale if block is not None else rounded.scale[..., None]
    assert scale.shape == (*shape[:-2], -(-24 // rows), -(-32 // columns))
    scale = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :24, :32]
    bound = torch.maximum(weight.abs() / 16, scale / 1024) * (1 + 1e-5)
    error = (fp8.dequantize(rounded, torch.float32) - weight).abs()
    assert (error <= bound).all()
    assert error.max() > 0
    assert rounded.num_bytes < weight.numel() * 2
    x = torch.randn(7, 32)
    if len(shape) == 2:
        off = (fp8.linear(x, rounded) - F.linear(x, weight)).abs()
        assert (off <= F.linear(x.abs(), bound) + 1e-5).all()


def test_fp8_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError):
        fp8.quantize(torch.full((4, 32), torch.inf))


def test_fp8_blocks_follow_an_outlier_only_where_it_is() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 64) * 1e-3
    weight[:, 0] = 100.0
    errors = [
        (fp8.dequantize(fp8.quantize(weight, block=block), torch.float32) - weight)[:, 16:].abs().mean()
        for block in (None, (1, 16))
    ]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("block", [None, (1, 16), (5, 12)])
def test_fp8_experts_are_the_loop_on_the_rounded_weights(block: fp8.BlockShape | None) -> None:
    x, gate, up, down, ids, weights = layer(19, 32, 48, 6, 2)
    stacks = [fp8.quantize(w, block=block) for w in (gate, up, down)]
    rounded = [fp8.dequantize(s, torch.float32) for s in stacks]
    torch.testing.assert_close(fp8.fp8_experts(x, *stacks, ids, weights), loop_experts(x, *rounded, ids, weights))


def test_fp8_linear_stands_for_a_linear_and_survives_a_state_dict() -> None:
    torch.manual_seed(0)
    wide = nn.Linear(32, 24)
    narrow = fp8.Fp8Linear(wide)
    x = torch.randn(2, 5, 32)
    rounded = fp8.dequantize(fp8.quantize(wide.weight.detach()), torch.float32)
    torch.testing.assert_close(narrow(x), F.linear(x, rounded, wide.bias))
    again = fp8.Fp8Linear(nn.Linear(32, 24))
    again.load_state_dict(narrow.state_dict())
    assert torch.equal(again(x), narrow(x))


@pytest.mark.gpu
def test_gpu_fp8_linear_is_within_the_bound_of_both_roundings() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(48, 256).cuda().bfloat16(), torch.randn(128, 256).cuda() / 16
    out = fp8.linear(x, fp8.quantize(weight))
    error = (out.float() - x.float() @ weight.T).abs()
    assert (error <= (x.float().abs() @ weight.abs().T) * 0.14 + 1e-2).all()
