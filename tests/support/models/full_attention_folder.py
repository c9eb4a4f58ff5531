"""A full-attention model of random weights in a folder, and decoders of its canvases."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model

MAX_TOKENS = 24


def make_folder(family: str, folder: Path, tokenizer: Any = None) -> Path:
    vocabulary = {} if tokenizer is None else {"vocab_size": 512, "mask_token_id": 0, "eos_token_ids": (1,)}
    config = replace(SHAPES[f"tiny-{family}"], **vocabulary)
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    model.lm_head.weight.mul_(3.0)  # else random weights are sure of nothing
    save_model(folder, model, tokenizer=tokenizer)
    return folder


def decoder_of(model: Decoder, prompt: list[int], canvas: Canvas) -> Any:
    return canvas_decoder(
        tuple(prompt),
        MAX_TOKENS,
        canvas,
        Sampling(),
        eos_token_ids=model.config.eos_token_ids,
        vocab=Vocab(model.config.mask_token_id, model.config.vocab_size),
        shift=model.config.shift_logits,
    )
