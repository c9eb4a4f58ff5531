"""Train a recipe in this process, without Ray: `python -m mbd_core.multitf.run --recipe tiny-bd`.

`jobs/train_multitf.py` trains the same recipes on a Ray cluster. Exit codes: 0 done, 2 bad input.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm
from typer.exceptions import TyperException
from typer.main import get_command

from mbd_core.checkpoint.shipped import named_model
from mbd_core.files import check_writable
from mbd_core.multitf.export import check_export, export
from mbd_core.multitf.fit import check_fit
from mbd_core.multitf.precision import Precision
from mbd_core.multitf.preparation import prepare
from mbd_core.multitf.prepared_data import named_data
from mbd_core.multitf.recipes import RECIPES, recipe_named
from mbd_core.multitf.trainer import StepMetrics, Trainer
from mbd_core.multitf.trainer_state import read_state, save_state
from mbd_core.multitf.training_recipe import TrainingRecipe, shortened, start_line, with_fitted_noise, with_precision

SHOWN_STEPS = 50
"""The progress bar shows means over the last so many steps."""


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
        Path | None, typer.Option(metavar="FILE", help="Mask ratios as jobs/alignment.py measured and wrote them.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates, instead of the recipe's; the schedule shrinks with them.")
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="auto: bfloat16 where the device computes it, else float32.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder to write.", show_default="out/RECIPE")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model folder of this project.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the trainer's state is kept; if it is there, go on.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between two writings of FILE.")] = 500,
) -> None:
    """Train a recipe in this process, without Ray."""
    chosen = with_precision(recipe_named(recipe), precision)
    if base is not None:
        chosen = replace(chosen, base=named_model(base))
    if data is not None:
        chosen = replace(chosen, data=named_data(data))
    if fitted_noise is not None:
        chosen = with_fitted_noise(chosen, fitted_noise)
    if steps is not None:
        chosen = shortened(chosen, steps)
    folder = out or Path("out") / chosen.name
    check_local(folder, checkpoint)
    check_export(folder, overwrite=overwrite)
    check_fit(chosen)
    state = read_state(checkpoint, recipe=recipe) if checkpoint is not None and checkpoint.exists() else None
    if state is not None:
        chosen = with_precision(chosen, state["precision"])
    model, tokenizer, examples = prepare(chosen)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(model, examples, chosen.states, chosen.train)
    if state is not None:
        trainer.load_state_dict(state["trainer"])
    chosen = with_precision(chosen, trainer.precision)
    print(start_line(chosen, device=trainer.device))
    train(trainer, chosen, checkpoint, every=every)
    export(folder, chosen, model, tokenizer, overwrite=overwrite)
    print(f"wrote {folder}")


def check_local(folder: Path, checkpoint: Path | None) -> None:
    """Raise `ValueError` for targets that are URLs, and for a checkpoint file that cannot be written."""
    for target in filter(None, (folder, checkpoint)):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(target)):
            raise ValueError(f"{target} is a URL: this command writes here; jobs/train_multitf.py writes to URLs")
    if checkpoint is not None:
        check_writable(checkpoint.parent, checkpoint)
        if checkpoint.is_dir():
            raise ValueError(f"{checkpoint} is a folder; give a file for the trainer's state")


def train(trainer: Trainer, recipe: TrainingRecipe, checkpoint: Path | None, *, every: int) -> None:
    """The remaining updates of the recipe, with a progress bar; every `every` steps the state goes to `checkpoint`."""
    total = recipe.train.steps
    bar = tqdm(range(trainer.step_number, total), initial=trainer.step_number, total=total)
    recent: list[StepMetrics] = []
    for _ in bar:
        recent = [*recent[1 - SHOWN_STEPS :], trainer.step()]
        loss = sum(m.loss for m in recent) / len(recent)
        accuracy = sum(m.accuracy for m in recent) / len(recent)
        bar.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.4f}", lr=f"{recent[-1].lr:.2e}")
        if checkpoint is not None and trainer.step_number % every == 0:
            save_state(checkpoint, trainer, recipe=recipe.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; bad input is one sentence on stderr and exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        get_command(app).main(arguments, prog_name="python -m mbd_core.multitf.run", standalone_mode=False)
    except (TyperException, ValueError) as error:
        sentence = error.format_message() if isinstance(error, TyperException) else str(error)
        print(f"multitf.run: {sentence}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
