"""The gain of a shared clean stream in training: counted operations and padding, timed steps.

A third run has the shared sequence, and the last layer's MLP computes all its tokens instead of the labelled tokens
alone.

On a CPU the seconds are processor seconds of all threads, so that other work on the machine is not counted.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from benchmarks.measuring import interleaved, medians, run_seconds
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.flops import matrix_flops, mlp_flops, pair_flops
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.data.prepared import PreparedExamples
from mbd_core.multitf.states.batch import MultiTFBatch, collate
from mbd_core.multitf.states.layout import GroupLayout, StateConfig, layout_set
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.packing import Together, alone, packed_together
from mbd_core.multitf.states.sample import corrupt, lay_out
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.loss import multitf_loss
from mbd_core.multitf.step.trainer import Trainer, batch_indices

# The operations of a training sample's forward, counted: with one shared clean stream, and with separate streams.
#
# The multiplications of the layers' matrices and of attention are counted. The embedding is not counted, nor are the
# last layer's MLP, the head and the loss: both forms compute these at the same labelled positions. The backward pass
# is twice the forward.
AttentionKind = Literal["dense", "flex"]
COUNT_COLUMNS = {
    "max_group": "G",
    "num_random": "N",
    "layouts": "layouts n",
    "length": "length",
    "token_ratio": "2n / (n + 1)|.2f",
    "separate_dense_tflop": "separate, dense|.4g",
    "shared_dense_tflop": "shared, dense|.4g",
    "separate_flex_tflop": "separate, flex|.4g",
    "shared_flex_tflop": "shared, flex|.4g",
    "dense_gain": "gain, dense|.2f",
    "flex_gain": "gain, flex|.2f",
}
FLEX_BLOCK = 128
"""Positions on a side of a block that FlexAttention computes whole or not at all."""


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """A sample's forward: training tokens, pairs of tokens that the attention computes, operations."""

    tokens: int
    pairs: int
    flops: float


def token_ratio(num_layouts: int) -> float:
    """2n / (n + 1): tokens of n sequences `[x_t; x_0]` over the tokens of n noisy streams with one clean stream."""
    return 2 * num_layouts / (num_layouts + 1)


