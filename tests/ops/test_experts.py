"""Experts: grouped and fused are the loop, the loop is the equation; FP8 stays within its bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_interpreted
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.ops import fp8
from mbd_core.ops.experts import Experts, by_load, experts, grouped, resolve_experts, sort_by_expert

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def layer(tokens: int, depth: int, width: int, num_experts: int, per_token: int, *, seed: int = 0) -> Layer:
    """x, gate, up, down, ids, weights; experts are drawn from the first two thirds, so that some get no token."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, depth, generator=g)
    gate, up = torch.randn(2, num_experts, width, depth, generator=g) / depth**0.5
    down = torch.randn(num_experts, depth, width, generator=g) / width**0.5
    used = max(per_token, 2 * num_experts // 3)
    ids = torch.rand(tokens, used, generator=g).topk(per_token).indices
    return x, gate, up, down, ids, torch.rand(tokens, per_token, generator=g)


def by_equation(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            out[t] += w * (down[e] @ (F.silu(gate[e] @ x[t]) * (up[e] @ x[t])))
    return out


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 40), num_experts=st.integers(1, 9), per_token=st.integers(1, 3), seed=st.integers(0, 99))
def test_grouped_and_loop_are_the_equation(tokens: int, num_experts: int, per_token: int, seed: int) -> None:
    arguments = layer(tokens, 24, 20, num_experts, min(per_token, num_experts), seed=seed)
    expected = by_equation(*arguments)
    torch.testing.assert_close(experts(*arguments), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grouped(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_grouped_in_bfloat16_is_the_loop() -> None:
    x, gate, up, down, ids, weights = layer(33, 48, 40, 5, 2)
    x, gate, up, down = (t.bfloat16() for t in (x, gate, up, down))
    loop, fast = experts(x, gate, up, down, ids, weights), grouped(x, gate, up, down, ids, weights)
    assert loop.dtype == fast.dtype == torch.bfloat16
    torch.testing.assert_close(fast, loop, rtol=2e-2, atol=1e-2)


def test_the_weighted_sum_is_taken_in_float32() -> None:
    """Experts that cancel leave the small one: a bfloat16 sum would lose it."""
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    gate = torch.zeros(3, 8, 8, dtype=torch.bfloat16) + 1
    up, down = gate.clone(), gate.clone()
    down[1] *= -1
    down[2] *= 2**-8
    ids, weights = torch.tensor([[0, 2, 1]]), torch.ones(1, 3)
    alone = experts(x, gate, up, down, torch.tensor([[2]]), torch.ones(1, 1))
    for call in (experts, grouped):
        torch.testing.assert_close(call(x, gate, up, down, ids, weights), alone, rtol=1e-2, atol=0)


def test_assignments_are_sorted_by_expert_and_bounded() -> None:
    ids = torch.tensor([[3, 0], [3, 4], [0, 3]])
    order, ends = sort_by_expert(ids, 6)
    assert ids.flatten()[order].tolist() == [0, 0, 3, 3, 3, 4]
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert ends.tolist() == [2, 2, 2, 5, 6, 6] and ends.dtype == torch.int32


def test_odd_widths_are_refused_by_grouped_and_left_to_the_loop() -> None:
    x, gate, up, down, ids, weights = layer(3, 24, 18, 4, 2)
    with pytest.raises(ValueError, match=r"18 channels of 4 bytes .* use the loop"):
        grouped(x, gate, up, down, ids, weights)
    assert resolve_experts(CPU, torch.float32, expert_size=18, hidden_size=24).name == "loop"


def test_choice_of_experts_and_its_reasons() -> None:
    on_cpu = resolve_experts(CPU, torch.float32)
    assert on_cpu.name == "grouped" and "CUDA" in on_cpu.reasons["triton"] and on_cpu.call is grouped
    assert "not triton: it needs" in on_cpu.describe()
    assert resolve_experts(CPU, torch.float32, "loop").call is experts
    bare = resolve_experts(CUDA, torch.bfloat16, capability=(9, 0), has_triton=False)
    assert bare.name == "grouped" and bare.reasons["triton"] == "triton is not installed"
    old = resolve_experts(CUDA, torch.bfloat16, capability=(8, 0), has_triton=False)
    assert old.name == "loop" and "waits for the host" in old.reasons["grouped"]
    with pytest.raises(ValueError, match="'triton' cannot be used: it needs a CUDA device"):
        resolve_experts(CPU, torch.float32, "triton")
    with pytest.raises(ValueError, match="'grouped' cannot be used: on CUDA it takes bfloat16, not float16"):
        resolve_experts(CUDA, torch.float16, "grouped", capability=(9, 0), has_triton=True)
    with pytest.raises(ValueError, match=r"'fused' is unknown; choose one of .*triton, grouped, loop"):
        resolve_experts(CPU, torch.float32, "fused")


def test_load_decides_between_two_by_shape_alone() -> None:
    def say(answer: float) -> Experts:
        return lambda x, gate, up, down, ids, weights: torch.tensor(answer)

    call = by_load(few=say(0.0), many=say(1.0), tokens_per_expert=3)
    assert [float(call(*layer(tokens, 8, 4, 6, 2))) for tokens in (1, 8, 9, 20)] == [0, 0, 1, 1]


FUSED_ON_CPU = """
import torch
from test_moe_ops import by_equation, layer
from mbd_core.ops import fp8
from mbd_core.ops.experts import experts, sort_by_expert
from mbd_core.ops.experts_triton import cut_tiles, fused_experts
for sizes in ((1, 24, 20, 9, 3), (37, 40, 70, 5, 2), (20, 100, 33, 3, 1)):
    arguments = layer(*sizes)
    torch.testing.assert_close(fused_experts(*arguments), experts(*arguments), rtol=1e-4, atol=1e-5)
x, gate, up, down, ids, weights = layer(19, 40, 36, 6, 2)
stacks = [fp8.quantize(w) for w in (gate, up, down)]
fused = fused_experts(x, *(s.values for s in stacks), ids, weights, scales=tuple(s.scale for s in stacks))
torch.testing.assert_close(fused, fp8.fp8_experts(x, *stacks, ids, weights), rtol=1e-4, atol=1e-5)
ids = torch.tensor([[4]] * 17 + [[1]] * 3)
expert, first, end = cut_tiles(sort_by_expert(ids, 6)[1], 20, 8)
tiles = [(e, a, b) for e, a, b in zip(expert.tolist(), first.tolist(), end.tolist()) if b > a]
assert tiles == [(1, 0, 3), (4, 3, 11), (4, 11, 19), (4, 19, 20)], tiles
try:
    fused_experts(x, gate.transpose(1, 2).contiguous().transpose(1, 2), up, down, ids, weights)
except ValueError as error:
    assert "gate weights" in str(error)
else:
    raise AssertionError("strided weights were taken")
print("all held")
"""


def test_fused_kernels_are_the_loop_under_tritons_interpreter() -> None:
    run_interpreted(FUSED_ON_CPU)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("shape", [(24, 32), (3, 24, 32)])
def test_fp8_weights_are_within_half_a_step(block: int | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-6, 1, shape[-2])[:, None]
    weight[..., 5, :] = 0
    rounded = fp8.quantize(weight, block=block)
    assert rounded.scale.shape == (shape[:-1] if block is None else (*shape[:-1], 2))
    scale = rounded.scale[..., None].expand_as(weight) if block is None else rounded.scale.repeat_interleave(16, -1)
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
    with pytest.raises(ValueError, match="block=24 does not divide the 32 input channels"):
        fp8.quantize(torch.ones(4, 32), block=24)
    with pytest.raises(ValueError, match="not finite"):
        fp8.quantize(torch.full((4, 32), torch.inf))


def test_fp8_blocks_follow_an_outlier_only_where_it_is() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 64) * 1e-3
    weight[:, 0] = 100.0
    errors = [
        (fp8.dequantize(fp8.quantize(weight, block=block), torch.float32) - weight)[:, 16:].abs().mean()
        for block in (None, 16)
    ]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("block", [None, 16])
def test_fp8_experts_are_the_loop_on_the_rounded_weights(block: int | None) -> None:
    x, gate, up, down, ids, weights = layer(19, 32, 48, 6, 2)
    stacks = [fp8.quantize(w, block=block) for w in (gate, up, down)]
    rounded = [fp8.dequantize(s, torch.float32) for s in stacks]
    torch.testing.assert_close(fp8.fp8_experts(x, *stacks, ids, weights), experts(x, *rounded, ids, weights))


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


def test_logit_error_counts_what_changed() -> None:
    wide = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]])
    error = fp8.logit_error(wide, torch.tensor([[2.5, 2.0, 0.0], [3.0, 1.0, 0.0]]))
    assert (error.max_abs, error.mean_abs, error.top1_agreement, error.positions) == (1.5, 0.25, 0.5, 2)
    with pytest.raises(ValueError, match="not of the same positions"):
        fp8.logit_error(wide, wide[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton+grouped", "triton", "grouped"])
def test_gpu_experts_are_the_loop(name: str) -> None:
    x, gate, up, down, ids, weights = (t.cuda() for t in layer(64, 256, 128, 32, 4))
    x, gate, up, down = (t.bfloat16() for t in (x, gate, up, down))
    try:
        choice = resolve_experts(CUDA, torch.bfloat16, name)
    except ValueError as error:
        pytest.skip(str(error))
    expected = experts(x, gate, up, down, ids, weights)
    torch.testing.assert_close(choice.call(x, gate, up, down, ids, weights), expected, rtol=3e-2, atol=2e-2)


@pytest.mark.gpu
def test_gpu_fp8_linear_is_within_the_bound_of_both_roundings() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(48, 256).cuda().bfloat16(), torch.randn(128, 256).cuda() / 16
    out = fp8.linear(x, fp8.quantize(weight))
    error = (out.float() - x.float() @ weight.T).abs()
    assert (error <= (x.float().abs() @ weight.abs().T) * 0.14 + 1e-2).all()


@pytest.mark.gpu
def test_gpu_grouped_and_fused_are_captured_in_a_graph() -> None:
    x, gate, up, down, ids, weights = (t.cuda() for t in layer(64, 256, 128, 32, 4))
    x, gate, up, down = (t.bfloat16() for t in (x, gate, up, down))
    choice = resolve_experts(CUDA, torch.bfloat16)
    if choice.name == "loop":
        pytest.skip(choice.describe())
    expected = choice.call(x, gate, up, down, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = choice.call(x, gate, up, down, ids, weights)
    ids.copy_(ids.flip(0))
    graph.replay()
    assert not torch.equal(out, expected)
    torch.testing.assert_close(out, choice.call(x, gate, up, down, ids, weights), rtol=0, atol=0)
