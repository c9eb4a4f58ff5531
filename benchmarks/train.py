"""Benchmark the shared clean stream of MultiTF against a sequence for each layout: measured here, or counted."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from benchmarks.tables import markdown
from jobs.command_line import DATA, ENGINE, MODEL, OUTPUT, JsonFile, OwnThreads, command, command_text, numbers
from mbd_core.files import check_new_file, write_json
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.recipes.shipped import TINY_MODEL

if TYPE_CHECKING:
    import torch

    from mbd_core.models.decoder import Decoder

MODELS = {"tiny": TINY_MODEL, **SHAPES}
COUNTED = {
    "max_group": "G",
    "num_random": "N",
    "layouts": "layouts n",
    "length": "length",
    "token_ratio": "2n / (n + 1)|.2f",
    "separate_dense_tflop": "separate, dense|.4g",
    "shared_dense_tflop": "shared, dense|.4g",
    "separate_flex_tflop": "separate, flex|.4g",
    "shared_flex_tflop": "shared, flex|.4g",
    "dense_gain": "gain, dense|.2f",
    "flex_gain": "gain, flex|.2f",
}

Models = Annotated[
    str,
    typer.Option(
        metavar="SHAPE,...", help=f"Shapes, with random weights: {', '.join(MODELS)}.", rich_help_panel=MODEL
    ),
]
Layouts = Annotated[
    str,
    typer.Option(
        metavar="G:N,...", help="Largest noise-groups, each with a number of random layouts.", rich_help_panel=DATA
    ),
]
Length = Annotated[str, typer.Option(metavar="N,...", help="Tokens of a sample.", rich_help_panel=DATA)]
Count = Annotated[bool, typer.Option("--count", help="Count operations instead of measuring.", rich_help_panel=OUTPUT)]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Count the padding of batches of this prepared data, with --pack and without, instead of measuring.",
        rich_help_panel=DATA,
    ),
]
Pack = Annotated[
    str, typer.Option(metavar="N,...", help="With --data: tokens of samples that are packed.", rich_help_panel=DATA)
]
Batch = Annotated[int, typer.Option(help="With --data: samples of a step.", min=1, rich_help_panel=DATA)]
AtOnce = Annotated[
    str,
    typer.Option(
        "--micro-batch", metavar="N,...", help="With --data: sequences computed at once.", rich_help_panel=DATA
    ),
]
Repeats = Annotated[int, typer.Option(help="Timed steps of each, in turn.", min=1, rich_help_panel=ENGINE)]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda (default: the GPU if there is one)", rich_help_panel=ENGINE)
]


def run(
    context: typer.Context,
    *,
    model: Models = "tiny,sdar-50m",
    layouts: Layouts = "2:0,2:2,4:2,4:3",
    length: Length = "128",
    count: Count = False,
    data: Data = None,
    pack: Pack = "2048",
    batch: Batch = 32,
    micro_batch: AtOnce = "1,4",
    repeats: Repeats = 3,
    device: Device = None,
    threads: OwnThreads = None,
    json: JsonFile = None,
) -> None:
    """Samples a second and peak memory of one training sequence with a shared clean stream, and of separate ones.

    Measured is forward and backward of one sample, both ways in turn, in float32; on a CPU in seconds of the
    processor; and what it gains that the last layer's MLP runs on labelled tokens alone. --count counts the forward's
    operations instead, also of models that fit on no machine here: those of dense attention, and of FlexAttention's
    blocks. --data counts the padding of batches, in the shapes' blocks.
    """
    import torch

    from benchmarks.step_rows import device_name, usable_device
    from benchmarks.training_cost import COLUMNS, count_row, measure_row
    from mbd_core.multitf.states.mask import TrainingAttention

    if json is not None:
        check_new_file(json)
    pairs = [_layouts(text) for text in layouts.split(",")]
    lengths = numbers(length, "--length")
    shapes = model.split(",")
    for name in shapes:
        if name not in MODELS:
            raise ValueError(f"--model {name} must be one of {', '.join(MODELS)}")
        for tokens in lengths:
            if tokens % MODELS[name].block_size:
                raise ValueError(
                    f"--length {tokens} is no whole number of {name}'s blocks of {MODELS[name].block_size}"
                )
    if threads is not None:
        torch.set_num_threads(threads)
    cases = [(n, g, tokens) for tokens in lengths for g, n in pairs]
    rows: list[dict[str, Any]] = []
    if data is not None:
        rows = padding_rows(shapes, data, numbers(micro_batch, "--micro-batch"), numbers(pack, "--pack"), batch)
        shapes = []
    elif not count:
        place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        attention = TrainingAttention("auto", place)
        print(f"{device_name(place)}, {torch.get_num_threads()} threads, {attention.describe()}; {repeats} steps each")
    for name in shapes:
        config = MODELS[name]
        if count:
            found = [count_row(config, max_group=g, num_random=n, length=tokens) for n, g, tokens in cases]
            print(f"\n{name}: TFLOP of one sample's forward\n\n{markdown(found, COUNTED)}")
        else:
            measure = partial(measure_row, random_model(name, place), attention, repeats=repeats)
            bar = tqdm(cases, unit="row", desc=name, mininterval=1.0)
            found = [measure(max_group=g, num_random=n, length=tokens) for n, g, tokens in bar]
            print(f"\n{name}: forward and backward of one sample of {length} tokens\n\n{markdown(found, COLUMNS)}")
        rows += [{"model": name, **row} for row in found]
    if json is not None:
        write_json(json, {"settings": {"command": command_text(context)}, "rows": rows})


def padding_rows(
    shapes: list[str], data: Path, at_once: list[int], packs: list[int], batch_size: int
) -> list[dict[str, Any]]:
    """The padding of prepared data in the blocks of each shape, which is printed too."""
    from benchmarks.training_cost import PADDING_COLUMNS as PADDING
    from benchmarks.training_cost import padding_row
    from mbd_core.multitf.data.prepared import PreparedExamples

    rows, sizes = [], list(product(at_once, packs))
    for name in shapes:
        config = MODELS[name]
        lengths = PreparedExamples(data, block_size=config.block_size, max_length=config.max_positions).lengths
        found = [padding_row(lengths, batch_size=batch_size, micro_batch=n, pack=tokens) for n, tokens in sizes]
        print(f"\n{name}: {len(lengths)} samples in blocks of {config.block_size}, {batch_size} a step\n")
        print(markdown(found, PADDING))
        rows += [{"model": name, **row} for row in found]
    return rows


def random_model(name: str, device: torch.device) -> Decoder:
    """A shape with random weights, in float32, ready to train."""
    from mbd_core.models.decoder import Decoder, init_weights

    model = Decoder(MODELS[name]).to(device)
    init_weights(model, seed=0)
    return model.train()


def _layouts(text: str) -> tuple[int, int]:
    group, mark, number = text.partition(":")
    if not (mark and group.isdecimal() and number.isdecimal() and int(group) >= 2):
        raise ValueError(f"--layouts {text} must be G:N, a group size of at least 2 and a number of random layouts")
    return int(group), int(number)


main = command(run, "python -m benchmarks train")
