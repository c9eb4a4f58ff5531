"""A loss by slot and by mask ratio: the same labels, apart; alone, in parts, and over workers."""

import random
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model
from torch.nn import functional as F

from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.states.batch import AR_SLOT
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.noise import NoiseBounds
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step.loss import multitf_loss
from mbd_core.multitf.step.loss_buckets import BUCKETS, NUM_SLOTS, bucket_means, bucket_sums
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops.attention.whole import DenseAttention

B = 4


def samples(count: int, *, length: int = 32, prompt: int = 5) -> list[Example]:
    rng = random.Random(0)
    return [Example(tuple(rng.randrange(2, 300) for _ in range(length)), prompt) for _ in range(count)]


def test_labels_fall_into_the_bucket_of_their_slot_and_of_their_ratio() -> None:
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    slots, ratios = torch.tensor([0, 1, 1, NUM_SLOTS, 30]), torch.tensor([0.0, 0.25, 0.26, 0.75, 1.0])
    means = bucket_means(bucket_sums(losses, losses > 1, slots, ratios.double()).tolist())
    assert means == {
        "loss_slot_1": 1.0,
        "loss_slot_2": 3.0,
        f"loss_slot_{NUM_SLOTS}": 12.0,
        "loss_ratio_0_25": 1.5,
        "loss_ratio_25_50": 4.0,
        "loss_ratio_50_75": 8.0,
        "loss_ratio_75_100": 16.0,
    }
    nothing = torch.zeros(0)
    assert bucket_means(bucket_sums(nothing, nothing, nothing.long(), nothing).tolist()) == {}
    causal = torch.tensor([0, AR_SLOT, AR_SLOT])
    apart = bucket_means(bucket_sums(losses[2:], losses[2:] > 8, causal, ratios[2:].double()).tolist())
    assert apart == {"loss_slot_1": 4.0, "loss_ratio_25_50": 4.0, "loss_ar": 12.0, "accuracy_ar": 0.5}


@pytest.mark.parametrize("layouts", ["systematic", "one_group", "d2f"])
def test_the_columns_of_a_batch_are_slot_and_drawn_ratio(layouts: str) -> None:
    """Slots of explicit ranges: each has a ratio of its own, so that both columns must say the same."""
    ranges = ((0.1, 0.2), (0.4, 0.5), (0.9, 1.0))
    states = StateConfig(
        block_size=B,
        layouts=layouts,
        max_group=3 if layouts == "systematic" else 1,
        schedule="slot_ranges",
        bounds=NoiseBounds(slots=ranges),
        rounding="ceil",
    )
    batch = build_batch(samples(1), states, mask_token_id=0, rngs=[random.Random(1)])
    labelled = batch.labels[0] != IGNORE
    first_answer = 5 // B if layouts != "d2f" else 0
    for slot, ratio, stream, block, first in zip(
        *(
            column[0][labelled].tolist()
            for column in (batch.slot, batch.ratio, batch.stream, batch.block, batch.first)
        ),
        strict=True,
    ):
        low, high = ranges[min(slot, len(ranges) - 1)]
        assert low <= ratio <= high and stream > 0
        assert slot == (block - 1 if layouts == "d2f" else block - first) and block >= first_answer
    assert set(batch.slot[0][labelled].tolist()) >= {1, 2}


def test_the_buckets_are_means_of_the_labels_cross_entropy() -> None:
    model = random_model(FAMILIES["sdar"]).double()
    states = StateConfig(block_size=B, max_group=3)
    batch = build_batch(samples(2), states, mask_token_id=0, rngs=[random.Random(n) for n in range(2)])
    loss, measures = multitf_loss(model, batch)
    attend = DenseAttention(dual_stream_mask(batch.stream, batch.block, batch.first)[:, None])
    logits = model.logits(model(batch.input_ids, batch.positions, attend))
    labelled = batch.labels != IGNORE
    each = F.cross_entropy(logits[labelled], batch.labels[labelled], reduction="none")
    hits = (logits[labelled].argmax(-1) == batch.labels[labelled]).double().mean()
    assert measures[0] == pytest.approx(float(hits)) and loss.requires_grad and not measures.requires_grad
    means = bucket_means(measures[1:].tolist())
    for slot in range(3):
        chosen = each[batch.slot[labelled] == slot]
        assert means[f"loss_slot_{slot + 1}"] == pytest.approx(chosen.mean().item(), rel=1e-9)
    upper = each[batch.ratio[labelled] > 0.75]
    assert means["loss_ratio_75_100"] == pytest.approx(upper.mean().item(), rel=1e-9)
    assert set(means) <= set(BUCKETS) and "loss_slot_4" not in means


def test_parts_and_workers_add_up_to_the_whole_batch() -> None:
    states = StateConfig(block_size=B, max_group=2)
    config = TrainConfig(steps=1, batch_size=4, lr=1e-3, precision="float32")

    def first(rank: int = 0, world_size: int = 1, micro_batch: int | None = None) -> Trainer:
        chosen = replace(config, micro_batch=micro_batch)
        model = random_model(FAMILIES["sdar"])
        return Trainer(model, samples(8), states, chosen, rank=rank, world_size=world_size)

    whole, parts = first().step(), first(micro_batch=1).step()
    workers = [first(rank, 2).step() for rank in range(2)]
    assert parts.sums == pytest.approx(whole.sums, rel=1e-5)
    assert [sum(pair) for pair in zip(*(w.sums for w in workers), strict=True)] == pytest.approx(whole.sums, rel=1e-5)
    assert sum(w.tflop for w in workers) == pytest.approx(whole.tflop, rel=1e-9) and whole.tflop > 0
    point = whole.point()
    assert list(point)[:7] == ["step", "loss", "accuracy", "lr", "tokens", "grad_norm", "tflop"]
    assert point["loss_slot_1"] > 0 and "sums" not in point
