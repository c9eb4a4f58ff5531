"""The day's script, on a CPU at toy sizes: every section runs; what fails or hangs is named and costs only itself."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.capacity.chips import CHIPS
from benchmarks.gpu import day as gpu_day
from benchmarks.gpu import sections as gpu_sections
from benchmarks.gpu.day import PART_SECONDS, PARTS, Section, main, report, run_apart
from benchmarks.gpu.sections import profile_call, toy_day
from mbd_core.models.mlp import MoE
from mbd_core.ops.attention.choice import AttentionKernel
from mbd_core.ops.experts import expert_products as experts_triton

SECTIONS = [
    pytest.param(part, name, marks=[pytest.mark.slow] if name == "compiled steps" else [])
    for part, sections in PARTS.items()
    for name in sections
]


@pytest.mark.parametrize(("part", "name"), SECTIONS)
def test_every_section_runs_at_toy_sizes(part: int, name: str, tmp_path: Path) -> None:
    rows = list(PARTS[part][name].run(toy_day(tmp_path)))
    assert rows and json.loads(json.dumps(rows)) == rows, "the rows are what JSON can hold"
    if name.startswith(("mini", "dense")):
        timed, profiles = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        for row, profile in zip(timed, profiles, strict=True):
            assert row["step_over_floor"] > 0 and (row["touched_experts"] is None) == (name == "dense")
            assert profile["top"] and profile["nodes"] is None
            assert all(row[key] == profile[key] for key in ("model", "rows", "prefix", "buffer_size", "graphs"))
    text = report(part, {name: {"state": "done", "seconds": 1.0, "rows": rows}}, toy=True)
    assert f"## {name}" in text and text.count("|---|") >= 1


@pytest.mark.parametrize(
    ("name", "chip", "gigabytes"),
    [("NVIDIA H100 80GB HBM3", "H100", 3350), ("NVIDIA H200", "H200", 4800), ("NVIDIA H100 PCIe", None, None)],
)
def test_budgets_follow_the_chip_that_is_found(
    name: str, chip: str | None, gigabytes: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stand-in names, with the bytes that a step reads set so high that the budget is known."""
    monkeypatch.setattr(gpu_sections, "device_name", lambda device: name)
    day = replace(toy_day(tmp_path), chip=gpu_sections.gpu_day(torch.device("cpu"), tmp_path).chip)
    values = {row["what"]: row["value"] for row in gpu_sections.machine(day)}
    row: dict[str, Any] = {"floor_bytes": 4.8e12, "floor_flops": 1.0, "step_seconds": 1.5}
    budget = gpu_sections._budget(day.chip, row)
    if gigabytes is None:
        assert values["chip"] == "NVIDIA H100 PCIe is unknown: no budgets"
        assert values["bandwidth, of the data sheet"] is None and set(budget.values()) == {None}
    else:
        assert values["chip"].startswith(f"{chip}: ") and f"{gigabytes / 1000:g} TB/s" in values["chip"]
        assert values["bandwidth, of the data sheet"] == pytest.approx(values["bandwidth, GB/s"] / gigabytes)
        assert budget["budget_ms"] == pytest.approx(1300 * 4800 / gigabytes)
        assert budget["within_budget"] == (chip == "H100")
    rows = list(gpu_sections.steps(day, shape=day.mini, rows=1))
    assert all((row["budget_ms"] is None) == (chip is None) for row in rows[: len(rows) // 2])


def test_more_bytes_a_second_than_the_data_sheet_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sections, "measure_bandwidth", lambda *args, **kwargs: 5e12)
    with pytest.raises(RuntimeError, match="5000 GB/s"):
        gpu_sections.machine(replace(toy_day(tmp_path), chip=CHIPS["h200"]))


PACKAGES = {"torch", "triton", "transformers", "psutil", "pyarrow", "pytest"} | {
    "filelock",
    "fsspec",
    "jinja2",
    "numpy",
    "safetensors",
    "setuptools",
    "sympy",
    "tokenizers",
    "tqdm",
    "typer",
    "typing_extensions",
}
"""What a machine for these checks has (docs/reference/gpu.md), and what comes with torch and transformers."""

BARE = """
import importlib, sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from benchmarks.gpu.day import PARTS
from benchmarks.gpu.sections import toy_day

for part, name in ((1, "machine"), (1, "graphs"), (3, "soak")):
    assert list(PARTS[part][name].run(toy_day(Path(sys.argv[1]))))
for file in Path("tests/gpu").glob("test_*.py"):
    importlib.import_module(f"gpu.{file.stem}")
print("all held")
"""


def test_a_machine_with_few_packages_runs_the_checks(tmp_path: Path) -> None:
    """Every other dependency of the project is missing there, in a process of its own."""
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    missing = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in named} - PACKAGES
    assert {"llguidance", "pydantic", "pydantic_core", "math_verify", "ray", "openai"} <= missing
    script = BARE.replace("{missing}", repr(missing))
    paths = [root, root / "tests", *(root / "tests" / "support").iterdir()]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("all held\n"), done.stderr[-2000:]


def test_the_parts_fit_into_a_call_of_nine_minutes() -> None:
    assert PART_SECONDS <= 540 and all(sum(s.limit for s in part.values()) <= PART_SECONDS for part in PARTS.values())
    assert PARTS[1]["machine"].required


def test_a_part_writes_both_files_from_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--part", "3", "--toy", "--out", str(tmp_path / "day"), "--only", "clean exit"]
    assert main(argv) == 0
    written = json.loads((tmp_path / "day" / "part3.json").read_text())
    assert written["toy"] is True and written["sections"].keys() == {"clean exit"}
    assert written["sections"]["clean exit"]["rows"][0]["steps"] == 3
    assert "## clean exit" in (tmp_path / "day" / "part3.md").read_text()
    assert main(argv) == 2 and "part3.json exists already" in capsys.readouterr().err


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "1", "--toy", "--out", str(tmp_path), "--only", "tiles"]) == 2
    assert "part 1 has no section 'tiles'; it has machine, kernels" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["--part", "1", "--out", str(tmp_path)]) == 2
        assert "no CUDA device is here; --toy" in capsys.readouterr().err


