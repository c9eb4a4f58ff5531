"""Work in bfloat16 on a CPU that emulates it is begun as asked, and says once that it will be slow."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.recipes.recipe import TrainingRecipe, with_precision
from mbd_core.multitf.run.beginning import prepare
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops import machine
from mbd_core.ops.machine import warn_of_emulation
from mbd_core.serving.tokens.load import load_engine

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False])
def emulates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether this machine only emulates bfloat16."""
    instructions = {"architecture": "x86_64", "avx512_bf16": not request.param, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    warn_of_emulation.cache_clear()
    yield request.param
    warn_of_emulation.cache_clear()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said. Ray changes the handlers of a process's logs, so that they may hold a line twice."""
    said: list[str] = []
    monkeypatch.setattr(machine.LOGGER, "warning", said.append)
    return said


def test_an_engine_says_it(emulates: bool, tiny_model_dir: Path, warnings: list[str]) -> None:
    small = EngineConfig(max_rows=1, num_pages=16)
    load_engine(tiny_model_dir, small, device=CPU).close()
    load_engine(tiny_model_dir, replace(small, dtype="float32"), device=CPU).close()
    assert not warnings
    load_engine(tiny_model_dir, replace(small, dtype="bfloat16"), device=CPU).close()
    load_engine(tiny_model_dir, replace(small, dtype="bfloat16"), device=CPU).close()
    assert len(warnings) == emulates
    assert all("name float32 or auto in new runs" in warning for warning in warnings)


def test_a_trainer_says_it(emulates: bool, tiny_recipe: TrainingRecipe, warnings: list[str]) -> None:
    for precision in ("auto", "float32"):
        train_once(with_precision(tiny_recipe, precision))
    assert not warnings
    for _ in range(2):
        train_once(with_precision(tiny_recipe, "bfloat16"))
    assert len(warnings) == emulates


def train_once(recipe: TrainingRecipe) -> None:
    model, _, examples = prepare(StartingPoint.read(recipe))
    Trainer(model, examples, recipe.states, recipe.train).step()
