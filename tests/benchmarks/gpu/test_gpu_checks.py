"""The checks for a GPU, on a CPU: they run, they find what is wrong, and their sizes for a GPU reach its kernels."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import write_adapter

from benchmarks.gpu import checks as gpu_checks
from benchmarks.gpu.checks import (
    GPU_DTYPE,
    PAGE,
    CheckFailed,
    check_config,
    check_model,
    graphs_are_eager,
    kernel_rows,
    planned_forwards_are_eager,
    steady_steps_never_wait,
)
from benchmarks.step_timing import StepCase
from mbd_core.decoding.blocks.work import WORK_NAMES, StepWork, work_of_request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.graphs import StepGraphs
from mbd_core.engine.step.kinds import StepKind
from mbd_core.ops.attention.choice import resolve
from mbd_core.ops.experts.choice import resolve_experts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOT = Path(__file__).resolve().parents[3]


def only_triton(name: str) -> Any:
    if name != "triton":
        raise ImportError(f"no module named {name}")


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_sizes_for_a_gpu_reach_kernels_that_a_graph_can_hold(family: str) -> None:
    config = check_config(family, on_gpu=True)
    assert config.head_dim == 128 and config.block_size == PAGE == 32
    attention = resolve(
        CUDA,
        GPU_DTYPE,
        config.head_dim,
        PAGE,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        capability=(9, 0),
        load=only_triton,
    )
    assert attention.capturable and attention.name == "triton"
    if config.moe is not None:
        experts = resolve_experts(
            CUDA,
            GPU_DTYPE,
            expert_size=config.moe.intermediate_size,
            hidden_size=config.hidden_size,
            capability=(9, 0),
            has_triton=True,
        )
        assert experts.name == "triton+grouped"


def test_the_requests_ask_for_every_kind_of_work() -> None:
    config = check_config("sdar", on_gpu=False)
    works = [work_of_request(r) for r in gpu_checks.check_requests(config, max_tokens=8)]
    asked = {name for name in WORK_NAMES if any(getattr(work, name) for work in works)}
    assert asked == set(WORK_NAMES) - {"adapts"} and StepWork() in works


def test_the_checks_run_here_and_say_what_they_did_not_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(kernel_rows(CPU, small=True))
    right = {row["kernel"]: row["right"] for row in rows}
    assert right.pop("confidence") is right.pop("experts: the shared among them") is None
    assert rows[-1]["not_run"] == "needs CUDA" and len(right) == 5 and all(right.values())
    model = check_model("llada2", CPU)
    row = graphs_are_eager(model, max_tokens=8, max_rows=2)
    assert row["same"] is True and row["kinds"] > 2 and row["captured"] == row["replayed"] == 0 < row["eager"]
    folders = {
        name: write_adapter(tmp_path / name, model.config, seed=seed, std=1.0)
        for seed, name in enumerate(("one", "other"))
    }
    served: list[set[str | None]] = []
    asked = gpu_checks._serve
    monkeypatch.setattr(
        gpu_checks,
        "_serve",
        lambda e, requests: (served.append({r.adapter for r in requests}), asked(e, requests))[1],
    )
    adapted = graphs_are_eager(model, adapters=folders, max_tokens=8, max_rows=2)
    assert adapted["same"] is True and adapted["eager"] > 0 and served == [{None, "one", "other"}] * 2
    steady = steady_steps_never_wait(model, StepCase(rows=2, buffer_size=2, prefix=32, steps=2))
    assert steady["checked"] is False
    for method in gpu_checks.PLANNED:
        planned = planned_forwards_are_eager(method, CPU, max_tokens=8)
        assert planned["largest_error"] == planned["captured"] == planned["replayed"] == 0


def test_another_forward_than_the_eager_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepGraphs, "forward", lambda _, runner, batch: runner.forward(batch) + 1.0)
    with pytest.raises(CheckFailed, match="a replayed forward of verified differs from the eager one by"):
        planned_forwards_are_eager("verified", CPU, max_tokens=8)


def test_every_static_step_of_the_requests_is_of_a_kind_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that store a prompt beside what they decode."""
    ran: list[StepKind] = []
    run = StepGraphs.run

    def recording(self: StepGraphs, kind: StepKind, **rest: Any) -> Any:
        ran.append(kind)
        return run(self, kind, **rest)

    monkeypatch.setattr(StepGraphs, "run", recording)
    model = check_model("llada2", CPU)
    sizes = EngineConfig(max_rows=2, num_pages=256, page_size=PAGE, static_shapes=True, overlap=False)
    requests = gpu_checks.check_requests(model.config, max_tokens=8)
    assert gpu_checks._serve(Engine(model, sizes), requests)[1] == set(ran)


def test_a_wrong_kernel_and_a_wrong_replay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_checks.loop_experts
    monkeypatch.setattr(gpu_checks, "loop_experts", lambda *layer: right(*layer) * 1.1)
    with pytest.raises(CheckFailed, match="grouped by 0"):
        list(kernel_rows(CPU, small=True))
    served = gpu_checks._serve
    runs: list[object] = []

    def other_tokens(engine: Any, requests: Any) -> Any:
        runs.append(engine)
        return served(
            engine, requests if len(runs) == 1 else [gpu_checks.replace(r, prompt=r.prompt[1:]) for r in requests]
        )

    monkeypatch.setattr(gpu_checks, "_serve", other_tokens)
    with pytest.raises(CheckFailed, match="multi 2"):
        graphs_are_eager(check_model("sdar", CPU), max_tokens=8, max_rows=2)


def test_the_gpu_tests_are_collected_with_the_core_alone() -> None:
    """A machine with a GPU may have no Ray, no browser, no plots and no client of OpenAI."""
    absent = ["ray", "openai", "playwright", "matplotlib", "fastapi", "hypothesis", "peft", "httpx", "moto"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import pytest; sys.exit(pytest.main(['tests/gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=bare, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "tests collected" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
