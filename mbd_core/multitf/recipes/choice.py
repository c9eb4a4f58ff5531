"""The recipe that a command trains: by its name or from a file, changed by a file and the command line.

    recipe: tiny-mbd        # a name, or FILE.py:NAME; without one the file is a whole recipe, as recipe.json is
    train: {lr: 1e-3, batch_size: 48}
    states: {max_group: 2, bounds: {t_high: 0.9}}

The file's fields are the fields of `TrainingRecipe` and of its parts. A command line may give the same fields, and
wins.
"""

import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from mbd_core.fields import DATA, MODEL, Flag, changed, configuration, load, schema_of
from mbd_core.json_text import differences, merge_fields
from mbd_core.multitf.config import BASE_TEACHER, check_schedule
from mbd_core.multitf.data.prepared import PreparedData
from mbd_core.multitf.recipes.by_name import recipe_named
from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded, shortened, with_fitted_noise
from mbd_core.storage.folder import Folder

FIELD = "recipe field"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
NAMED = {
    "recipe": {
        "type": "string",
        "description": "The recipe that is changed: a name, or FILE.py:NAME. Without one the file is a whole recipe.",
    },
    "data": {"type": "string", "description": "A folder or URL of prepared data, in place of an object."},
}
AnyRecipe = TypeVar("AnyRecipe")
Values = Mapping[str, Any]


@configuration(panel=MODEL)
class RecipeChoice:
    """The options that choose the recipe."""

    recipe: Annotated[str | None, Flag(metavar="NAME")] = None
    """The recipe to train: its name, or a recipe of your own as FILE.py:NAME (default: that of --config;
    without one, `mbd train` takes tiny-mbd)."""
    config: Annotated[Path | None, Flag(metavar="FILE", opened_by="job")] = None
    """A YAML or JSON file of changes in the recipe, or a whole recipe.json; options win over the file."""
    base: Annotated[str | None, Flag(metavar="MODEL", opened_by="workers")] = None
    """Start from this model instead of the recipe's: a shipped model's name, a model folder, or its URL."""
    data: Annotated[str | None, Flag(panel=DATA, metavar="DIR|URL", opened_by="workers")] = None
    """Train on the data that jobs/prepare_data.py wrote there, instead of the recipe's."""
    fitted_noise: Annotated[Path | None, Flag(panel=DATA, metavar="FILE", opened_by="job")] = None
    """Mask ratios as research alignment measured and wrote them, instead of the recipe's noise-schedule."""


@dataclass(frozen=True)
class ChosenRecipe:
    """The recipe to train, and its differences from the named recipe (`train.lr: 0.1, not 0.2`)."""

    recipe: TrainingRecipe
    changes: tuple[str, ...]


def choose_recipe(
    choice: RecipeChoice,
    changes: Values,
    *,
    default: str | None = None,
    named_base: Callable[[str], str],
    named_data: Callable[[str], PreparedData],
) -> ChosenRecipe:
    """The recipe of a command's options; `default` is the recipe if none is named.

    `named_base` finds a base or a teacher, `named_data` prepared data. Raises `ValueError`, one sentence, for a
    missing recipe, file or field, or a value that its field refuses.
    """
    values = {} if choice.config is None else read_config(choice.config)
    try:
        named_recipe, values = _recipe_and_changes(choice, values, default)
        values = merge_fields(values, changes)
        for name, value in (("base", choice.base), ("data", choice.data)):
            if value is not None:
                values[name] = value
        if choice.data is not None and "data" in changes:
            raise ValueError(f"--data {choice.data} is prepared data: leave out the options of generated data")
        recipe = named_recipe
        if isinstance(values.get("data"), str):
            recipe = replace(recipe, data=named_data(values.pop("data")))
        if isinstance(values.get("base"), str):
            recipe = replace(recipe, base=named_base(values.pop("base")))
        recipe = with_changes(recipe, values)
        check_schedule(recipe.train, values.get("train") or ())
        if (teacher := recipe.train.teacher) is not None and teacher.model != BASE_TEACHER:
            teacher = replace(teacher, model=named_base(teacher.model))
            recipe = replace(recipe, train=replace(recipe.train, teacher=teacher))
        if (lora := recipe.train.lora) is not None and lora.start is not None:
            lora = replace(lora, start=Folder.at(lora.start).location)
            recipe = replace(recipe, train=replace(recipe.train, lora=lora))
    except ValueError as error:
        if choice.config is None:
            raise
        raise ValueError(f"--config {choice.config}: {error}") from None
    if choice.fitted_noise is not None:
        recipe = with_fitted_noise(recipe, choice.fitted_noise)
    return ChosenRecipe(recipe, tuple(recipe_changes(named_recipe, recipe)))


