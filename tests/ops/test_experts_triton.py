"""The fused experts are the loop, the kernels being interpreted."""

from triton_interpreter import run_interpreted

FUSED_ON_CPU = """
import torch
from expert_layers import layer
from mbd_core.ops import fp8
from mbd_core.ops.experts import loop_experts
from mbd_core.ops.expert_order import sort_by_expert
from mbd_core.ops.experts_triton import cut_tiles, fused_experts
for sizes in ((1, 24, 20, 9, 3), (37, 40, 70, 5, 2), (20, 100, 33, 3, 1)):
    arguments = layer(*sizes)
    torch.testing.assert_close(fused_experts(*arguments), loop_experts(*arguments), rtol=1e-4, atol=1e-5)
x, gate, up, down, ids, weights = layer(19, 40, 36, 6, 2)
stacks = [fp8.quantize(w) for w in (gate, up, down)]
fused = fused_experts(x, *(s.values for s in stacks), ids, weights, scales=tuple(s.scale for s in stacks))
torch.testing.assert_close(fused, fp8.fp8_experts(x, *stacks, ids, weights), rtol=1e-4, atol=1e-5)
ids[3:7] = 6
empty = torch.empty
torch.empty = lambda *size, **options: empty(*size, **options).fill_(float("nan"))  # what a GPU's memory may hold
found = fused_experts(x, gate, up, down, ids, weights)
torch.empty = empty
assert not found[3:7].any()
torch.testing.assert_close(found, loop_experts(x, gate, up, down, ids, weights), rtol=1e-4, atol=1e-5)
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
