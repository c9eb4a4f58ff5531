"""What a recipe starts from: the model, its tokenizer and the training samples."""

import itertools
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer_files import load_tokenizer
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data import TOKENIZER_PAIRS, conversations, encode_conversations
from mbd_core.multitf.recipes import TrainingRecipe
from mbd_core.multitf.sample import Example
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


def prepare(recipe: TrainingRecipe) -> tuple[Decoder, PreTrainedTokenizerBase, list[Example]]:
    """The model on the CPU in float32, its tokenizer, and all samples; `ValueError` if the base cannot be loaded."""
    pairs = conversations(recipe.data)
    if recipe.base is not None:
        base = model_folder(recipe.base)
        model = load_model(base, dtype=torch.float32)
        tokenizer = load_tokenizer(base, model.config)
        model.config = replace(model.config, block_size=recipe.states.block_size)
    else:
        assert recipe.model is not None
        texts = (f"{user}\n{assistant}" for user, assistant in itertools.islice(pairs, TOKENIZER_PAIRS))
        tokenizer = train_tokenizer(texts, vocab_size=recipe.model.vocab_size)
        model = Decoder(recipe.model)
        init_weights(model, seed=recipe.train.seed)
    examples = encode_conversations(
        tokenizer, pairs, block_size=recipe.states.block_size, max_length=recipe.max_length
    )
    return model, tokenizer, examples
