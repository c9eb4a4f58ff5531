"""The report on block lengths: its numbers agree with one another and with runs made apart; bad input exits 2."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_attention_folder import MAX_TOKENS, decoder_of, make_folder

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.files import MANIFEST
from mbd_core.plain_loops import run_planned
from research.block_batch.decoding import read_prompts
from research.block_batch.outputs import BranchStudy, DecodedPrompt, StudiedPrompt, oracle_of
from research.block_batch.report import method_means
from research.block_batch.study import main

LENGTHS, TAU = (4, 8, 16), 0.6
BRANCHES = {"tau_sync": 2, "refresh": 16}
PROMPTS = [[5, 9, 14, 33, 21, 8, 77], [3, 40, 7, 7, 19], [61, 2, 30]]
BAD: list[tuple[dict[str, str], str]] = [
    ({"--model": "nowhere"}, "unknown model 'nowhere'"),
    ({"--model": "BLOCKS"}, "attends in blocks"),
    ({"--prompts": "missing.jsonl"}, "missing.jsonl"),
    ({"--prompts": "EMPTY"}, "holds no prompts"),
    ({"--prompts": "BROKEN"}, "line 2: it is not valid JSON"),
    ({"--prompts": "BOTH"}, "either prompt or prompt_ids"),
    ({"--prompts": "FAR"}, "lies outside the vocabulary"),
    ({"--prompts": "TEXT"}, "no tokenizer"),
    ({"--prompts": "LONG"}, "exceed the model's 512 positions"),
    ({"--block-lengths": "4"}, "at least two lengths"),
    ({"--block-lengths": "8,4"}, "ascending"),
    ({"--block-lengths": "4,x"}, "whole numbers of at least 1"),
    ({"--block-lengths": "4,64"}, "exceeds --max-tokens 24"),
    ({"--tau": "1.5"}, "canvas.tau=1.5"),
    ({"--limit": "0"}, "--limit"),
    ({"--watch": "-1"}, "--watch"),
    ({"--data": "x.jsonl"}, "belongs to a --task"),
    ({"--decoding": "{"}, "is not valid JSON"),
    ({"--decoding": "[1]"}, "must be an object"),
    ({"--decoding": '{"canvas": {"cache": "none"}}'}, "canvas.cache"),
    ({"--decoding": '{"canvas": {"branches": {"block_lengths": [4]}}}'}, "branches.block_lengths"),
    ({"--decoding": '{"tau_m2t": 0.5}'}, "tau_m2t"),
    ({"--decoding": '{"canvas": {"leap": {}}}'}, "canvas.leap"),
    ({"--decoding": '{"canvas": {"tau": 0.5}}', "--tau": "0.5"}, "twice"),
]
FILES = {
    "GOOD": '{"prompt_ids": [1, 2]}',
    "EMPTY": "\n",
    "BROKEN": '{"prompt_ids": [1]}\n{',
    "BOTH": '{"prompt_ids": [1], "prompt": "a"}',
    "FAR": '{"prompt_ids": [99999]}',
    "TEXT": '{"prompt": "a"}',
    "LONG": json.dumps({"prompt_ids": [1] * 500}),
}


@pytest.fixture(scope="module", params=["llada", "dream"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(family, tmp_path_factory.mktemp("models") / family)


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """report.json of three prompts of ids, two of them watched, a model without a tokenizer; `folder` added."""
    place = tmp_path_factory.mktemp("report")
    lines = [json.dumps({"prompt_ids": ids}) for ids in PROMPTS]
    (place / "prompts.jsonl").write_text("\n".join(lines) + "\n\n")
    asked = ["--model", str(folder), "--prompts", str(place / "prompts.jsonl"), "--out", str(place / "out")]
    asked += ["--max-tokens", str(MAX_TOKENS), "--block-lengths", "4,8,16", "--tau", str(TAU), "--watch", "2"]
    assert main([*asked, "--draw", "1", "--decoding", json.dumps({"canvas": {"branches": BRANCHES}})]) == 0
    return {**json.loads((place / "out" / "report.json").read_text()), "folder": place / "out"}


def test_the_files_are_there(report: dict[str, Any]) -> None:
    wanted = {"forwards.png", "bifurcation.png", "consensus.png", "consensus_0.png", "trajectory_0.png"}
    assert set(report["plots"]) == wanted
    assert {p.name for p in report["folder"].iterdir()} == wanted | {"report.md", "report.json", MANIFEST}
    for name in wanted:
        assert (report["folder"] / name).read_bytes().startswith(b"\x89PNG")
    text = (report["folder"] / "report.md").read_text()
    assert "No answer could be graded" in text and "not graded" in text and "100.0 %" not in text


def test_every_run_is_the_plain_one(report: dict[str, Any], folder: Path) -> None:
    """Watching changes nothing, and the settings reach the decoders."""
    model = load_model(folder, dtype=torch.float32)
    for ids, row in zip(PROMPTS, report["prompts"], strict=True):
        for n in LENGTHS:
            run = run_planned(model, decoder_of(model, ids, Canvas(block_length=n, cache="dual", tau=TAU)))
            assert (row["single"][str(n)]["tokens"], row["single"][str(n)]["num_forwards"]) == (
                run.tokens,
                run.num_forwards,
            )
        settings = Branches(block_lengths=LENGTHS, **BRANCHES)
        run = run_planned(model, decoder_of(model, ids, Canvas(tau=TAU, branches=settings)))
        assert (row["block_batch"]["tokens"], row["block_batch"]["num_forwards"]) == (run.tokens, run.num_forwards)
        assert row["block_batch"]["winner"] in LENGTHS and row["block_batch"]["accuracy"] is None


def test_the_oracle_is_the_least_of_every_prompt(report: dict[str, Any]) -> None:
    forwards = [[run["num_forwards"] for run in row["single"].values()] for row in report["prompts"]]
    assert report["oracle"]["num_forwards"] == pytest.approx(np.mean([min(one) for one in forwards]))
    assert report["oracle"]["accuracy"] is None and report["oracle"]["as_released"] is None
    for n, mean in zip(LENGTHS, np.mean(forwards, axis=0), strict=True):
        assert report["methods"][f"B = {n}"]["num_forwards"] == pytest.approx(mean)
        assert report["oracle"]["num_forwards"] <= mean
    assert sum(report["oracle"]["chosen"].values()) == len(PROMPTS)


def test_bifurcations_and_consensus_are_the_outputs(report: dict[str, Any]) -> None:
    matrix = np.array(report["bifurcation"])
    assert (matrix == matrix.T).all()
    outputs = [{n: row["single"][str(n)]["tokens"] for n in LENGTHS} for row in report["prompts"]]
    for (i, a), (j, b) in combinations(enumerate(LENGTHS), 2):
        assert matrix[i, j] <= min(matrix[i, i], matrix[j, j])
        for one, row in zip(outputs, report["prompts"], strict=True):
            same = row["bifurcation"][f"{a},{b}"]
            assert one[a][:same] == one[b][:same]
            assert same == min(len(one[a]), len(one[b])) or one[a][same] != one[b][same]
    shares = np.array(report["consensus"], dtype=float)
    assert shares.shape == (3, max(len(t) for one in outputs for t in one.values()))
    assert np.nanmin(shares) >= 1 / 3 - 1e-4 and np.nanmax(shares) <= 1


def test_the_caches_and_the_bounds(report: dict[str, Any]) -> None:
    assert [row["caches"] is not None for row in report["prompts"]] == [True, True, False]
    for row in report["prompts"][:2]:
        caches = row["caches"]
        for n in LENGTHS:
            single = [p for p in caches["points"] if p["run"] == "single" and p["branch"] == n]
            assert [p["step"] for p in single] == list(range(row["single"][str(n)]["num_forwards"]))
            errors = caches["errors"][str(n)]
            assert [e["kind"] for e in errors] == [p["kind"] for p in single]
            for e in errors:
                assert e["error"] < 1e-4 if e["kind"] != "block" else e["error"] > 1e-3
        initial = {(p["x"], p["y"], p["z"]) for p in caches["points"] if p["kind"] == "initial"}
        np.testing.assert_allclose(list(initial), 0.0, atol=1e-3)
        assert caches["sketch_error"] < 0.2
        for sync in caches["syncs"]:
            if sync["gamma"] is not None:
                assert sync["gamma"] == pytest.approx(sync["after"] / sync["before"])
    assert any(row["caches"]["syncs"] for row in report["prompts"][:2])
    bounds = report["bounds"]
    assert {b["proposition"] for b in bounds} == {"Lemma 1", "1", "2", "3"}
    assert {b["block_length"] for b in bounds} == {*LENGTHS, None}
    for b in bounds:
        assert b["count"] >= b["held"] and b["holds"] == (b["count"] == b["held"])
        if "prediction" not in b["statement"]:  # which may fail: it speaks of another prompt
            assert b["holds"], b
    (third,) = [b for b in bounds if b["proposition"] == "3"]
    assert 0 < third["value"] <= third["bound"]


def test_graded_prompts_take_the_most_accurate_length() -> None:
    def run(accuracy: float, num_forwards: int) -> DecodedPrompt:
        return DecodedPrompt(tokens=[1], num_forwards=num_forwards, finish_reason="length", accuracy=accuracy)

    def sample(one: DecodedPrompt, other: DecodedPrompt) -> StudiedPrompt:
        return StudiedPrompt(
            name="a", prompt_length=1, single={4: one, 8: other}, block_batch=run(1, 5), winner=4, branches=[]
        )

    samples = [sample(run(1, 30), run(0, 10)), sample(run(1, 20), run(1, 8))]
    study = BranchStudy(block_lengths=[4, 8], prompts=samples, graded=True, rounding=1e-7)
    points = method_means(study, oracle_of(samples))
    assert (points["oracle"].accuracy, points["oracle"].num_forwards) == (1.0, 19.0)
    assert points["B = 8"].accuracy == 0.5 and points["BlockBatch"].num_forwards == 5.0


def test_an_existing_folder_is_kept(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the refusal comes before a prompt or a model is read."""
    (tmp_path / "report.md").write_text("a user's")
    asked = ["--model", str(folder), "--prompts", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]
    for argv in (asked, [*asked, "--overwrite"]):
        assert main(argv) == 2
        assert "was not written by this project" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["report.md"]


