"""On a GPU: kernels at real sizes, every kind of step captured and replayed, and steps that wait for nothing.

This folder imports what `benchmarks.gpu.day` imports, and pytest, so it runs where neither Ray nor a browser is
installed: `pytest tests/gpu`.
"""

from pathlib import Path

import pytest
import torch
from adapter_folders import write_adapter

from benchmarks.gpu.checks import (
    PLANNED,
    check_model,
    graphs_are_eager,
    kernel_rows,
    planned_forwards_are_eager,
    steady_steps_never_wait,
)
from benchmarks.gpu.kernel_checks import kernel_form_rows
from benchmarks.roofline import measure_machine
from benchmarks.step_timing import StepCase
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_every_kernel_is_its_definition() -> None:
    rows = list(kernel_rows(CUDA, small=False))
    assert all(row["right"] is True or "not_run" in row for row in rows)
    assert rows[0]["kernel"] != "attention: reference" and rows[0]["right"] is True


def test_the_forms_of_kernels_are_those_in_torchs_operations() -> None:
    assert all(row["right"] is True for row in kernel_form_rows(CUDA))


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_every_kind_of_step_is_captured_and_replays_the_eager_one(family: str) -> None:
    row = graphs_are_eager(check_model(family, CUDA))
    assert row["captured"] == row["kinds"] and row["eager"] == 0 < row["replayed"]


@pytest.mark.parametrize("method", PLANNED)
def test_forwards_of_planned_rows_replay_the_eager_one(method: str) -> None:
    row = planned_forwards_are_eager(method, CUDA)
    assert row["eager"] == 0 < row["replayed"] and row["captured"] > 0


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_rows_with_adapters_are_captured_and_replayed(family: str, tmp_path: Path) -> None:
    model = check_model(family, CUDA)
    folders = {name: write_adapter(tmp_path / name, model.config, seed=len(name), rank=4) for name in ("one", "other")}
    row = graphs_are_eager(model, adapters=folders)
    assert row["captured"] == row["kinds"] and row["eager"] == 0 < row["replayed"]


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_graphs_compute_with_new_weights(family: str) -> None:
    decoding = DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.4)
    request = Request(request_id="a", prompt=tuple(range(20, 60)), max_tokens=64, decoding=decoding, ignore_eos=True)
    old, new = check_model(family, CUDA), check_model(family, CUDA)
    with torch.no_grad():
        for weight in new.parameters():
            weight.copy_(weight.flip(0))
    sizes = EngineConfig(max_rows=2, num_pages=256, page_size=32)
    wanted, engine = Engine(new, sizes).generate([request])[0], Engine(old, sizes)
    engine.prepare(decoding)
    before = engine.generate([request])[0]
    engine.update_weights(new.state_dict().items())
    assert engine.generate([request])[0].tokens == wanted.tokens != before.tokens
    assert engine.graph_report()["steps_eager"] == 0 < engine.graph_report()["steps_replayed"]


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_steady_steps_never_wait_for_the_device(family: str) -> None:
    row = steady_steps_never_wait(check_model(family, CUDA), StepCase(rows=4, buffer_size=2, prefix=64, steps=12))
    assert row["checked"] is True and row["steps_replayed"] > 0


def test_an_engine_gives_its_memory_back_and_decodes_as_before() -> None:
    decoding = DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.4)
    request = Request(request_id="a", prompt=tuple(range(20, 60)), max_tokens=40, decoding=decoding, ignore_eos=True)
    engine = Engine(check_model("sdar", CUDA), EngineConfig(max_rows=2, num_pages=4000))
    captured, before = engine.prepare(decoding), engine.generate([request])[0]
    held = torch.cuda.memory_allocated(CUDA)
    freed = engine.sleep()
    assert torch.cuda.memory_allocated(CUDA) <= held - freed < held
    engine.wake_up()
    assert engine.prepare(decoding) == captured > 0
    assert engine.generate([request])[0].tokens == before.tokens


def test_a_gpu_is_measured() -> None:
    machine = measure_machine(CUDA, torch.bfloat16)
    assert 1e11 < machine.bandwidth < 1e14 and 1e12 < machine.flops < 1e17
