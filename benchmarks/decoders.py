"""Benchmark every decoder beside a plain loop of the same method: the options, and the table."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from benchmarks.tables import markdown
from jobs.command_line import (
    DATA,
    DECODING,
    ENGINE,
    MODEL,
    JsonFile,
    MaxTokens,
    OwnThreads,
    command,
    command_text,
    names,
)
from mbd_core.files import check_new_file, write_json

if TYPE_CHECKING:
    from benchmarks.decoder_cases import MethodCase, ModelCase

ModelNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="Models whose name begins with one of these (default: all)", rich_help_panel=MODEL
    ),
]
Fixtures = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of model folders, for the families' models (default: random weights)",
        rich_help_panel=MODEL,
    ),
]
MethodNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="Methods whose name contains one of these (default: all)", rich_help_panel=DECODING
    ),
]
Requests = Annotated[
    int, typer.Option(help="Requests, and how many are decoded at once.", min=1, rich_help_panel=DATA)
]
Repeats = Annotated[int, typer.Option(help="Repetitions, whose median counts.", min=1, rich_help_panel=ENGINE)]


def run(
    context: typer.Context,
    *,
    models: ModelNames = None,
    fixtures: Fixtures = None,
    requests: Requests = 8,
    methods: MethodNames = None,
    max_tokens: MaxTokens = 64,
    repeats: Repeats = 5,
    threads: OwnThreads = None,
    json: JsonFile = None,
) -> int:
    """Every decoder beside a plain loop of the same method: tokens, forwards, and wall time.

    A row is one method on one model. The plain loop decodes one request after another without an engine; the engine
    decodes the same requests one after another, and all at once. The exit code is 1 if the engine's tokens are not the
    plain loop's (where they differ in float32, float64 decides). The models are the shipped ones, and one of each
    family at the size of the parity fixtures.
    """
    import torch

    from benchmarks.decoder_cases import model_cases
    from benchmarks.decoder_runs import COLUMNS, measure_method

    if json is not None:
        check_new_file(json)
    if threads is not None:
        torch.set_num_threads(threads)
    pairs = _pairs(model_cases(fixtures, num_requests=requests, max_tokens=max_tokens), models, methods)
    rows = []
    with tqdm(total=len(pairs) * repeats * 3, unit="run", desc="decoders", mininterval=1.0) as bar:
        for model, method in pairs:
            bar.set_postfix_str(f"{model.label}, {method.label}", refresh=False)
            rows.append(
                measure_method(model, method, max_tokens=max_tokens, repeats=repeats, tick=partial(bar.update, 1))
            )
    if json is not None:
        settings = {
            "command": command_text(context),
            "requests_at_once": requests,
            "repeats": repeats,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        write_json(json, {"settings": settings, "rows": rows})
    print(f"N = {requests} requests at once; medians of {repeats}\n\n{markdown(rows, COLUMNS)}")
    return _print_differences(rows)


def _pairs(cases: list[ModelCase], models: str | None, methods: str | None) -> list[tuple[ModelCase, MethodCase]]:
    """The models and methods that were asked for; `ValueError` if there are none."""
    begins = ("",) if models is None else tuple(names(models, "--models"))
    parts = [""] if methods is None else [name.lower() for name in names(methods, "--methods")]
    pairs = [
        (model, method)
        for model in cases
        if model.label.startswith(begins)
        for method in model.methods
        if any(part in name.lower() for part in parts for name in (method.name, method.label))
    ]
    if not pairs:
        raise ValueError(f"no model and method match --models {models} --methods {methods}")
    return pairs


def _print_differences(rows: list[dict[str, Any]]) -> int:
    """Which rows have other tokens than the plain loop; the exit code."""
    rounded = [_name(r) for r in rows if r["same_tokens_float64"] and not r["same_tokens"]]
    wrong = [_name(r) for r in rows if not r["same_tokens_float64"]]
    if rounded:
        print(f"\nother tokens by rounding alone (the same in float64): {'; '.join(rounded)}")
    print(f"\nsame tokens: {'no: ' + '; '.join(wrong) if wrong else 'yes'}")
    return 1 if wrong else 0


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['method']}"


main = command(run, "python -m benchmarks decoders")
