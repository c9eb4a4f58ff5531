"""The model, tokenizer and samples that a run begins with."""

import itertools
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.loading import load_model
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data.prepared import (
    TOKENIZER_PAIRS,
    PreparedExamples,
    TinyData,
    conversations,
    write_conversations,
)
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.workers import ALONE, Workers
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


def initial_model(start: StartingPoint, *, on_meta: bool = False) -> tuple[Decoder, PreTrainedTokenizerBase]:
    """The run's first model, on the CPU in float32, and its tokenizer; with `on_meta`, a base's shapes without values.

    Raises `ValueError` if the base cannot be loaded.
    """
    recipe, config = start.recipe, start.config
    if start.base is not None:
        if on_meta:
            with torch.device("meta"):
                model = Decoder(config)
        else:
            model = load_model(start.base.path, dtype=torch.float32)
        tokenizer, model.config = start.base.tokenizer, config
        return model, tokenizer
    assert isinstance(recipe.data, TinyData)
    texts = (f"{user}\n{assistant}" for user, assistant in conversations(recipe.data))
    tokenizer = train_tokenizer(itertools.islice(texts, TOKENIZER_PAIRS), vocab_size=config.vocab_size)
    model = Decoder(config)
    init_weights(model, seed=recipe.train.seed)
    return model, tokenizer


def prepare(
    start: StartingPoint, *, workers: Workers = ALONE, on_meta: bool = False
) -> tuple[Decoder, PreTrainedTokenizerBase, PreparedExamples]:
    """The model and its tokenizer (`initial_model`), and all samples.

    Each machine generates its samples once, for all of its workers.
    """
    recipe = start.recipe
    model, tokenizer = initial_model(start, on_meta=on_meta)
    size, room, fill = recipe.states.block_size, start.sample_length, recipe.trailing_fill
    if start.data is not None:
        is_d2f = recipe.states.layouts == "d2f"  # its sequences have no clean stream that answers could share
        examples = PreparedExamples(start.data, block_size=size, max_length=room, trailing_fill=fill, apart=is_d2f)
        return model, tokenizer, examples
    assert isinstance(recipe.data, TinyData)
    write = partial(write_conversations, tokenizer=tokenizer, data=recipe.data, block_size=size, max_length=room)
    with workers.folder_of_machine(write) as folder:  # samples stay mapped after the folder is removed
        return model, tokenizer, PreparedExamples(folder, block_size=size, max_length=room, trailing_fill=fill)
