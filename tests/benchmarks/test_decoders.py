"""The decoder benchmark runs every method, and other tokens than the plain loop's are an exit code of 1."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decoders
from benchmarks.canvas_batch import own_batch
from benchmarks.commands import decoders as bench_decoders
from mbd_core.decoding.blocks.canvas_config import Canvas, Leap
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.decoding.blocks.request import Request
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model


def benchmark_rows(folder: Path, *options: str) -> list[dict[str, Any]]:
    out = folder / "decoders.json"
    argv = ["--requests", "2", "--max-tokens", "16", "--repeats", "1", "--json", str(out), *options]
    assert bench_decoders(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert all(r["same_tokens_float64"] for r in rows)
    return rows


def methods_of(rows: list[dict[str, Any]]) -> set[str]:
    return {row["method"].split(",")[0] for row in rows}


def test_a_row_has_times_and_rates_of_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = benchmark_rows(tmp_path, "--models", "sdar,dream", "--methods", "SingleBD,Alg. 5,dual cache,BlockBatch")
    assert {r["model"] for r in rows} == {"sdar (random)", "dream (random)"}
    assert methods_of(rows) == {"SingleBD", "MultiBD", "Fast-dLLM", "BlockBatch"}
    for row in rows:
        assert row["nfe"] > 0 and row["tokens"] > 0
        for name in ("plain", "engine_1", "engine_n"):
            assert math.isclose(row[f"{name}_tps"], row["tokens"] / row[f"{name}_seconds"])
        assert math.isclose(row["engine_n_over_plain"], row["plain_seconds"] / row["engine_n_seconds"])
        assert row["engine_1_over_plain_processor"] > 0
    assert "same tokens: yes" in capsys.readouterr().out


def test_canvases_are_compared_with_one_batch_of_them(tmp_path: Path) -> None:
    out = tmp_path / "decoders.json"
    argv = ["--requests", "3", "--max-tokens", "20", "--repeats", "1", "--models", "llada (", "--json", str(out)]
    assert bench_decoders([*argv, "--methods", "vanilla,no cache"]) == 0
    batches = json.loads(out.read_text())["batches"]
    assert [row["method"] for row in batches] == ["vanilla LLaDA", "Fast-dLLM, no cache"]
    for row in batches:
        assert row["same_tokens"] and row["requests"] == 3
        assert math.isclose(row["engine_over_batch"], row["batch_seconds"] / row["engine_seconds"])


@pytest.mark.parametrize(
    ("prompts", "canvas", "named"),
    [
        ([[1], [1, 2]], Canvas(), "one length"),
        ([[1]], Canvas(cache="dual"), "dual"),
        ([[1]], Canvas(leap=Leap()), "leap"),
    ],
)
def test_a_batch_that_it_cannot_decode_is_refused(prompts: list[list[int]], canvas: Canvas, named: str) -> None:
    model = random_model(SHAPES["tiny-llada"], device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match=named):
        own_batch(model, prompts, 8, canvas)


@pytest.mark.slow
def test_the_decoder_benchmark_runs_every_method(tmp_path: Path) -> None:
    rows = benchmark_rows(tmp_path)
    assert {r["model"] for r in rows} >= {"tiny-bd", "tiny-mbd", "sdar (random)", "dream (random)"}
    assert methods_of(rows) >= {"SingleBD", "MultiBD", "T2T", "DMax", "D2F", "Fast-dLLM", "dLLM-Cache", "LocalLeap"}
    assert methods_of(rows) >= {"BlockBatch", "vanilla LLaDA", "Fast-dLLM v2"}


def test_other_tokens_end_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = decoders.plain_run

    def wrong(model: Decoder, request: Request) -> object:
        run = right(model, request)
        return type(run)([t + 1 for t in run.tokens], run.finish_reason, run.num_forwards)

    monkeypatch.setattr(decoders, "plain_run", wrong)
    argv = ["--requests", "1", "--max-tokens", "8", "--repeats", "1", "--models", "sdar", "--methods", "SingleBD"]
    assert bench_decoders(argv) == 1
    assert "same tokens: no: sdar (random) SingleBD" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "named"), [(["--models", "x"], "--models"), (["--fixtures", "nowhere"], "nowhere")])
def test_nothing_to_decode_is_one_sentence(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decoders(argv) == 2
    assert named in capsys.readouterr().err


def test_fixtures_give_the_models(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = Path(request.config.getoption("--fixtures"))
    if not any(folder.glob("*/model.safetensors")):
        pytest.skip(f"no fixtures in {folder}")
    out = tmp_path / "decoders.json"
    argv = ["--fixtures", str(folder), "--requests", "2", "--max-tokens", "8", "--repeats", "1", "--json", str(out)]
    assert bench_decoders([*argv, "--methods", "SingleBD,dual cache,pipelined"]) == 0
    models = {r["model"] for r in json.loads(out.read_text())["rows"]}
    assert {name.rsplit("-", 1)[0] for name in models} >= {"sdar", "llada2", "llada", "dream"}
    assert not any("random" in name for name in models)


def test_methods_are_named_as_in_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--requests", "1", "--max-tokens", "8", "--repeats", "1", "--models", "sdar", "--methods", "multi-bd-t2t"]
    assert bench_decoders(argv) == 0
    assert "| sdar (random) | T2T, multi |" in capsys.readouterr().out
    for model in decoders.model_cases(None, num_requests=1, max_tokens=8):
        assert model.methods and all(method.name in METHODS for method in model.methods)


def test_an_existing_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the refusal comes before a model is loaded."""
    monkeypatch.setattr("benchmarks.decoders.model_cases", lambda *_, **__: pytest.fail("models were loaded"))
    (tmp_path / "a.json").write_text("a user's")
    assert bench_decoders(["--json", str(tmp_path / "a.json")]) == 2
    assert "a.json exists already" in capsys.readouterr().err
    assert (tmp_path / "a.json").read_text() == "a user's"


def test_the_job_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decoders(["--help"]) == 0
    assert "--methods" in capsys.readouterr().out
