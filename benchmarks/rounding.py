"""The error of rounded weights, FP8 or int8: a model's logits before and after rounding, at the same positions.

The sequences are test problems of gsm-mini and code-mini with their solutions, or random ids if the model folder has
no tokenizer.
Half of each solution's positions are compared twice: with no token masked, and with these positions masked, as in
decoding. Errors are absolute.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import question_prompt
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import TOKENIZER_FILES, load_tokenizer
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import quantize_weights, round_to_int8, weight_bytes
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.ops.machine import best_seconds
from mbd_core.tasks import code_mini, gsm_mini


@dataclass(frozen=True, kw_only=True)
class LogitError:
    """The effect of rounded weights on logits.

    max_abs, mean_abs  absolute differences
    top1_agreement     the share of positions whose likeliest token is the same
    mean_kl            mean divergence KL(wide || rounded) of the predicted distributions, in nats
    """

    max_abs: float
    mean_abs: float
    top1_agreement: float
    mean_kl: float
    positions: int


def logit_error(reference: Tensor, result: Tensor) -> LogitError:
    """Compare two sets of logits (..., V) of the same positions. Raises `ValueError` if their shapes differ."""
    if reference.shape != result.shape:
        raise ValueError(
            f"logits of shapes {tuple(reference.shape)} and {tuple(result.shape)} are not of the same positions"
        )
    difference = (reference.float() - result.float()).abs()
    log_wide, log_rounded = reference.float().log_softmax(-1), result.float().log_softmax(-1)
    divergence = (log_wide.exp() * (log_wide - log_rounded)).sum(-1)
    is_same = (reference.argmax(-1) == result.argmax(-1)).float()
    return LogitError(
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        top1_agreement=float(is_same.mean()),
        mean_kl=float(divergence.mean()),
        positions=is_same.numel(),
    )


COLUMNS = {
    "model": "model",
    "parts": "rounded",
    "inputs": "inputs",
    "positions": "positions",
    "max_abs": "largest error|.4f",
    "mean_abs": "mean error|.4f",
    "logit_std": "logits' std|.3f",
    "top1_agreement": "top-1 agreement|.2%",
    "mean_kl": "mean KL (nats)|.2e",
    "speedup": "times as fast|.2f",
}
RANDOM_LENGTH = 64
REPEATS = 3  # of the timed forwards, of which the fastest counts
Rounded = Literal["experts", "all", "blocks", "int8"]
"""The weights that are rounded to FP8, or `int8`: all weights of products are rounded to int8."""


@dataclasses.dataclass(frozen=True)
class ComparedSequence:
    """A sequence of tokens and the positions, ascending, at which logits are compared."""

    tokens: list[int]
    positions: list[int]


def rounding_rows(
    folder: Path, *, parts: Rounded | None, num_sequences: int, seed: int, device: torch.device
) -> list[dict[str, Any]]:
    """One row for clean inputs and, if the model has a mask, one for masked inputs.

    `parts` is by default the experts, if the model has any. `speedup` is of the forwards over these sequences, one
    sequence at a time.

    Raises `ValueError` for a folder without a model, for parts that the model does not have, and for int8 on a GPU.
    """
    config = load_config(folder)
    if parts in ("experts", "blocks") and config.moe is None:
        raise ValueError(f"--parts {parts}: the {config.architecture} in {folder} has no experts; use --parts all")
    parts = parts or ("all" if config.moe is None else "experts")
    model = load_model(folder, dtype=torch.float32 if device.type == "cpu" else None, device=device)
    with_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(folder, config) if with_tokenizer else None
    sequences = compared_sequences(config, tokenizer, count=num_sequences, seed=seed)
    stored_bytes = weight_bytes(model)
    inputs = (False, True) if config.has_mask else (False,)
    logits_of_stored = {masked: logits(model, sequences, masked=masked) for masked in inputs}

    def seconds(masked: bool) -> float:
        return best_seconds(lambda: logits(model, sequences, masked=masked), device, REPEATS)

    seconds_before = {masked: seconds(masked) for masked in inputs}
    if parts == "int8":
        round_to_int8(model)
    else:
        quantize_weights(model, parts)
    rows = []
    for masked, expected in logits_of_stored.items():
        error = logit_error(expected, logits(model, sequences, masked=masked))
        rows.append(
            {
                "model": folder.name,
                "parts": parts,
                "inputs": ("masked" if masked else "clean") + (" text" if with_tokenizer else " random ids"),
                **dataclasses.asdict(error),
                "logit_std": float(expected.std()),
                "speedup": seconds_before[masked] / seconds(masked),
                "bytes_before": stored_bytes,
                "bytes_after": weight_bytes(model),
                "dtype": str(model.model.norm.weight.dtype).removeprefix("torch."),
                "device": device.type,
            }
        )
    return rows


def compared_sequences(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, *, count: int, seed: int
) -> list[ComparedSequence]:
    """`count` sequences that depend on the seed alone, each with half of its solution's positions."""
    rng = random.Random(seed)
    pairs = _random_pairs(config, rng, count) if tokenizer is None else _task_pairs(tokenizer, count, seed)
    sequences = []
    for prompt, solution in pairs:
        tokens = (prompt + solution)[: config.max_positions]
        answer_range = range(min(len(prompt), len(tokens) - 1), len(tokens))
        sequences.append(ComparedSequence(tokens, sorted(rng.sample(answer_range, -(-len(answer_range) // 2)))))
    return sequences


def _random_pairs(config: ModelConfig, rng: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    special = {config.mask_token_id, *config.eos_token_ids}
    ids = [i for i in range(config.vocab_size) if i not in special]
    half = min(RANDOM_LENGTH, config.max_positions) // 2
    return [(rng.choices(ids, k=half), rng.choices(ids, k=half)) for _ in range(count)]


def _task_pairs(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    gsm = ((p["question"], p["answer"]) for p in gsm_mini.generate(split="test", seed=seed))
    code = ((p["prompt"], p["canonical_solution"]) for p in code_mini.generate(split="test", seed=seed))
    problems = itertools.chain.from_iterable(zip(gsm, code, strict=False))
    return [
        (question_prompt(tokenizer, question), tokenizer(solution, add_special_tokens=False)["input_ids"])
        for question, solution in itertools.islice(problems, count)
    ]


@torch.inference_mode()
def logits(model: Decoder, sequences: Sequence[ComparedSequence], *, masked: bool) -> Tensor:
    """Logits (A, V - 1) on the CPU that predict the compared positions, without the column of the mask id, if any."""
    c, device, rows_AV = model.config, model.model.norm.weight.device, []
    for sequence in sequences:
        tokens, places = torch.tensor(sequence.tokens), torch.tensor(sequence.positions)
        if masked:
            tokens[places] = c.mask_token_id
        positions = torch.arange(len(tokens), device=device)
        is_ordered = c.attention == "block_causal" or not c.has_mask
        blocks = positions // c.block_size if is_ordered else torch.zeros_like(positions)
        attend = DenseAttention((blocks[None, :] <= blocks[:, None])[None, None])
        hidden = model(tokens.to(device)[None], positions[None], attend)[0]
        predicted_from = (places - 1).clamp(min=0) if c.shift_logits else places
        logits_AV = model.logits(hidden[predicted_from.to(device)]).float().cpu()
        if c.has_mask:
            logits_AV = torch.cat((logits_AV[:, : c.mask_token_id], logits_AV[:, c.mask_token_id + 1 :]), dim=1)
        rows_AV.append(logits_AV)
    return torch.cat(rows_AV)
