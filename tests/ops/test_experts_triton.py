"""The fused experts are the loop, the kernels being interpreted."""

from triton_interpreter import run_interpreted

FUSED_ON_CPU = """
import torch
from expert_layers import layer
from mbd_core.ops import fp8
from mbd_core.ops.experts import fused_experts, loop_experts
from mbd_core.ops.experts_triton import expert_parts
from mbd_core.ops.residual_norm import sum_experts
for sizes in ((1, 24, 20, 9, 3), (37, 40, 70, 5, 2), (20, 100, 33, 3, 1)):
    arguments = layer(*sizes)
    torch.testing.assert_close(fused_experts(*arguments), loop_experts(*arguments), rtol=1e-4, atol=1e-5)
x, gate, up, down, ids, weights = layer(19, 40, 36, 6, 2)
stacks = [fp8.quantize(w) for w in (gate, up, down)]
parts = expert_parts(x, *(s.values for s in stacks), ids, weights, scales=tuple(s.scale for s in stacks))
wanted = fp8.fp8_experts(x, *stacks, ids, weights)
torch.testing.assert_close(sum_experts(parts, x.dtype), wanted, rtol=1e-4, atol=1e-5)
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
