"""A recipe by its name or from a file, and what files and options change in it."""

import json
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import flag
from mbd_core.fields import leaves_of
from mbd_core.multitf.config import LoraSettings, TeacherSettings
from mbd_core.multitf.data.prepared import PreparedData
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.choice import ChosenRecipe, RecipeChoice, choose_recipe, with_changes
from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded, shortened

TINY = RECIPES["tiny-mbd"]


def choose(changes: Any = None, **options: Any) -> ChosenRecipe:
    return choose_recipe(
        RecipeChoice(**options),
        changes or {},
        default="tiny-mbd",
        named_base=lambda name: name,
        named_data=lambda path: PreparedData(path, "digest"),
    )


def test_every_recipe_as_it_stands_has_no_changes() -> None:
    for name, recipe in RECIPES.items():
        assert choose(recipe=name) == ChosenRecipe(recipe, ())


def test_every_field_of_a_recipe_has_an_option_or_is_a_dataclass() -> None:
    paths = {item.path for item in leaves_of(TrainingRecipe)}
    read_otherwise = {"name", "base", "model", "source", "architectures", "states.bounds.fitted"}

    def check(instance: Any, path: str) -> None:
        for field in fields(instance):
            value, name = getattr(instance, field.name), f"{path}{field.name}"
            if is_dataclass(value):
                check(value, f"{name}.")
            else:
                assert name in paths | read_otherwise, name

    check(replace(TINY, train=replace(TINY.train, lora=LoraSettings(), teacher=TeacherSettings())), "")
    flags = [flag(item) for kind in (TrainingRecipe, RecipeChoice) for item in leaves_of(kind)]
    assert len({*flags}) == len(flags)


def test_a_file_and_the_command_line_change_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "recipe: tiny-bd\nbase: tiny-mbd\ntrain: {lr: 1e-4, betas: [0.8, 0.9], lora: {rank: 4, dropout: 0}}\n"
        "states: {bounds: {t_high: 0.5}}\ngeneration: {tau_add: 0.3}\n"
    )
    chosen = choose({"train": {"lr": 3e-4}, "max_length": 200}, config=tmp_path / "my.yaml")
    old = RECIPES["tiny-bd"]
    assert chosen.recipe == replace(
        old,
        base="tiny-mbd",
        max_length=200,
        train=replace(old.train, lr=3e-4, betas=(0.8, 0.9), lora=LoraSettings(rank=4, alpha=4, dropout=0)),
        states=replace(old.states, bounds=replace(old.states.bounds, t_high=0.5)),
        generation=old.generation | {"tau_add": 0.3},
    )
    assert f"train.lr: 0.0003, not {old.train.lr}" in chosen.changes and len(chosen.changes) == 7
    assert choose(config=tmp_path / "my.yaml", recipe="tiny-tf").recipe.name == "tiny-tf"


def test_a_recorded_recipe_is_a_recipe_again(tmp_path: Path) -> None:
    for name in ("tiny-bd-b8", "tiny-mbd", "ledger-mbd"):
        chosen = choose(config=model_folder(name) / "recipe.json")
        assert chosen.changes == () and chosen.recipe == replace(
            RECIPES[name], train=replace(RECIPES[name].train, precision="bfloat16"), source=chosen.recipe.source
        )
    recipe = replace(RECIPES["LLaDA2-Mini-DMax-ranges"], data=PreparedData("/d", "x"))
    (tmp_path / "recipe.json").write_text(json.dumps(as_recorded(recipe)))
    assert choose(config=tmp_path / "recipe.json").recipe == recipe


def test_steps_shrink_the_schedule_unless_it_is_given() -> None:
    assert with_changes(TINY, {"train": {"steps": 40}}) == shortened(TINY, 40)
    assert with_changes(TINY, {"train": {"steps": 40, "warmup": 7}}).train.warmup == 7
    more = with_changes(TINY, {"train": {"steps": 40, "batch_size": 100}, "data": {"seed": 9}})
    assert more.data == replace(TINY.data, per_task=2000, seed=9)  # type: ignore[type-var]


def test_a_recipe_of_ones_own_is_in_a_python_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom mbd_core.multitf.recipes.by_name import RECIPES\n"
        "MINE = replace(RECIPES['tiny-mbd'], name='mine')\nOTHER = 3\n"
    )
    assert choose(recipe=f"{file}:MINE") == ChosenRecipe(replace(TINY, name="mine"), ())
    for text, named in ((f"{file}:OTHER", "OTHER"), (str(file), f"{file}:NAME"), (f"{tmp_path}/no.py:A", "cannot be")):
        with pytest.raises(ValueError, match="--recipe") as error:
            choose(recipe=text)
        assert named in str(error.value)
    file.write_text("1 / 0")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        choose(recipe=f"{file}:MINE")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train: {lrate: 1}", "'train.lrate'"),
        ("train: {optimiser: adamw}", "is 'optimizer' meant"),
        ("train: {lr: high}", "train.lr="),
        ("train: {steps: 0}", "train.steps=0"),
        ("train: {steps: many}", "train.steps="),
        ("train: {betas: [0.9]}", "betas="),
        ("train: 3", "train=3"),
        ("train: {lora: 8}", "train.lora=8"),
        ("train: {lora: {rank: 0}}", "train.lora.rank=0"),
        ("states: {noise: linear}", "'states.noise'"),
        ("states: {schedule: sinus}", "states.schedule="),
        ("states: {bounds: {t_low: 2}}", "states.bounds.t_low=2"),
        ("states: {bounds: {slots: [[0.1]]}}", "slots="),
        ("data: {tasks: [nothing]}", "data.tasks"),
        ("data: {path: x}", "data.digest"),
        ("recipe: nope", "'nope'"),
        ("recipe: 5", "'5'"),
        ("base: 5", "base="),
        ("max_length: 0", "max_length=0"),
        ("[1]", "must be an object"),
        ("a: [", "no YAML"),
        ("train: {lr: 1}\ntrain: {steps: 2}", "no YAML: 'train' stands twice"),
        ("[" * 5000, "nested too deeply"),
        ("{name: a, states: {}, train: {}}", "is missing"),
    ],
)
def test_what_a_file_gets_wrong_is_named(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ValueError, match="config") as error:
        choose(config=tmp_path / "my.yaml")
    assert named in str(error.value) and "\n" not in str(error.value)


def test_generated_and_prepared_data_do_not_mix() -> None:
    assert choose(data="/d").recipe.data == PreparedData("/d", "digest")
    with pytest.raises(ValueError, match="--data /d"):
        choose({"data": {"seed": 1}}, data="/d")
    assert asdict(TINY) == asdict(RECIPES["tiny-mbd"])
