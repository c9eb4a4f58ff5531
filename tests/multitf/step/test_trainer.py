"""The trainer: a step learns, a resumed run is the same run, any number of ranks sees one global batch."""

import io
import random
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model
from trainer_state import load_trainer, trainer_state

from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.beginning import prepare
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.trainer import Diverged, Trainer


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in one order, so that equal means equal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_trainer(recipe: TrainingRecipe, *, rank: int = 0, world_size: int = 1) -> Trainer:
    model, _, examples = prepare(StartingPoint.read(recipe))
    return Trainer(model, examples, recipe.states, recipe.train, rank=rank, world_size=world_size)


def rows(batch: MultiTFBatch) -> list[tuple[tuple[int, ...], ...]]:
    """Each sample's unpadded ids and labels."""
    kept = batch.stream >= 0
    return [
        tuple(tuple(column[i][kept[i]].tolist()) for column in (batch.input_ids, batch.labels))
        for i in range(batch.num_samples)
    ]


def test_a_step_lowers_the_loss_of_its_batch(tiny_recipe):
    trainer = new_trainer(tiny_recipe)
    batch = trainer.batch(0)
    loss, _ = trainer.objective(batch)
    metrics = trainer.step()
    lower_loss, _ = trainer.objective(batch)
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-6)
    assert lower_loss < loss - 0.05


def test_a_run_that_diverged_ends_before_its_weights_are_no_numbers(tiny_recipe):
    trainer = new_trainer(replace(tiny_recipe, train=replace(tiny_recipe.train, lr=1e8, warmup=0)))
    trainer.step()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(Diverged, match=r"update 2 has gradients that are not finite.* than 1e"):
        trainer.step()
    assert trainer.step_number == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_a_resumed_run_is_the_uninterrupted_one(tiny_recipe):
    through, first = new_trainer(tiny_recipe), new_trainer(tiny_recipe)
    expected = [through.step() for _ in range(7)]
    metrics = [first.step() for _ in range(3)]
    file = io.BytesIO()
    torch.save(trainer_state(first), file)
    file.seek(0)
    second = new_trainer(tiny_recipe)
    load_trainer(second, torch.load(file, weights_only=True))
    assert second.step_number == 3
    assert metrics + [second.step() for _ in range(4)] == expected
    for name, tensor in through.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_the_ranks_share_one_global_batch(tiny_recipe):
    whole = rows(new_trainer(tiny_recipe).batch(5))
    for world_size in (2, 4):
        shards = [rows(new_trainer(tiny_recipe, rank=r, world_size=world_size).batch(5)) for r in range(world_size)]
        assert sorted(row for shard in shards for row in shard) == sorted(whole)


def test_noise_is_drawn_anew_each_epoch(tiny_recipe):
    trainer = new_trainer(tiny_recipe)
    per_epoch = len(trainer.examples) // tiny_recipe.train.batch_size
    epochs = [[row for s in range(per_epoch) for row in rows(trainer.batch(e * per_epoch + s))] for e in range(2)]
    clean = [sorted(tuple(t for t in labels if t != IGNORE) for _, labels in epoch) for epoch in epochs]
    assert clean[0] != clean[1]


def test_gradients_of_the_ranks_average_to_the_whole(tiny_recipe):
    def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
        trainer.objective(trainer.batch(2))[0].backward()
        return {name: p.grad for name, p in trainer.model.named_parameters()}

    whole = gradients(new_trainer(tiny_recipe))
    shards = [gradients(new_trainer(tiny_recipe, rank=rank, world_size=2)) for rank in range(2)]
    for name, expected in whole.items():
        mean = (shards[0][name] + shards[1][name]) / 2
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert expected.abs().max() > 0, name


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_layers_that_are_computed_again_give_the_same_update(family):
    kept: list[int] = []

    def run(activation_checkpointing: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = random_model(FAMILIES[family])
        rng = random.Random(0)
        examples = [Example(tuple(rng.randrange(2, 300) for _ in range(32)), 5) for _ in range(4)]
        config = TrainConfig(
            steps=3, batch_size=2, lr=1e-3, precision="float32", activation_checkpointing=activation_checkpointing
        )
        trainer = Trainer(model, examples, StateConfig(block_size=4, max_group=2), config)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            trainer.objective(trainer.batch(0))
        kept.append(sum(sizes))
        return [trainer.step().loss for _ in range(3)], model.state_dict()

    (losses, weights), (same, again) = run(False), run(True)
    assert losses == same
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert kept[1] < 0.7 * kept[0]


def test_the_other_schedules_end_where_they_say():
    config = TrainConfig(steps=100, batch_size=1, lr=1.0, warmup=10, schedule="cosine", lr_min=0.1)
    assert [config.lr_at(s) for s in (0, 9)] == [0.1, 1.0]
    assert config.lr_at(54) == pytest.approx(0.55) and config.lr_at(99) == pytest.approx(0.1)
    linear = replace(config, schedule="linear")
    assert linear.lr_at(54) == pytest.approx(0.55) and linear.lr_at(99) == pytest.approx(0.1)
    assert replace(config, schedule="constant").lr_at(99) == 1.0


def test_the_learning_rate_warms_up_stays_and_decays():
    config = TrainConfig(steps=100, batch_size=1, lr=1.0, warmup=10, decay=0.4)
    assert [config.lr_at(s) for s in (0, 4, 9, 30, 60)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert config.lr_at(80) == pytest.approx(0.5)
    assert config.lr_at(99) == pytest.approx(1 / 40)


def test_what_cannot_be_trained_is_refused(tiny_recipe):
    with pytest.raises(ValueError, match="batch_size=8"):
        new_trainer(tiny_recipe, world_size=3)
    with pytest.raises(ValueError, match="batch_size=800"):
        new_trainer(replace(tiny_recipe, train=replace(tiny_recipe.train, batch_size=800)))
    with pytest.raises(ValueError, match="steps=0"):
        replace(tiny_recipe.train, steps=0)
