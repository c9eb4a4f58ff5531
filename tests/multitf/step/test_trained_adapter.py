"""An adapter in training: it alone learns, the teacher is the network without it, and merged it is a plain model."""

import io
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, random_model
from peft import PeftModel
from trainer_state import D2F_STATES, load_trainer, trainer_state

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.adapter_saving import save_adapter
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.adapter import (
    adapter_factors,
    add_adapter,
    begin_adapter,
    check_start,
    merge_adapter,
    without_adapter,
)
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops.attention.whole import DenseAttention

LORA = LoraSettings(rank=4, alpha=8, dropout=0.1)
TRAIN = TrainConfig(
    steps=6,
    batch_size=2,
    lr=1e-2,
    warmup=1,
    schedule="constant",
    optimizer="adamw",
    precision="float32",
    distillation="student_teacher",
    lora=LORA,
)


def trainer_of(
    family: str = "dream", train: TrainConfig = TRAIN, states: StateConfig = D2F_STATES, **workers: int
) -> Trainer:
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(2, 300) for _ in range(rng.randrange(12, 24))), 5) for _ in range(6)]
    return Trainer(random_model(FAMILIES[family]), examples, states, train, **workers)


def outputs(model: Decoder) -> torch.Tensor:
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(12)[None], DenseAttention(torch.ones(1, 1, 12, 12).bool())))


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_distillation_teaches_the_adapter_and_nothing_else(family: str) -> None:
    trainer = trainer_of(family)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    plain = outputs(random_model(FAMILIES[family]).train())
    first = trainer.objective.eval()(trainer.batch(0), 1.0)[0].item()
    trainer.objective.train()
    for _ in range(TRAIN.steps):
        trainer.step()
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(".lora_" in name for name in changed)
    model = trainer.model.eval()
    assert trainer.objective(trainer.batch(0), 1.0)[0].item() < first
    with without_adapter(model):
        assert torch.equal(outputs(model), plain)
    adapted = outputs(model)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    merge_adapter(model)
    assert model.state_dict().keys() == random_model(FAMILIES[family]).state_dict().keys()
    torch.testing.assert_close(outputs(model), adapted, rtol=1e-4, atol=1e-4)


MODULES = {
    "sdar": ("q_proj", "v_proj", "o_proj", "down_proj"),
    "dream": ("q_proj", "k_proj", "gate_proj"),
    "llada2": ("q_proj", "v_proj", "o_proj"),  # query, key and value are one module in its checkpoints
    "llada": ("q_proj", "up_proj"),
}


@pytest.mark.parametrize("name", ["vproj", "lm_head", "embed_tokens", "gate"])
def test_a_module_that_gets_no_adapter_is_refused(name: str) -> None:
    """peft leaves out a name that is nowhere, beside one that is."""
    lora = replace(LORA, modules=("self_attn.q_proj", name))
    with pytest.raises(ValueError, match=f"'{name}', which is no projection .* names here are q_proj, k_proj, "):
        add_adapter(random_model(FAMILIES["sdar-moe"]), lora, seed=0)


