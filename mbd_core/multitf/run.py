"""A training run in one process: recipe in, model folder out (`python -m mbd_core.multitf.run --recipe tiny-bd`).

`jobs/train_multitf.py` runs the same recipes on a Ray cluster; this is for a machine without one.
"""

import argparse
import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.checkpoint.shipped import SHIPPED
from mbd_core.checkpoint.tokenizer_files import load_tokenizer
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data import conversations, encode_conversations
from mbd_core.multitf.recipes import RECIPES, TrainingRecipe
from mbd_core.multitf.sample import Example
from mbd_core.multitf.trainer import StepMetrics, Trainer
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


def prepare(recipe: TrainingRecipe) -> tuple[Decoder, PreTrainedTokenizerBase, list[Example]]:
    """The model a recipe starts from, its tokenizer and its training samples."""
    pairs = conversations(recipe.data)
    if recipe.base is not None:
        model = load_model(SHIPPED / recipe.base, dtype=torch.float32)
        tokenizer = load_tokenizer(SHIPPED / recipe.base, model.config)
        model.config = replace(model.config, block_size=recipe.states.block_size)
    else:
        assert recipe.model is not None
        tokenizer = train_tokenizer(
            (f"{u}\n{a}" for u, a in itertools.islice(pairs, 8000)), vocab_size=recipe.model.vocab_size
        )
        model = Decoder(recipe.model)
        init_weights(model, seed=recipe.train.seed)
    examples = encode_conversations(
        tokenizer, pairs, block_size=recipe.states.block_size, max_length=recipe.max_length
    )
    return model, tokenizer, examples


def export(folder: Path, recipe: TrainingRecipe, model: Decoder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the trained model, in bfloat16 as these families are published, with the recipe that made it."""
    save_model(
        folder,
        model,
        tokenizer=tokenizer,
        generation=recipe.generation,
        dtype=torch.bfloat16,
        extra={"recipe.json": json.dumps(asdict(recipe), indent=2, default=str) + "\n"},
    )


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a trainer's state beside `path`, then rename over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    torch.save(state, beside)
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", required=True, choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="model folder to write (default: mbd_core/checkpoints/<recipe>)")
    parser.add_argument("--checkpoint", type=Path, help="file to save the trainer's state in, and to resume from")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    args = parser.parse_args()
    recipe = RECIPES[args.recipe]
    out = args.out or SHIPPED / recipe.name

    try:
        model, tokenizer, examples = prepare(recipe)
    except ValueError as error:
        parser.error(str(error))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(model, examples, recipe.states, recipe.train)
    if args.checkpoint and args.checkpoint.exists():
        trainer.load_state_dict(torch.load(args.checkpoint, weights_only=True))
    bar = tqdm(range(trainer.step_number, recipe.train.steps), initial=trainer.step_number, total=recipe.train.steps)
    recent: list[StepMetrics] = []
    for _ in bar:
        recent = [*recent[-49:], trainer.step()]
        loss = sum(m.loss for m in recent) / len(recent)
        accuracy = sum(m.accuracy for m in recent) / len(recent)
        bar.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.4f}", lr=f"{recent[-1].lr:.2e}")
        if args.checkpoint and trainer.step_number % args.every == 0:
            save_checkpoint(args.checkpoint, trainer.state_dict())
    export(out, recipe, model, tokenizer)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