def computed_pairs(layouts: Sequence[GroupLayout], block_size: int, attention: AttentionKind) -> int:
    """Number of pairs that the attention computes in the streams of `layouts` and their clean stream.

    Dense attention computes all. FlexAttention computes each block of `FLEX_BLOCK` x `FLEX_BLOCK` pairs that has a
    visible pair.
    """
    num_blocks = layouts[0].num_blocks
    length = (len(layouts) + 1) * num_blocks * block_size
    if attention == "dense":
        return length**2
    stream = torch.arange(1, len(layouts) + 2).remainder(len(layouts) + 1).repeat_interleave(num_blocks)
    block = torch.arange(num_blocks).repeat(len(layouts) + 1)
    first = torch.tensor([a for layout in layouts for a in layout.first_blocks()] + list(range(1, num_blocks + 1)))
    queries, keys = np.nonzero(dual_stream_mask(stream, block, first).numpy())
    side = -(-length // FLEX_BLOCK)
    is_computed = np.zeros((side, side), dtype=bool)
    starts, ends = (np.arange(len(stream)) * block_size // FLEX_BLOCK, _last_block(len(stream), block_size))
    for rows in range(int((ends - starts).max()) + 1):
        for columns in range(int((ends - starts).max()) + 1):
            tiles = np.minimum(starts[queries] + rows, ends[queries]), np.minimum(starts[keys] + columns, ends[keys])
            is_computed[tiles] = True
    return int(is_computed.sum()) * FLEX_BLOCK**2


def _last_block(count: int, block_size: int) -> np.ndarray:
    return (np.arange(1, count + 1) * block_size - 1) // FLEX_BLOCK


def sample_cost(
    config: ModelConfig, layouts: Sequence[GroupLayout], block_size: int, *, attention: AttentionKind, shared: bool
) -> SampleCost:
    """The forward of one sample. All its layouts have `layouts[0].num_blocks` blocks.

    `shared`: one sequence with one clean stream; otherwise each layout is a sequence with a clean stream of its own.
    """
    sequences = [list(layouts)] if shared else [[layout] for layout in layouts]
    tokens = sum(len(group) + 1 for group in sequences) * layouts[0].num_blocks * block_size
    pairs = sum(computed_pairs(group, block_size, attention) for group in sequences)
    everywhere = matrix_flops(config) - mlp_flops(config, config.num_layers - 1)
    return SampleCost(tokens=tokens, pairs=pairs, flops=tokens * everywhere + pairs * pair_flops(config))


def check_length(length: int, block_size: int) -> None:
    """Raise `ValueError` for a sample that is no whole number of blocks."""
    if length % block_size or length < block_size:
        raise ValueError(f"--length {length} is no whole number of blocks of {block_size}")


def count_row(
    config: ModelConfig, *, max_group: int, num_random: int, length: int, seed: int = 0
) -> dict[str, float | int]:
    """One row of the table: a group size and a number of random layouts over samples of `length` tokens.

    Raises `ValueError` for a length that is no whole number of the model's blocks.
    """
    size = config.block_size
    check_length(length, size)
    layouts = layout_set(length // size, max_group=max_group, num_random=num_random, rng=random.Random(seed))
    row: dict[str, float | int] = {
        "max_group": max_group,
        "num_random": num_random,
        "layouts": len(layouts),
        "length": length,
        "token_ratio": token_ratio(len(layouts)),
    }
    for shared, name in ((False, "separate"), (True, "shared")):
        for attention in ("dense", "flex"):
            cost = sample_cost(config, layouts, size, attention=attention, shared=shared)
            row[f"{name}_{attention}_tflop"] = cost.flops / 1e12
            row[f"{name}_tokens"] = cost.tokens
    for attention in ("dense", "flex"):
        row[f"{attention}_gain"] = row[f"separate_{attention}_tflop"] / row[f"shared_{attention}_tflop"]
    return row


# The share of padding in a training's positions, with and without packing of short samples: counted, not run.
#
# Tokens of samples are counted, not positions of training sequences. The shares are almost the same, because each
# noisy stream repeats its sample's tokens. They differ by the last clean blocks, which training sequences leave out.

MOST_STEPS = 200
PADDING = {
    "micro_batch": "at once",
    "pack": "packed up to",
    "separate_sequences": "sequences a step|.1f",
    "packed_sequences": "packed|.1f",
    "separate_padding": "padding|.3f",
    "packed_padding": "packed padding|.3f",
}


def padding_rows(
    config: ModelConfig, data: Path, *, micro_batches: Sequence[int], packs: Sequence[int], batch_size: int
) -> list[dict[str, Any]]:
    """A row for each size of micro-batch and of packs, for prepared data in the blocks of this shape."""
    lengths = PreparedExamples(data, block_size=config.block_size, max_length=config.max_positions).lengths
    return [
        padding_row(lengths, batch_size=batch_size, micro_batch=micro_batch, pack=pack)
        for micro_batch, pack in product(micro_batches, packs)
    ]


def padding_row(lengths: Sequence[int], *, batch_size: int, micro_batch: int, pack: int) -> dict[str, Any]:
    """The steps of one epoch, at most `MOST_STEPS`, of one worker that computes `micro_batch` sequences at once.

    Raises `ValueError` for fewer samples than a batch.
    """
    if len(lengths) < batch_size:
        raise ValueError(f"{len(lengths)} training samples are fewer than a batch of {batch_size}")
    steps = min(MOST_STEPS, len(lengths) // batch_size)
    batches = [[lengths[i] for i in batch_indices(lengths, batch_size, seed=0, step=step)] for step in range(steps)]
    row: dict[str, Any] = {"samples": len(lengths), "micro_batch": micro_batch, "pack": pack}
    for name, is_packed in (("separate", False), ("packed", True)):
        counts = [
            _positions(batch, packed_together(batch, pack) if is_packed else alone(batch_size), micro_batch)
            for batch in batches
        ]
        tokens, positions, sequences = (sum(numbers) for numbers in zip(*counts, strict=True))
        row |= {f"{name}_sequences": sequences / steps, f"{name}_padding": 1.0 - tokens / positions}
    return row


def _positions(lengths: Sequence[int], groups: Together, at_once: int) -> tuple[int, int, int]:
    """Tokens, positions with padding, and sequences. `at_once` sequences are padded to the longest of them."""
    sequences = [sum(lengths[number] for number in numbers) for numbers in groups]
    parts = [sequences[start : start + at_once] for start in range(0, len(sequences), at_once)]
    return sum(sequences), sum(len(part) * max(part) for part in parts), len(sequences)


# Training steps timed, and their peak memory: one shared clean stream against separate sequences of each layout.
PROMPT = 0.25
"""The share of a sample that is its prompt."""

COLUMNS = {
    "max_group": "G",
    "num_random": "N",
    "layouts": "layouts n",
    "token_ratio": "2n / (n + 1)|.2f",
    "separate_rate": "separate, samples/s|.3f",
    "shared_rate": "shared, samples/s|.3f",
    "speedup": "shared / separate|.2f",
    "separate_bytes": "separate, peak MB|.0f",
    "shared_bytes": "shared, peak MB|.0f",
    "memory_ratio": "separate / shared|.2f",
    "everywhere_rate": "last MLP everywhere, samples/s|.3f",
    "last_mlp_gain": "shared / everywhere|.3f",
    "everywhere_bytes": "everywhere, peak MB|.0f",
}


def random_model(config: ModelConfig, device: torch.device) -> Decoder:
    """A shape with random weights, in float32, ready to train."""
    model = Decoder(config).to(device)
    init_weights(model, seed=0)
    return model.train()


def measure_row(
    model: Decoder, attention: TrainingAttention, *, max_group: int, num_random: int, length: int, repeats: int
) -> dict[str, Any]:
    """Samples a second and peak memory above the weights: forward and backward of one sample, all ways in turn."""
    device = next(model.parameters()).device
    batches = sample_batches(model, max_group=max_group, num_random=num_random, length=length)
    device_batches = {name: batch.to(device) for name, batch in batches.items()}

    def step(batch: MultiTFBatch) -> None:
        loss, _ = multitf_loss(model, batch, attention=attention)
        loss.backward()
        model.zero_grad(set_to_none=True)

    def step_everywhere(batch: MultiTFBatch) -> None:
        loss_everywhere(model, batch, attention).backward()
        model.zero_grad(set_to_none=True)

    on_gpu = device.type == "cuda"
    timer = partial(run_seconds, wait=device if on_gpu else None)
    timer = partial(timer, clock=time.perf_counter if on_gpu else time.process_time)
    runs = {name: partial(timer, partial(step, batch)) for name, batch in device_batches.items()}
    runs["everywhere"] = partial(timer, partial(step_everywhere, device_batches["shared"]))
    for run in runs.values():
        run()
    seconds = medians(interleaved(runs, repeats=repeats))
    peaks = {name: _peak_bytes(model, step, batch, device) for name, batch in device_batches.items()}
    peaks["everywhere"] = _peak_bytes(model, step_everywhere, device_batches["shared"], device)
    layouts = int(batches["shared"].stream.max())
    return {
        "max_group": max_group,
        "num_random": num_random,
        "layouts": layouts,
        "length": length,
        "token_ratio": token_ratio(layouts),
        **{f"{name}_rate": 1.0 / seconds[name] for name in runs},
        "speedup": seconds["separate"] / seconds["shared"],
        **{f"{name}_bytes": peaks[name] / 1e6 for name in runs},
        "memory_ratio": peaks["separate"] / peaks["shared"],
        "last_mlp_gain": seconds["everywhere"] / seconds["shared"],
    }


def loss_everywhere(model: Decoder, batch: MultiTFBatch, attention: TrainingAttention) -> Tensor:
    """`multitf_loss` of a model whose last layer computes every token; its head computes only the labelled tokens."""
    rows, places = (batch.labels != IGNORE).nonzero(as_tuple=True)
    hidden = model(batch.input_ids, batch.positions, attention.of(batch))
    logits = model.logits(hidden[rows, batch.source[rows, places]])
    losses = F.cross_entropy(logits, batch.labels[rows, places], reduction="none")
    return (losses * batch.weights[rows, places].to(losses.dtype)).sum() / batch.num_samples


def sample_batches(model: Decoder, *, max_group: int, num_random: int, length: int) -> dict[str, MultiTFBatch]:
    """The same noisy streams of one sample: as a sequence for each layout, and as one sequence of all."""
    c, rng = model.config, random.Random(f"{max_group}/{num_random}/{length}")
    low, high = 0, c.mask_token_id or c.vocab_size  # tokens below the mask, or above it if it is token 0
    if c.mask_token_id == 0:
        low = 1
    example = Example(tuple(rng.randrange(low, high) for _ in range(length)), round(PROMPT * length))
    config = StateConfig(block_size=c.block_size, max_group=max_group, num_random=num_random)
    layouts = layout_set(length // c.block_size, max_group=max_group, num_random=num_random, rng=rng)
    streams = [
        (layout, corrupt(example, layout, start=0, config=config, mask_token_id=c.mask_token_id, rng=rng))
        for layout in layouts
    ]
    return {
        "separate": collate([lay_out(example, [stream], config, first_block=0) for stream in streams]),
        "shared": collate([lay_out(example, streams, config, first_block=0)]),
    }


def _peak_bytes(
    model: Decoder, step: Callable[[MultiTFBatch], None], batch: MultiTFBatch, device: torch.device
) -> int:
    """The most memory that the step's tensors held at once beside the weights; on a CPU, torch's tracker counts."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        bytes_before = torch.cuda.memory_allocated(device)
        step(batch)
        return torch.cuda.max_memory_allocated(device) - bytes_before
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step(batch)
    return tracker.get_tracker_snapshot("peak")[device]["Total"] - weights


# Updates timed, with eager layers and with compiled ones (`train.compile`), by two trainers that take turns.
COMPILED = {
    "length": "length",
    "precision": "precision",
    "lora": "adapter's rank",
    "eager_seconds": "eager, s|.2f",
    "compiled_seconds": "compiled, s|.2f",
    "gain": "eager / compiled|.2f",
    "first_seconds": "first compiled update, s|.0f",
}


def compiled_row(
    config: ModelConfig, *, lora: int | None, length: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Median seconds of an update of four samples of one layout, in the precision that training would choose.

    An autoregressive shape becomes a block-diffusion model first, with its last token as the mask.
    """
    if config.prefix_methods == ("ar",):
        config = replace(config, attention="block_causal", block_size=8, mask_token_id=config.vocab_size - 1)
    rng = random.Random(length)
    examples = [
        Example(tuple(rng.randrange(1, config.vocab_size // 2) for _ in range(length)), round(PROMPT * length))
        for _ in range(4)
    ]
    states = StateConfig(block_size=config.block_size, max_group=1, num_layouts=1, span="response")
    eager = TrainConfig(
        steps=repeats + 1,
        batch_size=4,
        micro_batch=4,
        lr=1e-4,
        warmup=1,
        optimizer="adamw",
        lora=None if lora is None else LoraSettings(rank=lora, alpha=2 * lora, dropout=0.0),
    )
    trainers = {
        name: Trainer(random_model(config, device), examples, states, replace(eager, compile=name == "compiled"))
        for name in ("eager", "compiled")
    }
    on_gpu = device.type == "cuda"
    timer = partial(run_seconds, wait=device if on_gpu else None)
    timer = partial(timer, clock=time.perf_counter if on_gpu else time.process_time)
    runs = {name: partial(timer, trainer.step) for name, trainer in trainers.items()}
    first = {name: run() for name, run in runs.items()}
    seconds = medians(interleaved(runs, repeats=repeats))
    return {
        "length": length,
        "precision": trainers["eager"].precision,
        "lora": lora,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "gain": seconds["eager"] / seconds["compiled"],
        "first_seconds": first["compiled"],
    }
