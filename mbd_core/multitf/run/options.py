"""The options that both training commands have beside the recipe's, and the command line of the one without Ray."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from mbd_core.multitf.config import Measuring, ShardingChoice, Sweeping, ValidationOptions, Written
from mbd_core.multitf.run.log_targets import PACKAGES
from mbd_core.options import (
    CLUSTER,
    OUTPUT,
    PANELS,
    Option,
    OptionField,
    flag,
    options_of,
    plain_type,
    value_of,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run lies on its workers, and what it writes."""

    sharding: Annotated[
        ShardingChoice,
        Option(
            "Weights, gradients and optimizer states of each worker: replicated, or sharded among them (FSDP2); auto: "
            "replicated if that fits its memory.",
            CLUSTER,
        ),
    ] = "auto"
    log_to: Annotated[
        str | None,
        Option(
            f"Log to these besides the run's own file: {', '.join(PACKAGES)}, or none.",
            OUTPUT,
            metavar="NAME,...",
            default="tensorboard, if it is installed",
        ),
    ] = None
    write: Annotated[
        Written,
        Option("What is written: the model, an adapter merged into it; or the adapter alone, as PEFT does.", OUTPUT),
    ] = "model"
    held_out: Annotated[ValidationOptions, Option("What the run measures on data that it does not learn from.")] = (
        ValidationOptions()
    )
    sweeping: Annotated[Sweeping, Option("What an engine beside the run decodes with its weights.")] = Sweeping()
    measuring: Annotated[Measuring, Option("What the run measures of itself.")] = Measuring()
    overwrite: Annotated[bool, Option("Replace a model folder of this project.", OUTPUT)] = False


def options_inside(kind: Any) -> list[OptionField]:
    """The options of a dataclass and of those that it holds, with their defaults."""
    items_by_field = (options_inside(item.hint) if is_dataclass(item.hint) else [item] for item in options_of(kind))
    return [item for items in items_by_field for item in items]


def build_options(kind: Any, named_values: Mapping[str, Any]) -> Any:
    """A dataclass, and those that it holds, of the values of `options_inside`."""
    values = {
        item.name: build_options(item.hint, named_values) if is_dataclass(item.hint) else named_values[item.name]
        for item in options_of(kind)
    }
    return kind(**values)


class CommandLine:
    """A command line of options as argparse reads it, for processes that torchrun starts without Typer."""

    def __init__(self, program: str, description: str, items: Sequence[OptionField]) -> None:
        self.items = items
        self.parser = argparse.ArgumentParser(
            program, usage="%(prog)s [OPTIONS]", description=description, allow_abbrev=False, exit_on_error=False
        )
        groups = {panel: self.parser.add_argument_group(panel) for panel in PANELS}
        for item in items:
            groups[item.option.panel or OUTPUT].add_argument(*_names(item), dest=item.name, **_declaration(item))

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The values of all options, by their names; `ValueError`, naming the option, for one that is refused."""
        try:
            namespace, unknown = self.parser.parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            raise ValueError(str(error).removeprefix("argument ")) from None
        if unknown:
            raise ValueError(f"no such option: {unknown[0]} (see --help)")
        return {item.name: value_of(item, getattr(namespace, item.name)) for item in self.items}


def _names(item: OptionField) -> list[str]:
    return flag(item).split("/")[:1]


def _declaration(item: OptionField) -> dict[str, Any]:
    """An option as argparse declares it."""
    kind, default = plain_type(item.hint), item.default
    default_text = item.option.default or (None if default in (None, False) else default)
    declaration: dict[str, Any] = {
        "help": item.option.help + ("" if default_text is None else f" (default: {default_text})").replace("%", "%%"),
        "default": default,
    }
    if kind is bool:
        return declaration | {"action": argparse.BooleanOptionalAction if "/" in flag(item) else "store_true"}
    reads = kind if kind in (int, float, Path) else str
    choices = "|".join(get_args(kind)) if get_origin(kind) is Literal else {int: "N", float: "X"}.get(kind, "TEXT")
    return declaration | {"type": reads, "metavar": item.option.metavar or choices}
