"""Training steps timed, and their peak memory: one shared clean stream against separate sequences of each layout.

On a CPU the seconds are the processor's, of all threads: what else runs on the machine is not counted.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from mbd_core.bench.tables import interleaved, medians
from mbd_core.bench.training_cost import token_ratio
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.example import Example
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
}


def measure_row(
    model: Decoder, attention: TrainingAttention, *, max_group: int, num_random: int, length: int, repeats: int
) -> dict[str, Any]:
    """Samples a second and peak memory above the weights: forward and backward of one sample, both ways in turn."""
    device = next(model.parameters()).device
    batches = sample_batches(model, max_group=max_group, num_random=num_random, length=length)
    placed = {name: batch.to(device) for name, batch in batches.items()}

    def step(batch: MultiTFBatch) -> None:
        loss, _ = multitf_loss(model, batch, attention=attention)
        loss.backward()
        model.zero_grad(set_to_none=True)

    runs = {name: _timed(step, batch, device) for name, batch in placed.items()}
    for run in runs.values():
        run()
    seconds = medians(interleaved(runs, repeats=repeats))
    peaks = {name: _peak_bytes(model, step, batch, device) for name, batch in placed.items()}
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
    }


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
