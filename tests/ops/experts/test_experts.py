"""Experts: the loop is the equation, grouped products are the loop, and the choice between them has its reasons."""

import pytest
import torch
from expert_layers import by_equation, layer
from hypothesis import given, settings
from hypothesis import strategies as st

from mbd_core.ops.experts import fp8
from mbd_core.ops.experts.choice import (
    ExpertsFunction,
    by_load,
    grouped_experts,
    loop_experts,
    resolve_experts,
    sort_by_expert,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@settings(max_examples=30)
@given(tokens=st.integers(1, 40), num_experts=st.integers(1, 9), per_token=st.integers(1, 3), seed=st.integers(0, 99))
def test_grouped_and_loop_are_the_equation(tokens: int, num_experts: int, per_token: int, seed: int) -> None:
    arguments = layer(tokens, 24, 20, num_experts, min(per_token, num_experts), seed=seed)
    expected = by_equation(*arguments)
    torch.testing.assert_close(loop_experts(*arguments), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grouped_experts(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_a_token_without_an_expert_gets_zeros_and_changes_no_other() -> None:
    """Every implementation takes the sentinel id E, whatever stands where nobody writes."""
    x, gate, up, down, ids, weights = layer(9, 24, 20, 6, 2)
    wanted = loop_experts(x, gate, up, down, ids, weights)
    dead = torch.tensor([1, 4, 8])
    wanted[dead] = 0
    ids[dead] = 6
    stacks = [fp8.quantize(stack) for stack in (gate, up, down)]
    rounded = [fp8.dequantize(stack, torch.float32) for stack in stacks]
    for found, right in (
        (loop_experts(x, gate, up, down, ids, weights), wanted),
        (grouped_experts(x, gate, up, down, ids, weights), wanted),
        (fp8.fp8_experts(x, stacks[0], stacks[1], stacks[2], ids, weights), loop_experts(x, *rounded, ids, weights)),
    ):
        assert not found[dead].any()
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_grouped_in_bfloat16_is_the_loop() -> None:
    x, gate, up, down, ids, weights = layer(33, 48, 40, 5, 2)
    x, gate, up, down = (t.bfloat16() for t in (x, gate, up, down))
    loop, fast = loop_experts(x, gate, up, down, ids, weights), grouped_experts(x, gate, up, down, ids, weights)
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
    alone = loop_experts(x, gate, up, down, torch.tensor([[2]]), torch.ones(1, 1))
    for call in (loop_experts, grouped_experts):
        torch.testing.assert_close(call(x, gate, up, down, ids, weights), alone, rtol=1e-2, atol=0)


def test_assignments_are_sorted_by_expert_and_bounded() -> None:
    ids = torch.tensor([[3, 0], [3, 4], [0, 3]])
    order, ends = sort_by_expert(ids, 6)
    assert ids.flatten()[order].tolist() == [0, 0, 3, 3, 3, 4]
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert ends.tolist() == [2, 2, 2, 5, 6, 6] and ends.dtype == torch.int32


def test_odd_widths_are_refused_by_grouped_and_left_to_the_loop() -> None:
    x, gate, up, down, ids, weights = layer(3, 24, 18, 4, 2)
    with pytest.raises(ValueError, match="use the loop"):
        grouped_experts(x, gate, up, down, ids, weights)
    assert resolve_experts(CPU, torch.float32, expert_size=18, hidden_size=24).name == "loop"


def test_choice_of_experts_and_its_reasons() -> None:
    on_cpu = resolve_experts(CPU, torch.float32)
    assert on_cpu.name == "grouped" and "CUDA" in on_cpu.reasons["triton"] and on_cpu.call is grouped_experts
    assert on_cpu.reasons["triton"].startswith("it needs")
    assert resolve_experts(CPU, torch.float32, "loop").call is loop_experts
    bare = resolve_experts(CUDA, torch.bfloat16, capability=(9, 0), has_triton=False)
    assert bare.name == "grouped" and bare.reasons["triton"] == "triton is not installed"
    old = resolve_experts(CUDA, torch.bfloat16, capability=(8, 0), has_triton=False)
    assert old.name == "loop" and "waits for the host" in old.reasons["grouped"]
    with pytest.raises(ValueError, match=r"'triton' .*CUDA"):
        resolve_experts(CPU, torch.float32, "triton")
    with pytest.raises(ValueError, match=r"'grouped' .*float16"):
        resolve_experts(CUDA, torch.float16, "grouped", capability=(9, 0), has_triton=True)
    with pytest.raises(ValueError, match="triton, grouped, loop"):
        resolve_experts(CPU, torch.float32, "fused")


def test_load_decides_between_two_by_shape_alone() -> None:
    def say(answer: float) -> ExpertsFunction:
        return lambda x, gate, up, down, ids, weights: torch.tensor(answer)

    call = by_load(few=say(0.0), many=say(1.0), tokens_per_expert=3)
    assert [float(call(*layer(tokens, 8, 4, 6, 2))) for tokens in (1, 8, 9, 20)] == [0, 0, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton+grouped", "triton", "grouped"])
def test_gpu_experts_are_the_loop(name: str) -> None:
    x, gate, up, down, ids, weights = (t.cuda() for t in layer(64, 256, 128, 32, 4))
    x, gate, up, down = (t.bfloat16() for t in (x, gate, up, down))
    try:
        experts = resolve_experts(CUDA, torch.bfloat16, name)
    except ValueError as error:
        pytest.skip(str(error))
    expected = loop_experts(x, gate, up, down, ids, weights)
    torch.testing.assert_close(experts.call(x, gate, up, down, ids, weights), expected, rtol=3e-2, atol=2e-2)


@pytest.mark.gpu
def test_gpu_grouped_and_fused_are_captured_in_a_graph() -> None:
    x, gate, up, down, ids, weights = (t.cuda() for t in layer(64, 256, 128, 32, 4))
    x, gate, up, down = (t.bfloat16() for t in (x, gate, up, down))
    experts = resolve_experts(CUDA, torch.bfloat16)
    if experts.name == "loop":
        pytest.skip(str(experts.reasons))
    expected = experts.call(x, gate, up, down, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.call(x, gate, up, down, ids, weights)
    ids.copy_(ids.flip(0))
    graph.replay()
    assert not torch.equal(out, expected)
    torch.testing.assert_close(out, experts.call(x, gate, up, down, ids, weights), rtol=0, atol=0)
