"""What a recipe starts from: the model, its tokenizer and the training samples."""

import itertools
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.loading import empty_model, load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer_files import load_tokenizer
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data import TOKENIZER_PAIRS, TinyData, conversations, write_conversations
from mbd_core.multitf.fit import check_data, check_model
from mbd_core.multitf.prepared_data import PreparedData, PreparedExamples
from mbd_core.multitf.training_recipe import TrainingRecipe
from mbd_core.multitf.workers import ALONE, Workers
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


def prepare(
    recipe: TrainingRecipe, *, workers: Workers = ALONE, on_meta: bool = False
) -> tuple[Decoder, PreTrainedTokenizerBase, PreparedExamples]:
    """The model on the CPU in float32, its tokenizer, and all samples; `on_meta`: a base's shapes without its values.

    Prepared data and base lie where the recipe names them; of generated data each machine makes its samples once, for
    all of its workers. Raises `ValueError` if the base cannot be loaded or does not fit.
    """
    if recipe.base is not None:
        base = model_folder(recipe.base)
        model = empty_model(base) if on_meta else load_model(base, dtype=torch.float32)
        check_model(recipe, model.config, recipe.base)
        tokenizer = load_tokenizer(base, model.config)
        model.config = replace(model.config, block_size=recipe.states.block_size)
    else:
        assert recipe.model is not None and isinstance(recipe.data, TinyData)
        check_model(recipe, recipe.model, "its own model")
        texts = (f"{user}\n{assistant}" for user, assistant in conversations(recipe.data))
        tokenizer = train_tokenizer(itertools.islice(texts, TOKENIZER_PAIRS), vocab_size=recipe.model.vocab_size)
        model = Decoder(recipe.model)
        init_weights(model, seed=recipe.train.seed)
    size, room = recipe.states.block_size, min(recipe.max_length, model.config.max_positions)

    def read(folder: Path) -> PreparedExamples:
        return PreparedExamples(folder, block_size=size, max_length=room, trailing_fill=recipe.trailing_fill)

    if isinstance(recipe.data, PreparedData):
        folder = Path(recipe.data.path)
        check_data(recipe, folder, model.config, tokenizer)
        return model, tokenizer, read(folder)
    assert recipe.data is not None
    generated = recipe.data

    def write(folder: Path) -> None:
        write_conversations(folder, tokenizer, generated, block_size=size, max_length=room)

    with workers.folder_of_machine(write) as folder:
        return model, tokenizer, read(folder)  # what is mapped stays, without the file's name