@pytest.mark.parametrize("family", MODULES)
def test_an_adapter_folder_holds_what_was_trained(family: str, tmp_path: Path) -> None:
    """Read by serving's reader, and by peft where the decoder has the names of the published model."""
    lora = LoraSettings(rank=3, alpha=5, dropout=0.0, modules=MODULES[family])
    model = random_model(FAMILIES[family])
    add_adapter(model, lora, seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    factors = adapter_factors(model)
    save_adapter(
        tmp_path / "a",
        model.config,
        factors,
        rank=3,
        alpha=5,
        dropout=0.0,
        base="base",
        base_values={},
        extra={"note.txt": "x"},
    )
    adapter = read_adapter(tmp_path / "a", model.config)
    for name, (a, b) in adapter.factors.items():
        assert any(name.endswith(module) for module in lora.modules) == (name in factors)
        expected = factors[name][1] @ factors[name][0] * 5 / 3 if name in factors else torch.zeros(len(b), a.shape[1])
        torch.testing.assert_close(b @ a, expected, rtol=1e-5, atol=1e-6)
    assert factors.keys() <= adapter.factors.keys()
    if family == "sdar":
        loaded = PeftModel.from_pretrained(random_model(FAMILIES[family]), str(tmp_path / "a"))
        torch.testing.assert_close(outputs(loaded.base_model.model), outputs(model.eval()), rtol=1e-5, atol=1e-5)


def test_a_resumed_run_drops_what_the_uninterrupted_one_dropped() -> None:
    through, first = trainer_of(), trainer_of()
    expected = [through.step() for _ in range(4)]
    begun = [first.step() for _ in range(2)]
    file = io.BytesIO()
    torch.save(trainer_state(first), file)
    file.seek(0)
    torch.manual_seed(123)
    second = trainer_of()
    load_trainer(second, torch.load(file, weights_only=True))
    assert begun + [second.step() for _ in range(2)] == expected


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_what_is_dropped_is_the_sample_s(again: bool) -> None:
    """Not the worker's nor its neighbours': one worker, two, and one sample at a time have the same loss."""
    train = replace(TRAIN, batch_size=4, lora=replace(LORA, dropout=0.5), activation_checkpointing=again)

    def losses(train: TrainConfig, **workers: int) -> list[float]:
        trainer = trainer_of(train=train, states=replace(D2F_STATES, weighting="masked_mean"), **workers)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if ".lora_B" in name:
                    parameter.fill_(0.05)
        return [trainer.step().loss for _ in range(2 if "world_size" not in workers else 1)]

    alone = losses(train)
    assert losses(replace(train, micro_batch=1)) == pytest.approx(alone, rel=1e-5)
    first, second = (losses(train, rank=rank, world_size=2)[0] for rank in range(2))
    assert (first + second) / 2 == pytest.approx(alone[0], rel=1e-5)
    without = losses(replace(train, lora=replace(LORA, dropout=0.0)))
    assert without[0] != pytest.approx(alone[0], rel=1e-3)
    assert losses(replace(train, seed=1))[0] != pytest.approx(alone[0], rel=1e-3)


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ValueError, match="needs lora"):
        replace(TRAIN, lora=None)
    with pytest.raises(ValueError, match="rank=0"):
        LoraSettings(rank=0)


def test_a_fresh_adapter_changes_nothing_and_draws_nothing() -> None:
    model = random_model(FAMILIES["sdar"])
    plain, state = outputs(model), torch.get_rng_state()
    add_adapter(model, LoraSettings(dropout=0.0), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(outputs(model), plain)


def test_an_adapter_goes_on_from_another_one(tmp_path: Path) -> None:
    """It computes what that one does, also by another alpha; what has another rank or other projections is refused."""
    first = random_model(FAMILIES["sdar"])
    add_adapter(first, LoraSettings(rank=3, alpha=5, dropout=0.0), seed=3)
    for name, parameter in first.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(0.0, 0.1)
    save_adapter(
        tmp_path / "a",
        first.config,
        adapter_factors(first),
        rank=3,
        alpha=5,
        dropout=0.0,
        base="base",
        base_values={},
        extra={},
    )
    start = read_adapter(tmp_path / "a", first.config)

    def begun(settings: LoraSettings) -> Decoder:
        model = random_model(FAMILIES["sdar"])
        add_adapter(model, settings, seed=8)
        begin_adapter(model, start)
        return model

    for alpha in (5, 9):
        model = begun(LoraSettings(rank=3, alpha=alpha, dropout=0.0))
        torch.testing.assert_close(outputs(model), outputs(first), rtol=1e-5, atol=1e-5)
    check_start(start, LoraSettings(rank=3, modules=("v_proj", "o_proj", "k_proj", "q_proj")))
    with pytest.raises(ValueError, match="give --lora 3"):
        check_start(start, LoraSettings(rank=4))
    with pytest.raises(ValueError, match=r"changes k_proj, o_proj, q_proj, v_proj, not q_proj: give --set"):
        check_start(start, LoraSettings(rank=3, modules=("q_proj",)))
    with pytest.raises(ValueError, match="only one of the adapter"):
        begun(LoraSettings(rank=3, modules=("q_proj",)))
