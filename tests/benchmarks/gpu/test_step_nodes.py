"""The nodes of a decoding step are counted, and their number is a budget: a step that launches more fails here."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import step_nodes as counting
from benchmarks.gpu.step_nodes import CUDA, MULTI_KERNEL, WORKS, main, shape_device, step_nodes
from mbd_core.decoding.blocks.work import WORK_NAMES, StepWork
from mbd_core.models.shapes import SHAPES
from mbd_core.ops.layer.confidence import confidence

pytest.importorskip("triton", reason="triton is not installed here; its launches are not counted")

A_LAYER = 12
A_STEP = {"greedy": 252, "T2T": 252, "DMax": 271}
MOST_BYTES = 340e6
"""Of what a step makes and reads again, 1.2 % of its weights and keys; a copy of the pages is far more."""


@pytest.mark.parametrize("work", A_STEP)
def test_a_step_of_llada2_mini_stays_within_its_nodes(work: str) -> None:
    nodes = step_nodes(SHAPES["llada2-mini"], WORKS[work])
    assert nodes.layer.total() <= A_LAYER, nodes.layer
    assert nodes.step.total() <= A_STEP[work], nodes.step
    assert nodes.step["copy from the host"] == 0 and not nodes.inexact
    assert 157184 * 48 * 2 < nodes.num_bytes <= MOST_BYTES, "its logits, and all that goes from kernel to kernel"


def test_each_work_and_each_form_of_logits_is_captured_by_kernels() -> None:
    """What a GPU runs and a fake device does not: the form by kernels, which copies nothing from the host."""
    config = replace(SHAPES["llada2-mini"], num_layers=2)
    for name in sorted(set(WORK_NAMES) - {"adapts"}):
        for asked in (48, None):
            nodes = step_nodes(config, StepWork(**{name: True}), num_asked=asked)
            assert (
                nodes.step["copy from the host"] == nodes.compiled["copy from the host"] == 0 < nodes.compiled.total()
            )


def test_what_is_launched_is_counted_and_views_are_not() -> None:
    with shape_device() as device:
        x = torch.empty(4, 3000, device=CUDA, dtype=torch.bfloat16)
        assert device.nodes.total() == 0 and x.is_cuda and x.device == CUDA
        y = (x.float() * 2).flatten()[3:].view(-1, 1).t()
        assert dict(device.nodes) == {"_to_copy": 1, "mul": 1} and y.shape == (1, 11997)
        assert device.num_bytes == 12000 * (2 + 4 + 4)
        x.add_(1)
        tokens, _ = confidence(x, mask_token_id=0, size=3000)
        assert tokens.shape == (4,) and tokens.is_cuda
        assert device.nodes["add_"] == 1 and device.nodes["triton: confidence.stretch"] == 1
        torch.tensor([1.0], device=CUDA)
        assert device.nodes["copy from the host"] == 1
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool((x > 0).any())


def test_operations_of_several_kernels_are_named() -> None:
    with shape_device() as device:
        torch.empty(4, 300, device=CUDA).sort()
    counted = counting.StepNodes(step=device.nodes, layer=device.nodes, compiled=Counter(), num_bytes=device.num_bytes)
    assert counted.inexact == {"sort"} < MULTI_KERNEL


def test_the_published_table_names_the_nodes_of_a_step() -> None:
    text = (Path(__file__).resolve().parents[3] / "benchmarks" / "README.md").read_text()
    published = text.partition("| greedy: node |")[2].partition("\n\n")[0]
    for name in step_nodes(SHAPES["llada2-mini"], WORKS["greedy"]).step:
        assert name.removeprefix("triton: ") in published, name


def test_the_command_prints_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny-sdar", "--buffer", "2"]) == 0
    out = capsys.readouterr().out
    assert "| greedy |" in out and "| triton: paged_attention.split |" in out
    assert main(["--rows", "0"]) == 2 and "must be at least 1" in capsys.readouterr().err
