"""What a sweep runs: decoding configurations per model and method, out of a grid given as text."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from mbd_core.decoding.config import DecodingConfig, decoding_config

METHODS = ("single", "multi")
# They concern a second resident block, so under SingleBD they would only repeat the same run.
MULTI_ONLY = ("buffer_size", "tau_add", "tau_semi")
MULTI_LABELS = {"teacher_forcing": "MultiBD (training-free)", "multitf": "MBD", None: "MultiBD"}

Grid = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One decoding configuration of a model, under the method's name in the report."""

    method: str
    decoding: DecodingConfig


def parse_grid(text: str) -> Grid:
    """`"tau_m2t=0.7,0.9;buffer_size=2,4"` as field -> values, of the fields' types; `ValueError` for an unknown or
    repeated field, or a value of the wrong type."""
    types = get_type_hints(DecodingConfig)
    grid: Grid = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, equals, values = (p.strip() for p in part.partition("="))
        if name not in types:
            raise ValueError(f"unknown grid field '{name}'; known: {', '.join(types)}")
        if not equals or not values:
            raise ValueError(f"grid field '{name}' has no values; write {name}=VALUE,VALUE")
        if name in grid:
            raise ValueError(f"grid field '{name}' is given twice; write its values in one list")
        grid[name] = tuple(_value(name, v.strip(), types[name]) for v in values.split(","))
    return grid


def plan_variants(
    grid: Mapping[str, Sequence[Any]], methods: Sequence[str], *, defaults: Mapping[str, Any], block_size: int
) -> list[Variant]:
    """The grid's product for each method, over a model's `defaults` (its `generation_config.json`), without repeats.

    `single` is SingleBD (`buffer_size=1`; the grid's fields of a second block do not apply to it), `multi` is Block
    Buffer MultiBD, labelled by how the model was trained (`trained_with` in `defaults`). Raises `ValueError` for an
    unknown method, a configuration that cannot be, and `multi` with fewer than 2 slots.
    """
    variants: dict[Variant, None] = {}
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"unknown method '{method}'; known: {', '.join(METHODS)}")
        fields = {name: values for name, values in grid.items() if method == "multi" or name not in MULTI_ONLY}
        for values in itertools.product(*fields.values()):
            overrides = dict(zip(fields, values, strict=True))
            if method == "single":
                overrides["buffer_size"] = 1
            decoding = decoding_config(defaults, overrides, block_size=block_size)
            if method == "multi" and decoding.buffer_size < 2:
                raise ValueError("method 'multi' needs buffer_size of at least 2; add buffer_size=4 to the grid")
            variants[Variant(method=_label(method, defaults), decoding=decoding)] = None
    return list(variants)


def _label(method: str, defaults: Mapping[str, Any]) -> str:
    if method == "single":
        return "SingleBD"
    trained_with = defaults.get("trained_with")
    if trained_with not in MULTI_LABELS:
        known = ", ".join(name for name in MULTI_LABELS if name)
        raise ValueError(f"generation_config.json: unknown trained_with={trained_with!r}; known: {known}")
    return MULTI_LABELS[trained_with]


def _value(name: str, text: str, kind: Any) -> Any:
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"grid value {name}={text} is not {wanted}") from None
