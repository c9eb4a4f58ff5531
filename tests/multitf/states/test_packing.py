"""Several samples in one training sequence: the losses and gradients of a sequence each, and less padding."""

import random
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trainer_state import D2F_STATES, load_trainer, trainer_state

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.packing import packed_alike, packed_together
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.loss import DENSE, distillation_loss, multitf_loss
from mbd_core.multitf.step.mfu import update_flops, visible_pairs
from mbd_core.multitf.step.trainer import StepMetrics, Trainer

B = 4
LENGTHS = (12, 40, 8, 20, 16)
TOGETHER = [[1], [3, 4], [0, 2]]
STATES = {
    "sdar": StateConfig(block_size=B, max_group=3, num_random=1, rounding="ceil"),
    "sdar-moe": StateConfig(block_size=B, max_group=2, span="response", weighting="self_normalised"),
    "llada2": StateConfig(block_size=B, max_group=2, labels="answer", self_denoising="both"),
    "dream": StateConfig(block_size=B, layouts="one_group", rounding="ceil", weighting="block_ratio"),
    "llada": D2F_STATES,
}
TRAIN = TrainConfig(steps=6, batch_size=4, lr=1e-2, warmup=1, precision="float32", optimizer="adamw", micro_batch=2)


def examples() -> list[Example]:
    rng = random.Random(0)
    return [Example(tuple(rng.randrange(2, 300) for _ in range(n)), n // 3) for n in LENGTHS]


def batch_of(model: Decoder, states: StateConfig, together: list[list[int]] | None) -> MultiTFBatch:
    rngs = [random.Random(n) for n in range(len(LENGTHS))]
    shift, mask = model.config.shift_logits, model.config.mask_token_id
    return build_batch(examples(), states, mask_token_id=mask, rngs=rngs, shift=shift, together=together)


def loss_of(model: Decoder, batch: MultiTFBatch, states: StateConfig, attention: TrainingAttention = DENSE) -> Tensor:
    if states.layouts == "d2f":
        return distillation_loss(model, batch, "student_teacher", attention=attention)[0]
    return multitf_loss(model, batch, attention=attention)[0]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 80))
def test_every_sample_stands_in_one_sequence_that_has_room(lengths: list[int], room: int) -> None:
    together = packed_together(lengths, room)
    assert sorted(n for numbers in together for n in numbers) == list(range(len(lengths)))
    assert all(len(numbers) == 1 or sum(lengths[n] for n in numbers) <= room for numbers in together)
    tokens = [sum(lengths[n] for n in numbers) for numbers in together]
    assert all(a + b > room for i, a in enumerate(tokens) for b in tokens[i + 1 :])  # no two could be one


@given(st.lists(st.integers(1, 60), min_size=12, max_size=12), st.integers(1, 80))
def test_all_workers_have_equally_many_sequences(lengths: list[int], room: int) -> None:
    packed = packed_alike([lengths[rank::3] for rank in range(3)], room)
    assert len({len(together) for together in packed}) == 1
    assert all(sorted(n for numbers in together for n in numbers) == list(range(4)) for together in packed)
    assert any(together == packed_together(lengths[rank::3], room) for rank, together in enumerate(packed))


@pytest.mark.parametrize("family", STATES)
def test_packed_samples_have_the_losses_and_gradients_of_separate_sequences(family: str) -> None:
    """In float64: each objective and mask, also where logits come from the place before a label."""
    states, model = STATES[family], random_model(FAMILIES[family]).double().train()

    def gradients(together: list[list[int]] | None) -> tuple[float, list[Tensor]]:
        model.zero_grad()
        loss = loss_of(model, batch_of(model, states, together), states)
        loss.backward()
        return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (separate, expected), (packed, found) = gradients(None), gradients(TOGETHER)
    assert separate > 1e-3 and packed == pytest.approx(separate, rel=1e-6)
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-6 * max(1e-3, float(other.abs().max()))


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_no_sample_sees_another(family: str) -> None:
    states, model = STATES[family], random_model(FAMILIES[family]).eval()
    batch = batch_of(model, states, TOGETHER)
    other = batch.sample == 3
    changed = replace(batch, input_ids=torch.where(other, (batch.input_ids + 7) % 300, batch.input_ids))
    for whole in (False, True):
        with torch.no_grad():
            before, after = (model(b.input_ids, b.positions, DENSE.of(b, whole=whole)) for b in (batch, changed))
        assert torch.equal(before[~other], after[~other]) and not torch.equal(before[other], after[other])


