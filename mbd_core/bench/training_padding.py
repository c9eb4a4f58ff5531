"""How much of a training's positions is padding, with short samples packed together and without: counted, not run.

Counted are tokens of samples; every noisy stream has as many again, so the shares are those of training sequences but
for the last clean blocks, which these leave out.
"""

from collections.abc import Sequence
from typing import Any

from mbd_core.multitf.packing import Together, alone, packed_together
from mbd_core.multitf.trainer import batch_indices

MOST_STEPS = 200
COLUMNS = {
    "micro_batch": "at once",
    "pack": "packed up to",
    "separate_sequences": "sequences a step|.1f",
    "packed_sequences": "packed|.1f",
    "separate_padding": "padding|.3f",
    "packed_padding": "packed padding|.3f",
}


def padding_row(lengths: Sequence[int], *, batch_size: int, micro_batch: int, pack: int) -> dict[str, Any]:
    """The steps of one epoch, at most `MOST_STEPS`, of one worker that computes `micro_batch` sequences at once.

    Raises `ValueError` for fewer samples than a batch.
    """
    if len(lengths) < batch_size:
        raise ValueError(f"{len(lengths)} training samples are fewer than a batch of {batch_size}")
    steps = min(MOST_STEPS, len(lengths) // batch_size)
    batches = [[lengths[i] for i in batch_indices(lengths, batch_size, seed=0, step=step)] for step in range(steps)]
    row: dict[str, Any] = {"micro_batch": micro_batch, "pack": pack}
    for name, packed in (("separate", False), ("packed", True)):
        counted = [
            _positions(batch, packed_together(batch, pack) if packed else alone(batch_size), micro_batch)
            for batch in batches
        ]
        tokens, positions, sequences = (sum(numbers) for numbers in zip(*counted, strict=True))
        row |= {f"{name}_sequences": sequences / steps, f"{name}_padding": 1.0 - tokens / positions}
    return row


def _positions(lengths: Sequence[int], together: Together, at_once: int) -> tuple[int, int, int]:
    """Tokens, positions with padding, sequences: so many at once are each as long as the longest of them."""
    sequences = [sum(lengths[number] for number in numbers) for numbers in together]
    parts = [sequences[start : start + at_once] for start in range(0, len(sequences), at_once)]
    return sum(sequences), sum(len(part) * max(part) for part in parts), len(sequences)
