"""The schema of training files allows what is read, and refuses what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jobs.train_multitf import main
from mbd_core.multitf.config import LoraSettings
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.choice import config_schema, with_changes
from mbd_core.multitf.recipes.recipe import as_recorded

SCHEMA = Draft202012Validator(config_schema())


def test_every_recipe_is_a_file_of_it() -> None:
    Draft202012Validator.check_schema(SCHEMA.schema)
    for recipe in RECIPES.values():
        assert not list(SCHEMA.iter_errors(as_recorded(recipe)))
        adapted = replace(recipe, train=replace(recipe.train, lora=LoraSettings(quantize_base="nf4"), compile=False))
        assert not list(SCHEMA.iter_errors({**as_recorded(adapted), "recipe": "tiny-mbd", "data": "a/folder"}))


@pytest.mark.parametrize(
    ("values", "is_right"),
    [
        ({"train": {"lr": 5e-6, "batch_size": 64, "lora": {"rank": 16}}}, True),
        ({"states": {"max_group": 3, "schedule": "sorted_uniform", "bounds": {"t_high": 0.9}}}, True),
        ({"train": {"micro_batch": None}}, True),
        ({"train": {"lerning_rate": 1.0}}, False),
        ({"train": {"steps": 0}}, False),
        ({"train": {"clip": 0.0}}, False),
        ({"train": {"optimizer": "sgd"}}, False),
        ({"train": {"lora": {"rank": "big"}}}, False),
        ({"train": {"betas": [0.9, 2.0]}}, False),
        ({"states": {"blocksize": 4}}, False),
        ({"max_length": 1.5}, False),
    ],
)
def test_it_allows_what_is_read(values: dict[str, Any], is_right: bool) -> None:
    assert SCHEMA.is_valid(values) == is_right
    if is_right:
        with_changes(RECIPES["tiny-mbd"], values)
        return
    with pytest.raises(ValueError, match=next(iter(values))):
        with_changes(RECIPES["tiny-mbd"], values)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == config_schema()
    rank = schema["$defs"]["LoraSettings"]["properties"]["rank"]
    assert rank["minimum"] == 1 and "description" in rank