@pytest.mark.parametrize("family", ["sdar", "llada2", "llada"])
def test_the_operations_that_the_model_asks_for_are_the_same(family: str) -> None:
    states, model = STATES[family], random_model(FAMILIES[family])
    separate, packed = (batch_of(model, states, together) for together in (None, TOGETHER))
    assert packed.num_samples == separate.num_samples == 5 and packed.num_tokens == separate.num_tokens
    assert visible_pairs(packed) == visible_pairs(separate)
    kinds = {"rolls_out": family == "llada2", "distills": family == "llada"}
    assert update_flops(model.config, packed, **kinds) == update_flops(model.config, separate, **kinds)
    assert packed.input_ids.numel() < 0.7 * separate.input_ids.numel()


def trainer_of(pack: int | None, family: str = "sdar", train: TrainConfig = TRAIN, **workers: int) -> Trainer:
    rng = random.Random(1)
    lengths = [B * rng.randrange(2, 12) for _ in range(12)]
    samples = [Example(tuple(rng.randrange(2, 300) for _ in range(n)), n // 3) for n in lengths]
    return Trainer(random_model(FAMILIES[family]), samples, STATES[family], replace(train, pack=pack), **workers)


def steps(trainer: Trainer, count: int) -> list[StepMetrics]:
    return [trainer.step() for _ in range(count)]


def test_a_packed_training_is_the_separate_one_with_less_padding() -> None:
    train = replace(TRAIN, batch_size=12, micro_batch=None)
    separate, packed = (steps(trainer_of(pack, train=train), 4) for pack in (None, 48))
    assert [m.loss for m in packed] == pytest.approx([m.loss for m in separate], rel=1e-4)
    assert [m.tokens for m in packed] == [m.tokens for m in separate]
    assert [m.tflop for m in packed] == pytest.approx([m.tflop for m in separate])
    assert all(m.point()["padding"] == 1 - m.tokens / m.positions for m in packed + separate)
    assert all(few.point()["padding"] < 0.5 * m.point()["padding"] for few, m in zip(packed, separate, strict=True))


def test_what_an_adapter_drops_of_a_sample_does_not_depend_on_packing() -> None:
    lora = LoraSettings(rank=4, alpha=8, dropout=0.5)
    train = replace(TRAIN, distillation="student_teacher", lora=lora)
    separate, packed = (trainer_of(pack, "llada", train) for pack in (None, 100))
    assert len(packed.batch(0).input_ids) < len(separate.batch(0).input_ids)
    expected = [metrics.loss for metrics in steps(separate, 4)]
    assert [metrics.loss for metrics in steps(packed, 4)] == pytest.approx(expected, rel=1e-4)


def test_a_resumed_packed_run_is_the_uninterrupted_one() -> None:
    through, first, second = (trainer_of(48) for _ in range(3))
    expected, begun = steps(through, 5), steps(first, 2)
    load_trainer(second, trainer_state(first))
    assert begun + steps(second, 3) == expected


def test_ranks_pack_their_shares_into_equally_many_sequences() -> None:
    for step in range(3):
        whole, *shares = (trainer_of(48, rank=r, world_size=w).batch(step) for r, w in ((0, 1), (0, 2), (1, 2)))
        assert len({len(share.input_ids) for share in shares}) == 1
        assert sum(share.num_samples for share in shares) == whole.num_samples == TRAIN.batch_size
        clean = [b.input_ids[b.stream == 0].sort().values for b in (whole, *shares)]
        assert torch.equal(clean[0], torch.cat(clean[1:]).sort().values)


def test_packing_into_less_than_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="pack=0"):
        replace(TRAIN, pack=0)
