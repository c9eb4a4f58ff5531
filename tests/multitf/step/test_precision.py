"""The precision that a run computes in: what was asked for, or what the device has arithmetic for."""

from dataclasses import replace

import pytest
import torch

from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, with_precision
from mbd_core.multitf.run.beginning import prepare
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step import compute as precision
from mbd_core.multitf.step.compute import compute_precision
from mbd_core.multitf.step.trainer import Trainer


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_cpu_computes(monkeypatch: pytest.MonkeyPatch, supported: bool, expected: str) -> None:
    instructions = {"architecture": "x86_64", "avx512_bf16": supported, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)  # emulated counts there
    assert compute_precision("auto", torch.device("cpu")) == expected


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_gpu_computes(monkeypatch: pytest.MonkeyPatch, supported: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    assert compute_precision("auto", torch.device("cuda")) == expected


def test_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "computes_bfloat16", lambda device: pytest.fail("nothing is to be decided"))
    assert compute_precision("float32", torch.device("cpu")) == "float32"
    assert compute_precision("bfloat16", torch.device("cpu")) == "bfloat16"


def test_recipes_leave_it_to_the_device() -> None:
    assert TrainConfig(steps=1, batch_size=1, lr=1.0).precision == "auto"
    assert {recipe.train.precision for recipe in RECIPES.values()} == {"auto"}


@pytest.mark.parametrize("supported", [True, False])
def test_a_step_computes_in_it(tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(precision, "computes_bfloat16", lambda device: supported)
    recipe = with_precision(tiny_recipe, "auto")
    model, _, examples = prepare(StartingPoint.read(recipe))
    trainer = Trainer(model, examples, recipe.states, replace(recipe.train, batch_size=1))
    autocast = []
    model.register_forward_hook(lambda *_: autocast.append(torch.is_autocast_enabled("cpu")))
    trainer.step()
    assert trainer.precision == ("bfloat16" if supported else "float32")
    assert autocast == [supported]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
