"""An adapter in training: it alone learns, the teacher is the network without it, and merged it is a plain model."""

import io
import random
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.example import Example
from mbd_core.multitf.noise import NoiseBounds
from mbd_core.multitf.states import StateConfig
from mbd_core.multitf.trained_adapter import LoraSettings, add_adapter, merge_adapter, without_adapter
from mbd_core.multitf.trainer import TrainConfig, Trainer
from mbd_core.ops.attention_dense import DenseAttention

STATES = StateConfig(
    block_size=4,
    layouts="d2f",
    schedule="d2f_monotonic",
    bounds=NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0),
    rounding="bernoulli",
    weighting="ratio_mean",
)
TRAIN = TrainConfig(
    steps=6,
    batch_size=2,
    lr=1e-2,
    warmup=1,
    schedule="constant",
    optimizer="adamw",
    precision="float32",
    distillation="student_teacher",
    lora=LoraSettings(rank=4, alpha=8, dropout=0.1),
)


def trainer_of(family: str = "dream", train: TrainConfig = TRAIN) -> Trainer:
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(2, 300) for _ in range(20)), 5) for _ in range(6)]
    return Trainer(random_model(FAMILIES[family]), examples, STATES, train)


def outputs(model: Decoder) -> torch.Tensor:
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(12)[None], DenseAttention(torch.ones(1, 1, 12, 12).bool())))


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_distillation_teaches_the_adapter_and_nothing_else(family: str) -> None:
    trainer = trainer_of(family)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    plain = outputs(random_model(FAMILIES[family]).train())
    first = [trainer.objective(trainer.batch(0), 1.0)[0].item() for _ in range(1)]
    for _ in range(TRAIN.steps):
        trainer.step()
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(".lora_" in name for name in changed)
    model = trainer.model.eval()
    assert trainer.objective(trainer.batch(0), 1.0)[0].item() < first[0]
    with without_adapter(model):
        assert torch.equal(outputs(model), plain)
    adapted = outputs(model)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    merge_adapter(model)
    assert model.state_dict().keys() == random_model(FAMILIES[family]).state_dict().keys()
    torch.testing.assert_close(outputs(model), adapted, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_drops_what_the_uninterrupted_one_dropped() -> None:
    through, first = trainer_of(), trainer_of()
    expected = [through.step() for _ in range(4)]
    begun = [first.step() for _ in range(2)]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    torch.manual_seed(123)
    second = trainer_of()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert begun + [second.step() for _ in range(2)] == expected


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ValueError, match="distillation needs lora"):
        replace(TRAIN, lora=None)
    with pytest.raises(ValueError, match="rank=0"):
        LoraSettings(rank=0)


def test_a_fresh_adapter_changes_nothing_and_draws_nothing() -> None:
    model = random_model(FAMILIES["sdar"])
    plain, state = outputs(model), torch.get_rng_state()
    add_adapter(model, LoraSettings(dropout=0.0), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outputs(model), plain)
