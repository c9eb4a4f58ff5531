"""The decoding configurations of a sweep: a grid over the fields of named methods.

A method is a name with decoding fields, from `decoding.methods` or defined by the user as JSON. A grid field replaces
the field's value in every method to which it applies.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.batch.rows import config_text
from mbd_core.decoding.blocks.config import FIELDS_WITH, DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import MULTI, NAMED_METHODS, SINGLE, MethodFields
from mbd_core.field_texts import field_at, value_of
from mbd_core.fields import leaves_of
from mbd_core.json_text import merge_paths, parse_json

Grid = dict[str, tuple[Any, ...]]
Methods = dict[str, MethodFields]

DEFAULT_SLOTS = 4  # the buffer size of `multi` if the model's author recommends SingleBD
# These fields have no effect with one slot, so varying them would repeat the same run.
MULTI_ONLY = ("buffer_size", "tau_add", "tau_semi")
TRAINING_FREE = "MultiBD (training-free)"
MULTI_LABELS: dict[str | None, str] = {
    "teacher_forcing": TRAINING_FREE,
    "dmax_oput": TRAINING_FREE,  # DMax's own training: one noisy block after clean blocks
    "multitf": "MBD",
    "d2f": "MultiBD",  # trained for several blocks, but not by MultiTF
    "d2f_block_causal": "MultiBD",
    None: "MultiBD",
}
"""The name of decoding several blocks, by the training of the model: its recipe's `trained_with`."""
LIKELIHOOD = "log-likelihood"
"""The method of tasks that compare log-likelihoods, which no decoder changes: one configuration of a model."""
LABELS = ("SingleBD", *dict.fromkeys(MULTI_LABELS.values()), LIKELIHOOD)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One decoding configuration of a model; `method` is the method's name in the report. `decoding` is `None` for an
    endpoint that chooses its own."""

    method: str
    decoding: DecodingConfig | None

    @property
    def config(self) -> str:
        """The configuration as JSON."""
        return config_text(self.decoding)


def parse_grid(text: str) -> Grid:
    """Parse `"tau_m2t=0.7,0.9;t2t.tau=0.3,0.5"` into field -> values of the field's type (`none`: not set).

    Raises `ValueError` for an unknown or repeated field, or a value that the field refuses.
    """
    grid: Grid = {}
    fields = {item.path: item for item in leaves_of(DecodingConfig)}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, equals, values = (p.strip() for p in part.partition("="))
        item = field_at(name, fields, "grid")
        if item.schema.get("type") == "array":
            raise ValueError(f"grid field '{name}' is a list; give it with --method NAME=JSON")
        if not equals or not values:
            raise ValueError(f"grid field '{name}' has no values; write {name}=VALUE,VALUE")
        if name in grid:
            raise ValueError(f"grid field '{name}' is given twice; write its values in one list")
        texts = [text.strip() for text in values.split(",")]
        grid[name] = tuple(value_of(item, None if t == "none" else t, f"grid value {name}", "=") for t in texts)
    return grid


def parse_methods(definitions: Iterable[str]) -> Methods:
    """`NAMED_METHODS` and the parsed definitions `NAME={"t2t": {"tau": 0.4}}`; `ValueError` names a malformed
    definition.

    `plan_variants` checks the fields themselves, for each model.
    """
    methods = dict(NAMED_METHODS)
    for item in definitions:
        name, equals, text = (p.strip() for p in item.partition("="))
        if not (name and equals) or set(name) & set(",|") or not name.isprintable():
            raise ValueError(f"--method {item} must be NAME=JSON, the name printable, without a comma or |")
        if name in methods or name in LABELS:
            raise ValueError(f"--method {name}: this name is taken; choose another")
        try:
            fields = parse_json(text, text)
        except ValueError as error:
            raise ValueError(f"--method {name}: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"--method {name}: {text} must be a JSON object of decoding fields")
        methods[name] = fields
    return methods


def plan_variants(
    grid: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    *,
    methods: Methods = NAMED_METHODS,
    defaults: Mapping[str, Any],
    block_size: int,
) -> list[Variant]:
    """All combinations of the grid for each named method, without repeats.

    A method's fields replace the model's `defaults` (its `generation_config.json`). `single` is SingleBD; `multi` is
    Block Buffer MultiBD with the model's own buffer_size (4 if that is 1), and its label says how the model was
    trained (`trained_with` in `defaults`). Raises `ValueError` for an unknown method, a configuration that cannot be
    honoured, a grid field that concerns none of the methods, and `multi` with one slot.
    """
    variants: dict[Variant, None] = {}
    unused_axes = set(grid)
    for name in names:
        if name not in methods:
            raise ValueError(f"unknown method '{name}'; known: {', '.join(methods)}")
        base = dict(methods[name])
        if base.get("canvas") is None and base.get("causal") is None:
            # the method takes over the revision in the model's defaults, so that a grid can vary it
            base = {part: defaults[part] for part in ("t2t", "soft") if defaults.get(part) is not None} | base
        if name == MULTI and defaults.get("buffer_size", 1) == 1:
            base["buffer_size"] = DEFAULT_SLOTS
        axes = {path: values for path, values in grid.items() if _concerns(path, base)}
        unused_axes -= axes.keys()
        for values in itertools.product(*axes.values()):
            overrides = merge_paths(base, dict(zip(axes, values, strict=True)))
            try:
                decoding = decoding_config(defaults, overrides, block_size=block_size)
            except ValueError as error:
                raise ValueError(str(error) if name in (SINGLE, MULTI) else f"method '{name}': {error}") from None
            if name == MULTI and decoding.buffer_size < 2:
                raise ValueError("method 'multi' needs buffer_size of at least 2; for 1 there is method 'single'")
            variants[Variant(method=_label(name, defaults), decoding=decoding)] = None
    for path in sorted(unused_axes):
        part = path.partition(".")[0]
        hint = f"""; define one: --method NAME='{{"{part}": {{}}}}'""" if "." in path else ""
        hint = "; it needs a method with several slots, such as multi" if path in MULTI_ONLY else hint
        raise ValueError(f"grid field '{path}' concerns none of the methods {', '.join(names)}{hint}")
    return list(variants)


def _concerns(path: str, base: MethodFields) -> bool:
    """Whether a grid field has a meaning under a method with these fields."""
    *parts, last = path.split(".")
    holder: Any = base
    for part in parts:
        holder = holder.get(part) if isinstance(holder, Mapping) else None
        if not isinstance(holder, Mapping):
            return False
    if parts:
        return True
    if base.get("canvas") is not None:
        return last in FIELDS_WITH["canvas"]
    if base.get("causal") is not None:
        return last in FIELDS_WITH["causal"]
    return base.get("buffer_size") != 1 or last not in MULTI_ONLY


def _label(name: str, defaults: Mapping[str, Any]) -> str:
    if name == SINGLE:
        return "SingleBD"
    if name != MULTI:
        return name
    trained_with = defaults.get("trained_with")
    if trained_with not in MULTI_LABELS:
        labels = ", ".join(label for label in MULTI_LABELS if label)
        raise ValueError(f"generation_config.json: unknown trained_with={trained_with!r}; known: {labels}")
    return MULTI_LABELS[trained_with]