def test_a_task_is_graded(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = load_model(tiny_model_dir).config
    folder = make_folder("llada", tmp_path / "model", load_tokenizer(tiny_model_dir, config))
    out = tmp_path / "out"
    asked = ["--model", str(folder), "--task", "gsm-mini", "--limit", "2", "--max-tokens", "8"]
    assert main([*asked, "--block-lengths", "4,8", "--watch", "0", "--out", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["graded"] and report["oracle"]["accuracy"] is not None and report["bounds"] == []
    for row in report["prompts"]:
        assert row["caches"] is None and row["block_batch"]["accuracy"] in (0.0, 1.0)
    assert not list(out.glob("trajectory*"))


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_sentence(
    given: dict[str, str],
    message: str,
    folder: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    options = {
        "--model": str(folder),
        "--prompts": "GOOD",
        "--max-tokens": "24",
        "--block-lengths": "4,8",
        "--out": str(tmp_path / "out"),
        **given,
    }
    options["--prompts"] = str(tmp_path / options["--prompts"])
    if options["--model"] == "BLOCKS":
        options["--model"] = str(tiny_model_dir)
    assert main([f"{name}={value}" for name, value in options.items()]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("blocks: ") and message in error[0]
    assert not (tmp_path / "out").exists()


def test_a_prompt_may_hold_any_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "one\u2028two\x85"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [(prompt.name, prompt.text) for prompt in read_prompts(file)] == [("line 1", "one\u2028two\x85")]
