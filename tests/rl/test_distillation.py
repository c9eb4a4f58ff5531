"""Runs of on-policy distillation: an adapted base learns from the base, a model from itself at one slot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from base_folders import base_folder
from rl_runs import ENGINE, finish, rollout_rows, tiny_run
from safetensors.torch import load_file

from jobs.train_rl import main
from mbd_core.checkpoint.adaptation.block_diffusion import convert_to_block_diffusion
from mbd_core.multitf.config import LoraSettings, TeacherSettings
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.folder import ITERATIONS
from mbd_core.rl.rollouts import RolloutPlan

GROWS: dict[str, Any] = {"ramp": 2, "ramp_shape": "linear"}


def distillation(model: Path, *, teacher: TeacherSettings, iterations: int = 3, **train: Any) -> RLRecipe:
    """Four answers, each to a prompt of its own, of 12 tokens and then 16."""
    recipe = tiny_run(model)
    return replace(
        recipe,
        rollouts=replace(
            recipe.rollouts, prompts=4, group=1, max_tokens=16, first_tokens=8, ramp=2, ramp_shape="linear"
        ),
        train=replace(recipe.train, teacher=teacher, **train),
        iterations=iterations,
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An autoregressive model, and the block-diffusion model that was made of it."""
    root = tmp_path_factory.mktemp("bases")
    base_folder(root / "ar", "Llama", "tiny-llama", vocab_size=320)
    convert_to_block_diffusion(root / "ar", root / "bd", block_size=4)
    return root / "ar", root / "bd"


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / ITERATIONS).read_text().splitlines()]


def test_an_adapted_base_comes_nearer_to_the_base(bases: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a reward that tells answers apart: every group of one answer teaches."""
    recipe = distillation(bases[1], teacher=TeacherSettings(), iterations=8)
    finish(recipe, tmp_path / "run")
    numbers = lines(tmp_path / "run")
    assert [line["answers_learned"] for line in numbers] == [4] * 8 and not any(line["idle"] for line in numbers)
    first, *_, last = [line["divergence"] for line in numbers]
    assert last < 0.9 * first
    rows = [row for part in rollout_rows(tmp_path / "run").values() for row in part]
    limits = {row["iteration"]: row["max_tokens"] for row in rows}
    assert [limits[number] for number in (0, 1, 7)] == [12, 16, 16]
    with pytest.raises(ValueError, match="trained to fill masks"):
        RolloutPlan.of(replace(recipe, model=str(tmp_path / "run" / "model")), ENGINE)
    again = replace(recipe, train=replace(recipe.train, teacher=TeacherSettings(model=str(bases[0]))))
    RolloutPlan.of(replace(again, model=str(tmp_path / "run" / "model")), ENGINE)


def test_a_run_that_goes_on_is_the_run(bases: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = LoraSettings(rank=4, alpha=4, dropout=0.0)
    recipe = distillation(bases[1], teacher=TeacherSettings(top_k=16), lora=lora)
    finish(recipe, tmp_path / "whole")
    finish(replace(recipe, iterations=2), tmp_path / "parts")
    finish(recipe, tmp_path / "parts", resume=True)
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["--teacher-reads", "text"], "trained to fill masks"),
        (["--teacher", "ledger-bd", "--teacher-reads", "text"], "does not read causally"),
        (["--nll", "0.1"], "leave the fields of objective out"),
        (["--recipe", "tiny-rl", "--teacher", "ledger-mbd"], "take a recipe without another, as tiny-opd"),
        (["--first-tokens", "4000"], "more than the limit"),
        (["--recipe", "tiny-rl", "--group", "1"], "no answers to compare"),
    ],
)
def test_what_no_teacher_can_honour_is_refused(
    changes: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (
        []
        if "--recipe" in changes
        else ["--recipe", "tiny-opd", *(["--teacher-reads", "text"] if "base" in changes else [])]
    )
    assert main([*own, *changes, "--local", "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert why in error and len(error.splitlines()) == 1
