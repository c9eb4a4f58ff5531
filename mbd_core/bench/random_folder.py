"""A shape with random weights as a model folder that can be served: with a tokenizer for the whole vocabulary."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mbd_core.checkpoint.saving import save_model
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import random_model
from mbd_core.multitf.data import TinyData, conversations
from mbd_core.tasks.tiny_tokenizer import ASSISTANT, CHAT_TEMPLATE, EOS, MASK, USER, train_tokenizer

LEARNED = 512  # ids that the tokenizer learns from text; the rest are one word each
MAX_POSITIONS = 4096
GENERATION = {"buffer_size": 2, "tokens_per_step": 4}
"""Random weights are never confident, so a fixed number of tokens a step stands in for a threshold."""


def write_random_folder(config: ModelConfig, folder: Path, *, seed: int = 0) -> None:
    """Write the folder, in float32.

    Of a longer model it keeps `MAX_POSITIONS`, so that a CPU's KV memory is that of short requests.
    """
    config = replace(config, max_positions=min(config.max_positions, MAX_POSITIONS))
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=seed)
    save_model(folder, model, tokenizer=whole_vocabulary(config), generation=GENERATION)


def whole_vocabulary(config: ModelConfig) -> PreTrainedTokenizerFast:
    """A tokenizer with the model's mask and EOS ids in which every other id has a text of its own.

    So each predicted token shows in a stream. Text is encoded by bytes and by merges learned from the tasks. Raises
    `ValueError` for a vocabulary too small for that.
    """
    if config.vocab_size < LEARNED:
        raise ValueError(f"a vocabulary of {config.vocab_size} tokens is too small to write text; give another shape")
    texts = itertools.chain.from_iterable(conversations(TinyData(per_task=200)))
    data: dict[str, Any] = json.loads(train_tokenizer(texts, vocab_size=LEARNED).backend_tokenizer.to_str())
    learned = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    fixed = {MASK: config.mask_token_id, EOS: config.eos_token_ids[0]}
    names = itertools.chain([t for t in learned if t not in fixed], (f"Ġ<{n}>" for n in itertools.count()))
    taken = {number: name for name, number in fixed.items()}
    ids = {taken[n] if n in taken else next(names): n for n in range(config.vocab_size)}
    data["model"]["vocab"] = ids
    for token in data["added_tokens"]:
        token["id"] = ids[token["content"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        mask_token=MASK,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
