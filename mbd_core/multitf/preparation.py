"""What a recipe starts from: the model, its tokenizer and the training samples."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.loading import empty_model, load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer_files import load_tokenizer
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data import TOKENIZER_PAIRS, TinyData, conversations, encode_conversations
from mbd_core.multitf.example import Example
from mbd_core.multitf.fit import check_data, check_model
from mbd_core.multitf.prepared_data import PreparedData, PreparedExamples
from mbd_core.multitf.training_recipe import TrainingRecipe
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


def prepare(
    recipe: TrainingRecipe, *, on_meta: bool = False
) -> tuple[Decoder, PreTrainedTokenizerBase, Sequence[Example]]:
    """The model on the CPU in float32, its tokenizer, and all samples; `on_meta`: a base's shapes without its values.

    Prepared data and base lie where the recipe names them. Raises `ValueError` if the base cannot be loaded or does
    not fit.
    """
    pairs = conversations(recipe.data) if isinstance(recipe.data, TinyData) else []
    if recipe.base is not None:
        base = model_folder(recipe.base)
        model = empty_model(base) if on_meta else load_model(base, dtype=torch.float32)
        check_model(recipe, model.config, recipe.base)
        tokenizer = load_tokenizer(base, model.config)
        model.config = replace(model.config, block_size=recipe.states.block_size)
    else:
        assert recipe.model is not None
        check_model(recipe, recipe.model, "its own model")
        texts = (f"{user}\n{assistant}" for user, assistant in itertools.islice(pairs, TOKENIZER_PAIRS))
        tokenizer = train_tokenizer(texts, vocab_size=recipe.model.vocab_size)
        model = Decoder(recipe.model)
        init_weights(model, seed=recipe.train.seed)
    size = recipe.states.block_size
    if isinstance(recipe.data, PreparedData):
        folder = Path(recipe.data.path)
        check_data(recipe, folder, model.config, tokenizer)
        fill = recipe.trailing_fill
        room = min(recipe.max_length, model.config.max_positions)
        return model, tokenizer, PreparedExamples(folder, block_size=size, max_length=room, trailing_fill=fill)
    return model, tokenizer, encode_conversations(tokenizer, pairs, block_size=size, max_length=recipe.max_length)
