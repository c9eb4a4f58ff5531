"""Train a recipe without Ray: `python -m mbd_core.multitf.run --recipe tiny-bd`, in this process alone, or in several:

    torchrun --nproc-per-node 4 -m mbd_core.multitf.run --recipe SDAR-8B-b32 --base DIR --data DIR

`jobs/train_multitf.py` trains the same recipes on a Ray cluster. Exit codes: 0 done, 1 the storage
failed, 2 bad input.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import fsspec
import torch
import typer
from tqdm import tqdm
from typer.exceptions import TyperException
from typer.main import get_command

from mbd_core.checkpoint.shipped import named_model
from mbd_core.files import check_writable, probe_folder
from mbd_core.multitf.config import AttentionChoice, ExpertsCut, Precision, Sharding, ShardingChoice
from mbd_core.multitf.data.encoding import error_sentence
from mbd_core.multitf.data.prepared import named_data
from mbd_core.multitf.recipes.by_name import RECIPES, recipe_named
from mbd_core.multitf.recipes.recipe import TrainingRecipe, start_line, with_options, with_precision
from mbd_core.multitf.run.checkpoints import Checkpoints, Curve
from mbd_core.multitf.run.log import RunLog
from mbd_core.multitf.run.log_targets import PACKAGES, chosen_targets
from mbd_core.multitf.run.loop import start, train
from mbd_core.multitf.run.preparation import (
    base_files,
    block_size_note,
    check_export,
    check_fit,
    check_room,
    export,
    join_export,
    planned_lines,
)
from mbd_core.multitf.step.compute import device_peak
from mbd_core.multitf.step.workers import Workers, torchrun_workers
from mbd_core.ops.machine import free_host_memory

SHOWN_STEPS = 50
"""The progress bar shows means over the last so many steps."""

Sharded = Annotated[
    ShardingChoice,
    typer.Option(help="Each worker's weights and states: replicated or sharded; auto: replicated if that fits."),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples, or packed sequences, a worker computes at once, instead of the recipe's."),
]
Pack = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Short samples share training sequences, up to N tokens of samples in each.",
        show_default="the recipe's: none share one",
    ),
]
Again = Annotated[
    bool | None,
    typer.Option(
        "--activation-checkpointing/--no-activation-checkpointing",
        help="Compute layers again in the backward pass, instead of as the recipe says.",
    ),
]
Attention = Annotated[
    AttentionChoice | None,
    typer.Option(help="A block mask (flex, on a GPU) or a dense one, instead of the recipe's; auto: flex on a GPU."),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the layers (torch.compile); the first steps take minutes then.",
        show_default="the recipe's",
    ),
]
Lora = Annotated[int | None, typer.Option(min=1, metavar="RANK", help="Train an adapter of this rank.")]
TensorParallel = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Workers that share their samples and every layer.")
]
CutExperts = Annotated[
    ExpertsCut | None, typer.Option(help="How tensor-parallel workers share experts: whole ones, or each one's width.")
]
LogTo = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help=f"Log to these besides losses.jsonl: {', '.join(PACKAGES)}, or none; it needs --checkpoints.",
        show_default="tensorboard, if it is installed",
    ),
]
Plan = Annotated[int | None, typer.Option(min=1, metavar="N", help="Print what N GPUs would need of memory, and end.")]


def run(
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(sorted(RECIPES))}.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Start from this shipped model or model folder, instead of the recipe's."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Train on the data that jobs/prepare_data.py wrote there.")
    ] = None,
    fitted_noise: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Mask ratios as python -m research alignment measured and wrote them."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates, instead of the recipe's; the schedule shrinks with them.")
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="auto: bfloat16 where the device computes it, else float32.")
    ] = "auto",
    sharding: Sharded = "auto",
    micro_batch: MicroBatch = None,
    pack: Pack = None,
    again: Again = None,
    attention: Attention = None,
    compile: Compiled = None,
    lora: Lora = None,
    tensor_parallel: TensorParallel = None,
    cut_experts: CutExperts = None,
    plan: Plan = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder to write.", show_default="out/RECIPE")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model folder of this project.")] = False,
    checkpoints: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Where checkpoints and losses.jsonl lie; if one is there, go on."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 500,
    log_to: LogTo = None,
) -> None:
    """Train a recipe without Ray: in this process, or in those that torchrun started."""
    chosen = starting_from(with_precision(recipe_named(recipe), precision), base, data)
    chosen = with_options(
        chosen, fitted_noise=fitted_noise, steps=steps, micro_batch=micro_batch, pack=pack, lora=lora,
        activation_checkpointing=again, attention=attention, compile=compile, tensor_parallel=tensor_parallel,
        cut_experts=cut_experts,
    )  # fmt: skip
    if plan is not None:
        check_fit(chosen)
        print("\n".join(planned_lines(chosen, sharding, num_workers=plan, device="GPU")))
        return
    folder = out or Path("out") / chosen.name
    target = checked_target(folder, overwrite=overwrite, checkpoints=checkpoints, every=every, log_to=log_to)
    check_fit(chosen)
    with torchrun_workers() as workers:
        asked = chosen.train.precision
        if workers.is_first and (note := block_size_note(chosen)):
            print(f"note: {note}")
        chosen = with_precision(chosen, workers.precision(chosen.train.precision))
        lies = check_device(chosen, sharding, workers)
        train_here(chosen, workers, lies, target, asked=asked)


def starting_from(recipe: TrainingRecipe, base: str | None, data: Path | None) -> TrainingRecipe:
    """The recipe with the model and the data that the command names; `ValueError` if there is no such."""
    if base is not None:
        recipe = replace(recipe, base=named_model(base))
    return recipe if data is None else replace(recipe, data=named_data(data))


@dataclass(frozen=True)
class Target:
    """Where a run writes."""

    folder: Path
    overwrite: bool
    checkpoints: str | None
    every: int
    log_targets: tuple[str, ...] | None


def checked_target(
    folder: Path, *, overwrite: bool, checkpoints: str | None, every: int, log_to: str | None
) -> Target:
    """Where a run writes; `ValueError` for what cannot be written, or logged to."""
    if log_to is not None and checkpoints is None:
        raise ValueError(f"--log-to {log_to} needs a folder for the run: name it with --checkpoints")
    log_targets = chosen_targets(log_to)
    check_local(folder, checkpoints)
    check_export(folder, overwrite=overwrite)
    return Target(folder, overwrite=overwrite, checkpoints=checkpoints, every=every, log_targets=log_targets)


def check_local(folder: Path, checkpoints: str | None) -> None:
    """Raise `ValueError` for a model folder at a URL, and for checkpoints that cannot be written here."""
    if checkpoints is not None and not checkpoints.strip():
        raise ValueError("--checkpoints is empty; name a folder or a URL, or leave it out")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(folder)):
        raise ValueError(f"{folder} is a URL: this command writes here; jobs/train_multitf.py writes to URLs")
    if checkpoints is not None and "://" in checkpoints:
        check_url(checkpoints)
    elif checkpoints is not None:
        if Path(checkpoints).is_file():
            raise ValueError(f"{checkpoints} is a file; give a folder for checkpoints")
        check_writable(Path(checkpoints), Path(checkpoints))


def check_url(location: str) -> None:
    """Make a file there and remove it; `ValueError` if that fails."""
    try:
        system, path = fsspec.core.url_to_fs(location)
        probe_folder(system, location, path)
    except Exception as error:  # each storage raises types of its own
        raise ValueError(f"{location} cannot be written: {error_sentence(error)}") from error


def check_device(recipe: TrainingRecipe, choice: ShardingChoice, workers: Workers) -> Sharding:
    """How the weights lie on the workers, whose memory plan is printed; `ValueError` if they do not fit."""
    if workers.device.type == "cuda":
        available, device = torch.cuda.get_device_properties(workers.device).total_memory, "GPU"
    else:
        available, device = free_host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "CPU"
    available = workers.least(available)
    sharding, lines = check_room(recipe, choice, available, num_workers=workers.size, device=device)
    if workers.is_first:
        print("\n".join(lines))
    return sharding


def train_here(
    recipe: TrainingRecipe, workers: Workers, sharding: Sharding, target: Target, *, asked: Precision
) -> None:
    """Train to the recipe's last step, and write the model.

    A run keeps the precision that it began in; `ValueError` where another was `asked` for.
    """
    checkpoints = None
    if target.checkpoints is not None:
        checkpoints = Checkpoints(target.checkpoints, workers, recipe=recipe)
        record = checkpoints.newest()
        if record is not None and asked not in ("auto", record.precision):
            raise ValueError(
                f"--precision {asked}: the run in {target.checkpoints} began in {record.precision}, and a run keeps "
                "its precision; leave --precision out, or give another folder for --checkpoints"
            )
        if record is not None and recipe.train.precision != record.precision:
            recipe = with_precision(recipe, "bfloat16" if record.precision == "bfloat16" else "float32")
    base = base_files(recipe) if workers.is_first else None
    trainer, tokenizer, curve = start(recipe, workers, sharding, checkpoints)
    if workers.is_first:
        print(start_line(recipe, device=workers.device, num_workers=workers.size))
    log = Log(curve, target, recipe, workers) if workers.is_first else None
    train(
        trainer,
        workers,
        curve,
        checkpoints=checkpoints,
        every=target.every,
        before_step=(lambda: None) if log is None else log.begin,
        after_step=(lambda: None) if log is None else log.add,
        before_checkpoint=(lambda: None) if log is None else log.flush,
    )
    if log is not None:
        log.close()
        export(target.folder, recipe, trainer.model, tokenizer, base, overwrite=target.overwrite)
        print(f"wrote {target.folder}")
    else:
        join_export(trainer.model)


class Log:
    """The progress bar, and beside checkpoints, if there are any, the run's log."""

    def __init__(self, curve: Curve, target: Target, recipe: TrainingRecipe, workers: Workers) -> None:
        self.curve, self.run = curve, None
        if target.checkpoints is not None:
            peak = device_peak(workers.device, recipe.train.precision)
            folder, targets = target.checkpoints, target.log_targets
            self.run = RunLog(folder, curve, recipe, peak=peak, num_workers=workers.size, targets=targets)
            print(self.run.describe())
        self.bar = tqdm(initial=len(curve), total=recipe.train.steps)

    def begin(self) -> None:
        """An update begins."""
        if self.run is not None:
            self.run.begin()

    def add(self) -> None:
        """Log the update that was just done."""
        recent = self.curve[-SHOWN_STEPS:]
        loss, accuracy = (sum(point[name] for point in recent) / len(recent) for name in ("loss", "accuracy"))
        self.bar.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.4f}", lr=f"{recent[-1]['lr']:.2e}")
        self.bar.update()
        if self.run is not None:
            self.run.add()

    def flush(self) -> None:
        """Bring remote storage up to date."""
        if self.run is not None:
            self.run.flush()

    def close(self) -> None:
        """Finish the log."""
        self.bar.close()
        if self.run is not None:
            self.run.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; bad input, or a storage that fails, is one sentence on stderr and the exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        get_command(app).main(arguments, prog_name="python -m mbd_core.multitf.run", standalone_mode=False)
    except (TyperException, ValueError, OSError) as error:
        sentence = error.format_message() if isinstance(error, TyperException) else str(error)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"multitf.run: {sentence}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
