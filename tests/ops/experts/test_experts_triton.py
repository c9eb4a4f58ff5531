"""The fused experts are the loop, the kernels being interpreted."""

from triton_interpreter import run_interpreted

FUSED_ON_CPU = """
import torch
from expert_layers import layer
from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import fused_experts, loop_experts
from mbd_core.ops.layer.residual_norm import sum_experts
for sizes in ((1, 24, 20, 9, 3), (37, 40, 70, 5, 2), (20, 100, 33, 3, 1)):
    arguments = layer(*sizes)
    torch.testing.assert_close(fused_experts(*arguments), loop_experts(*arguments), rtol=1e-4, atol=1e-5)
x, gate, up, down, ids, weights = layer(19, 40, 36, 6, 2)
stacks = [fp8.quantize(w) for w in (gate, up, down)]
wanted = fp8.fp8_experts(x, *stacks, ids, weights)
torch.testing.assert_close(sum_experts(fp8.fp8_parts(x, *stacks, ids, weights), x.dtype), wanted, rtol=1e-4, atol=1e-5)
ids[3:7] = 6
empty = torch.empty
spoiled = lambda t: t.fill_(float("nan")) if t.is_floating_point() else t
torch.empty = lambda *size, **options: spoiled(empty(*size, **options))  # what a GPU's memory may hold
found = fused_experts(x, gate, up, down, ids, weights)
torch.empty = empty
assert not found[3:7].any()
torch.testing.assert_close(found, loop_experts(x, gate, up, down, ids, weights), rtol=1e-4, atol=1e-5)
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


SHARED = """
import torch
from expert_layers import layer
from mbd_core.models.mlp import SwiGLU
from mbd_core.models.mlp import with_shared
from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import loop_experts
from mbd_core.ops.experts.expert_products import SharedExperts, expert_parts
from mbd_core.ops.layer.residual_norm import sum_experts
for block in (False, None, (16, 16), (24, 32)):
    for sizes, num_shared in (((19, 40, 36, 6, 2), 1), ((5, 100, 24, 9, 3), 2), ((37, 40, 20, 4, 1), 3)):
        x, gate, up, down, ids, weights = layer(*sizes)
        tokens, depth, width, experts, _ = sizes
        mlp = SwiGLU(depth, num_shared * width).requires_grad_(False)
        live = torch.arange(tokens) % 4 != 1
        ids, weights = with_shared(ids, weights, experts, num_shared)
        ids[~live] = experts + num_shared
        shared = SharedExperts(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        if block is False:
            parts = expert_parts(x, gate, up, down, ids, weights, shared=shared)
        else:
            stacks = [fp8.quantize(w, block=block) for w in (gate, up, down)]
            parts = fp8.fp8_parts(x, *stacks, ids, weights, shared)
            gate, up, down = (fp8.dequantize(stack, x.dtype) for stack in stacks)
        chosen = slice(None, sizes[-1])
        wanted = loop_experts(x[live], gate, up, down, ids[live, chosen], weights[live, chosen]) + mlp(x[live])
        found = sum_experts(parts, x.dtype)
        assert not found[~live].any()
        torch.testing.assert_close(found[live], wanted, rtol=1e-4, atol=1e-5)
print("all held")
"""

BLOCKS = """
import torch
from expert_layers import layer
from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import loop_experts
from mbd_core.ops.layer.residual_norm import sum_experts
for sizes, block in (
    ((3, 24, 20, 9, 3), (8, 16)), ((19, 300, 70, 5, 2), (128, 128)), ((37, 80, 130, 4, 1), (32, 48)),
    ((9, 64, 40, 3, 2), (1, 32)),
):
    x, *wide, ids, weights = layer(*sizes)
    stacks = []
    for stack in wide:
        rounded = fp8.quantize(stack, block=block)
        other = rounded.scale * torch.rand(rounded.scale.shape) * 2  # scales that differ from block to block
        stacks.append(fp8.Fp8Weight(rounded.values, other, block))
    wanted = loop_experts(x, *(fp8.dequantize(stack, x.dtype) for stack in stacks), ids, weights)
    found = sum_experts(fp8.fp8_parts(x, *stacks, ids, weights), x.dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fp8.fp8_experts(x, *stacks, ids, weights), wanted, rtol=1e-5, atol=1e-6)
stacks = [fp8.quantize(stack, block=(8, 6)) for stack in wide]
try:
    fp8.fp8_parts(x, *stacks, ids, weights)
except ValueError as error:
    assert "blocks of 6 input channels" in str(error) and "multiple of 16" in str(error)
else:
    raise AssertionError("blocks that no product can be cut at were taken")
print("all held")
"""


def test_shared_experts_among_the_fused_ones_are_their_sum() -> None:
    run_interpreted(SHARED)


def test_a_block_of_weights_has_a_scale_of_its_own() -> None:
    run_interpreted(BLOCKS)