def _recipe_and_changes(
    choice: RecipeChoice, values: Values, default: str | None
) -> tuple[TrainingRecipe, dict[str, Any]]:
    """The recipe that the command line or the file names, with the file's changes; or the file as a whole recipe."""
    values = dict(values)
    name = values.pop("recipe", None) if choice.recipe is None else choice.recipe
    if name is None and {"name", "states", "train"} <= values.keys():
        data = {"data": values.pop("data")} if isinstance(values.get("data"), str) else {}
        return load(TrainingRecipe, {"data": None, **values}, noun=FIELD), data
    values.pop("recipe", None)
    return find_recipe(name or default), values


def recipe_changes(named_recipe: TrainingRecipe, recipe: TrainingRecipe) -> list[str]:
    """The differences of a recipe from the named recipe."""
    pairs = differences(as_recorded(named_recipe), as_recorded(recipe))
    return [f"{name}: {new_value}, not {old_value}" for name, old_value, new_value in pairs]


def with_changes(recipe: TrainingRecipe, values: Values) -> TrainingRecipe:
    """The recipe with the given fields; fields inside its dataclasses come as objects.

    Fewer `steps` shrink the warm-up and the generated data (`shortened`), and an adapter's `rank` sets its `alpha`,
    unless these are given too. Raises `ValueError` naming an unknown or refused field.
    """
    train = values.get("train")
    if isinstance(train, Mapping):
        if "batch_size" in train:  # first: `shortened` counts the samples of a run
            recipe = changed(recipe, {"train": {"batch_size": train["batch_size"]}}, noun=FIELD)
        if "steps" in train:
            changed(recipe, {"train": {"steps": train["steps"]}}, noun=FIELD)  # raises for a bad value
            recipe = shortened(recipe, train["steps"])
        lora = train.get("lora")
        if isinstance(lora, Mapping) and "rank" in lora:
            values = merge_fields({"train": {"lora": {"alpha": lora["rank"]}}}, values)
    return changed(recipe, values, noun=FIELD)


def config_schema() -> dict[str, Any]:
    """The JSON Schema of `--config` files, for editors: every field of a recipe may be there, and no other."""
    schema = {name: value for name, value in schema_of(TrainingRecipe).items() if name != "required"}
    parts = {name: part | {"required": []} for name, part in schema["$defs"].items()}
    data = schema["properties"]["data"] | {"anyOf": [*schema["properties"]["data"]["anyOf"], NAMED["data"]]}
    properties = schema["properties"] | {"recipe": NAMED["recipe"], "data": data}
    heads = {"$schema": DIALECT, "title": "A training's --config file"}
    return schema | heads | {"$defs": parts, "properties": properties}


def find_recipe(name: str | None) -> TrainingRecipe:
    """A recipe by its name, or as FILE.py:NAME. Raises `ValueError` if there is none."""
    if name is None:
        raise ValueError("no recipe is named: give --recipe NAME")
    if not isinstance(name, str) or ".py" not in name:
        return recipe_named(str(name))
    return recipe_in_file(name, TrainingRecipe)


def recipe_in_file(name: str, kind: type[AnyRecipe]) -> AnyRecipe:
    """A recipe of this kind in a user's module, as FILE.py:NAME. Raises `ValueError` if there is none."""
    path, _, variable = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"--recipe {name}: say which recipe of the file, as {name}:NAME")
    try:
        recipe = runpy.run_path(path).get(variable)
    except OSError as error:
        raise ValueError(f"--recipe {name}: {path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the user's file may raise anything
        raise ValueError(f"--recipe {name}: {path} fails: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, kind):
        raise ValueError(f"--recipe {name}: {path} has no {kind.__name__} of the name {variable}")
    return recipe


class _Loader(yaml.SafeLoader):
    """YAML that reads `1e-5` as a number and refuses an object with a name twice, as YAML 1.2 says."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:number]):
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} stands twice", key.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a YAML or JSON file. Raises `ValueError` naming a file that cannot be read or holds no object."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"--config {path} is nested too deeply to be read") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must be an object of recipe fields, as train: {{lr: 1e-4}}")
    return values