def test_a_process_that_fails_or_hangs_is_named() -> None:
    """What it had measured until then is kept."""
    row = """print('begun'); print('row: {"a": 1}', flush=True)"""
    done = run_apart([sys.executable, "-c", row], 60)
    assert (done["state"], done["rows"]) == ("done", [{"a": 1}])
    failed = run_apart([sys.executable, "-c", f"{row}; raise SystemExit('why it failed')"], 60)
    assert (failed["state"], failed["why"], failed["rows"]) == ("failed", "why it failed", [{"a": 1}])
    hanging = f"""import sys, time; {row}; print('row: {{"a"', end='', flush=True)
print('where', file=sys.stderr, flush=True); sys.stdout.buffer.write(b'\\xff'); time.sleep(60)"""
    hung = run_apart([sys.executable, "-c", hanging], 4.0)
    assert (hung["state"], hung["rows"]) == ("over its limit", [{"a": 1}]) and "where" in hung["why"]
    assert "| 1 |" in report(1, {"hung": hung}, toy=True)
    assert run_apart([sys.executable], -1.0)["state"] == "not run"


def test_a_number_that_json_has_not_is_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_day.PARTS, 1, {"odd": Section(5, lambda day: [{"error": float("nan"), "size": 2.0}])})
    assert main(["--part", "1", "--toy", "--out", str(tmp_path), "--section", "odd"]) == 0
    assert json.loads(capsys.readouterr().out.removeprefix("row: ")) == {"error": "nan", "size": 2.0}


def test_a_part_ends_if_its_first_section_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(name: str, day: Any) -> list[Any]:
        raise AssertionError("in another process")

    sections = {"first": Section(5, partial(failing, "first"), required=True), "second": Section(5, lambda day: [])}
    monkeypatch.setitem(gpu_day.PARTS, 1, sections)
    run: list[list[str]] = []

    def apart(command: list[str], limit: float) -> dict[str, Any]:
        run.append(command)
        return {"state": "failed", "why": "no graph can hold it", "seconds": 0.1, "rows": []}

    monkeypatch.setattr(gpu_day, "run_apart", apart)
    assert main(["--part", "1", "--toy", "--out", str(tmp_path)]) == 1
    assert len(run) == 1 and run[0][-5:-3] == ["--section", "first"]
    written = (tmp_path / "part1.md").read_text()
    assert "no graph can hold it" in written and "first failed" in written


def test_the_day_stops_where_no_graph_can_hold_the_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = gpu_sections.Day(device=torch.device("cuda", 0), out=tmp_path)
    reference = AttentionKernel(name="reference", bind=lambda layout: lambda q, k, v: q, capturable=False)
    monkeypatch.setattr(gpu_sections, "resolve", lambda *_, **__: reference)
    with pytest.raises(RuntimeError, match="no CUDA graph"):
        gpu_sections.machine(day)


def test_a_profile_names_what_ran() -> None:
    x = torch.randn(64, 64)
    nodes, top = profile_call(lambda: x @ x, torch.device("cpu"), most=3)
    assert nodes is None and 1 <= len(top) <= 3 and any("mm" in row["kernel"] for row in top)


def test_the_sweep_keeps_the_fastest_tiles_for_the_sections_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it runs no kernel: the tiles that are tried decide the time, and those of 128 columns do not fit."""
    monkeypatch.setattr(experts_triton, "TILES", {})
    monkeypatch.setattr(gpu_sections.Day, "on_gpu", True)
    day = toy_day(tmp_path)

    def seconds(day: Any, run: Any) -> float | None:
        tried = [*experts_triton.TILES.values()][-1]
        return None if tried.columns == 128 else 1e-6 * (tried.columns + tried.stages)

    monkeypatch.setattr(gpu_sections, "_graph_seconds", seconds)
    rows = list(gpu_sections.tile_sweep(day))
    found = [(row["bytes"], row["tokens"]) for row in rows]
    assert found == [(size, n) for n in gpu_sections.TOKEN_COUNTS for size in (2, 1)]
    for row in rows:
        each = row["tokens"] * (4 + 1) / 16
        assert row["tiles"][0] in ((64,) if each >= 16 else (16, 32)) and row["tiles"][1:4] == [32, 128, 2]
        assert row["microseconds"] == pytest.approx(34) and row["default_tiles"][1] == 64 and row["tried"] > 4
    experts_triton.TILES.clear()
    monkeypatch.setattr(gpu_sections, "steps", lambda day, **_: iter(()))
    assert list(gpu_sections.swept_steps(day, rows=1)) == []
    assert len(experts_triton.TILES) == 12 and experts_triton.tiles_for(60, 32, 1).columns == 32


def test_a_step_below_its_floor_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sections.Day, "on_gpu", True)
    monkeypatch.setattr(gpu_sections, "measure_machine", lambda *_: gpu_sections.Machine(bandwidth=1.0, flops=1e10))
    monkeypatch.setattr(MoE, "fuses", lambda self, tokens: torch.is_inference_mode_enabled())
    rows = gpu_sections.steps(toy_day(tmp_path), shape="tiny-llada2", rows=1)
    row = next(rows)
    assert row["step_over_floor"] < 1 and row["tiles"][1:] == [64, 128, 2, 4], "the tiles of inference are named"
    with pytest.raises(RuntimeError, match="floor"):
        next(rows)
