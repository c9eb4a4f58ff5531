"""Training steps timed, and their peak memory: one shared clean stream against separate sequences of each layout.

A third run has the shared sequence with the last layer's MLP on all its tokens, not on the labelled ones alone.

On a CPU the seconds are the processor's, of all threads: what else runs on the machine is not counted.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from mbd_core.bench.tables import interleaved, medians
from mbd_core.bench.training_cost import token_ratio
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.example import IGNORE, Example
from mbd_core.multitf.layout import layout_set
from mbd_core.multitf.loss import multitf_loss
from mbd_core.multitf.sample import MultiTFBatch, collate, corrupt, lay_out
from mbd_core.multitf.states import StateConfig
from mbd_core.multitf.training_attention import TrainingAttention

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


def measure_row(
    model: Decoder, attention: TrainingAttention, *, max_group: int, num_random: int, length: int, repeats: int
) -> dict[str, Any]:
    """Samples a second and peak memory above the weights: forward and backward of one sample, all ways in turn."""
    device = next(model.parameters()).device
    batches = sample_batches(model, max_group=max_group, num_random=num_random, length=length)
    placed = {name: batch.to(device) for name, batch in batches.items()}

    def step(batch: MultiTFBatch) -> None:
        loss, _ = multitf_loss(model, batch, attention=attention)
        loss.backward()
        model.zero_grad(set_to_none=True)

    def step_everywhere(batch: MultiTFBatch) -> None:
        loss_everywhere(model, batch, attention).backward()
        model.zero_grad(set_to_none=True)

    runs = {name: _timed(step, batch, device) for name, batch in placed.items()}
    runs["everywhere"] = _timed(step_everywhere, placed["shared"], device)
    for run in runs.values():
        run()
    seconds = medians(interleaved(runs, repeats=repeats))
    peaks = {name: _peak_bytes(model, step, batch, device) for name, batch in placed.items()}
    peaks["everywhere"] = _peak_bytes(model, step_everywhere, placed["shared"], device)
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
    """`multitf_loss` of a model whose last layer computes every token, and whose head the labelled ones."""
    rows, places = (batch.labels != IGNORE).nonzero(as_tuple=True)
    hidden = model(batch.input_ids, batch.positions, attention.of(batch))
    logits = model.logits(hidden[rows, batch.source[rows, places]])
    losses = F.cross_entropy(logits, batch.labels[rows, places], reduction="none")
    return (losses * batch.weights[rows, places].to(losses.dtype)).sum() / batch.num_samples


def sample_batches(model: Decoder, *, max_group: int, num_random: int, length: int) -> dict[str, MultiTFBatch]:
    """The same noisy streams of one sample: as a sequence for each layout, and as one sequence of all."""
    c, rng = model.config, random.Random(f"{max_group}/{num_random}/{length}")
    low, high = 0, c.mask_token_id or c.vocab_size  # any token but the mask
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


def _timed(step: Callable[[MultiTFBatch], None], batch: MultiTFBatch, device: torch.device) -> Callable[[], float]:
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def run() -> float:
        started = clock()
        step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - started

    return run


def _peak_bytes(
    model: Decoder, step: Callable[[MultiTFBatch], None], batch: MultiTFBatch, device: torch.device
) -> int:
    """The most memory that the step's tensors held at once beside the weights; on a CPU, torch's tracker counts."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step(batch)
        return torch.cuda.max_memory_allocated(device) - before
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step(batch)
    return tracker.get_tracker_snapshot("peak")[device]["Total"] - weights
