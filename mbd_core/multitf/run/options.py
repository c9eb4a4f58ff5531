"""The options of both training commands: `jobs/train_multitf.py` on Ray, `python -m mbd_core.multitf.run` without.

`recipes.recipe.with_options` takes what they change in a recipe.
"""

from pathlib import Path
from typing import Annotated

import typer

from mbd_core.multitf.config import AttentionChoice, ExpertsCut, Precision, ShardingChoice
from mbd_core.multitf.run.log_targets import PACKAGES
from mbd_core.options import CLUSTER, DATA, MODEL, OUTPUT

FittedNoise = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Mask ratios as research alignment measured and wrote them, instead of the recipe's noise-schedule.",
        rich_help_panel=DATA,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Updates, if not the recipe's; the schedule shrinks with them.",
        rich_help_panel=MODEL,
    ),
]
PrecisionName = Annotated[
    Precision,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16, or auto: bfloat16 where all workers compute it, else float32.",
        rich_help_panel=MODEL,
    ),
]
Sharding = Annotated[
    ShardingChoice,
    typer.Option(
        "--sharding",
        help="Weights, gradients and optimizer states of each worker: replicated, or sharded among them (FSDP2); "
        "auto: replicated if that fits its memory.",
        rich_help_panel=CLUSTER,
    ),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Samples, or with --pack training sequences, a worker computes at once.",
        show_default="the recipe's",
        rich_help_panel=MODEL,
    ),
]
Pack = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Short samples share training sequences, up to N tokens of samples in each.",
        show_default="the recipe's: none share one",
        rich_help_panel=MODEL,
    ),
]
ComputeAgain = Annotated[
    bool | None,
    typer.Option(
        "--activation-checkpointing/--no-activation-checkpointing",
        help="Keep each layer's input alone, and compute the layer again in the backward pass.",
        show_default="the recipe's",
        rich_help_panel=MODEL,
    ),
]
AttentionName = Annotated[
    AttentionChoice | None,
    typer.Option(
        metavar="NAME",
        help="flex (a block mask, on GPUs), dense, or auto: flex on a GPU.",
        show_default="the recipe's",
        rich_help_panel=MODEL,
    ),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the layers (torch.compile); the first steps take minutes then.",
        show_default="the recipe's",
        rich_help_panel=MODEL,
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="RANK",
        help="Train an adapter of this rank, merged into the model that is written.",
        show_default="the recipe's",
        rich_help_panel=MODEL,
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Workers that share their samples and every layer, each with its part of it.",
        show_default="1",
        rich_help_panel=CLUSTER,
    ),
]
CutExperts = Annotated[
    ExpertsCut | None,
    typer.Option(
        help="How tensor-parallel workers share experts: whole ones, or a part of each one's width.",
        show_default="expert",
        rich_help_panel=CLUSTER,
    ),
]
LogTo = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help=f"Log to these besides losses.jsonl: {', '.join(PACKAGES)}, or none.",
        show_default="tensorboard, if it is installed",
        rich_help_panel=OUTPUT,
    ),
]
