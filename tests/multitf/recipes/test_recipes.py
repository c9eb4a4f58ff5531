"""Recipes by name, and what a command changes in one."""

from dataclasses import replace

import pytest
import torch

from mbd_core.multitf.recipes.by_name import RECIPES, recipe_named
from mbd_core.multitf.recipes.recipe import as_recorded, other_settings, shortened, start_line, with_precision


def test_an_unknown_recipe_names_the_known_ones() -> None:
    assert recipe_named("tiny-bd") is RECIPES["tiny-bd"]
    with pytest.raises(ValueError, match="tiny-mbd, tiny-tf"):
        recipe_named("nope")


def test_a_shortened_recipe_takes_only_the_samples_it_consumes() -> None:
    full = RECIPES["tiny-bd-b8"]
    short = shortened(replace(full, base="somewhere"), 35)
    assert short.data.per_task * 2 == 35 * full.train.batch_size
    assert short.train.steps == 35 and short.train.warmup == round(full.train.warmup * 35 / full.train.steps)
    assert shortened(full, full.train.steps).data == full.data
    assert shortened(full, 1).data.per_task == 4000


def test_the_start_line_says_the_precision_and_the_attention() -> None:
    recipe = with_precision(shortened(RECIPES["tiny-mbd"], 30), "float32")
    line = "recipe tiny-mbd: 30 steps of 24 samples in float32, 2 workers, 360 problems of each task"
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert start_line(recipe, device=cpu, num_workers=2) == f"{line}, dense attention (flex needs a GPU)"
    assert start_line(recipe, device=gpu, num_workers=2) == f"{line}, flex attention"


def test_a_run_of_before_tasks_could_be_chosen_goes_on() -> None:
    wanted = as_recorded(RECIPES["tiny-mbd"])
    recorded = as_recorded(RECIPES["tiny-mbd"])
    del recorded["data"]["tasks"]
    recorded["source"] = "the name that a document had then"
    assert not other_settings(recorded, wanted)
    wanted["data"]["tasks"] = ["gsm-mini"]
    assert other_settings(recorded, wanted)
