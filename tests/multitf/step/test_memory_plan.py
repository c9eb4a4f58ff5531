"""The memory plan: sizes that can be counted by hand, the released shapes, and what a real training holds."""

import random
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model

from mbd_core.models.decoder import DecoderLayer
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.step.activation_memory import kept_bytes
from mbd_core.multitf.step.memory import RESERVE, Workload, fitting, plan_lines, plan_memory, sequence_tokens
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops.attention.whole import DenseAttention

PLAIN = TrainConfig(steps=1, batch_size=4, lr=1e-3, precision="float32", optimizer="adamw")


def workload(config: ModelConfig, train: TrainConfig = PLAIN, *, workers: int = 1, **changes) -> Workload:
    values = {"states": StateConfig(block_size=4), "sample_tokens": 16, "precision": "float32"} | changes
    sharding = "sharded" if workers > 1 else "replicated"
    return Workload(config=config, train=train, num_workers=workers, **({"sharding": sharding} | values))


def of_recipe(name: str, shape: str, *, workers: int, sharding: str = "sharded") -> Workload:
    recipe = RECIPES[name]
    return workload(
        SHAPES[shape],
        recipe.train,
        workers=workers,
        states=recipe.states,
        sample_tokens=recipe.max_length,
        precision="bfloat16",
        sharding=sharding,
    )


def test_a_size_that_is_counted_by_hand() -> None:
    """Two layers of 16 x 16 x 4 attention (4 heads, 2 for keys and values, of 8) and 3 matrices 16 x 24."""
    layer = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24 + 2 * 16 + 2 * 8
    count = 2 * 300 * 16 + 2 * layer + 16
    plan = plan_memory(workload(FAMILIES["sdar"], dense=True))
    assert (plan.num_parameters, plan.num_trained) == (count, count)
    assert (plan.weights, plan.gradients, plan.optimizer, plan.gathered) == (4 * count, 4 * count, 8 * count, 0)
    assert plan.mask == 4 * (2 * 16) ** 2 * (1 + 4)
    assert plan_memory(workload(FAMILIES["sdar"])).mask == 0
    muon = plan_memory(workload(FAMILIES["sdar"], replace(PLAIN, optimizer="muon")))
    matrices = 2 * (layer - 2 * 16 - 2 * 8)
    assert muon.optimizer == 4 * matrices + 8 * (count - matrices)


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("SDAR-8B-b32", "sdar-8b", 8.191e9),
        ("LLaDA2-Mini", "llada2-mini", 16.256e9),
    ],
)
def test_the_released_models_are_cut_among_their_workers(name: str, shape: str, count: float) -> None:
    alone = plan_memory(of_recipe(name, shape, workers=1, sharding="replicated"))
    four = plan_memory(of_recipe(name, shape, workers=4))
    assert alone.num_parameters == pytest.approx(count, rel=1e-3)
    assert alone.weights + alone.gradients + alone.optimizer == 16 * alone.num_parameters
    assert four.weights == pytest.approx(alone.weights / 4, rel=1e-4) and four.weights * 4 >= alone.weights
    assert four.activations <= alone.activations


def test_the_plan_of_the_papers_recipe_in_one_line() -> None:
    asked = of_recipe("SDAR-8B-b32", "sdar-8b", workers=4)
    assert sequence_tokens(asked) == (13 * 2048, 12 * 2048)
    assert plan_lines(asked, plan_memory(asked))[0] == "memory: 8.19B parameters, 4 GPUs, sharded: 60.1 GB each"


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
@pytest.mark.parametrize("family", ["sdar", "llada2", "dream"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_is_what_a_training_holds(family: str, optimizer: str, lora: LoraSettings | None) -> None:
    config, train = FAMILIES[family], replace(PLAIN, optimizer=optimizer, lora=lora)
    plan = plan_memory(workload(config, train))
    model = random_model(config)
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(2, 300) for _ in range(32)), 5) for _ in range(4)]
    states = (
        StateConfig(block_size=4, layouts="one_group") if config.attention == "full" else StateConfig(block_size=4)
    )
    trainer = Trainer(model, examples, states, train)
    gradients: list[int] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.nbytes))
    trainer.step()
    kept = [t for o in trainer.optimizers for state in o.state.values() for t in state.values() if t.ndim]
    assert plan.weights == sum(p.nbytes for p in model.parameters())
    assert plan.gradients == sum(gradients)
    assert plan.optimizer == sum(t.nbytes for t in kept)


def test_what_a_layer_keeps_is_counted_without_computing_it() -> None:
    config = SHAPES["tiny-sdar"]
    layer, kept = DecoderLayer(config, 0), {}
    x = torch.randn(1, 128, config.hidden_size, requires_grad=True)
    out = layer.input_layernorm(x)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer.mlp(out)
    weights = {p.data_ptr() for p in layer.parameters()}
    mlp = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)
    counted = kept_bytes(config, tokens=128, dtype=torch.float32)
    assert mlp < counted.layer < 6 * mlp
    assert counted.layers == config.num_layers * counted.layer
    assert counted.inputs == config.num_layers * 128 * config.hidden_size * 4
    twice = kept_bytes(config, tokens=256, dtype=torch.float32)
    assert twice.layer == pytest.approx(2 * counted.layer, rel=0.01)


def test_all_layers_keep_one_dense_mask() -> None:
    """The pairs of tokens that the backward pass holds are those of the plan: one bool mask, one in float32."""
    model, tokens, kept = random_model(FAMILIES["sdar"]), 96, {}
    stream = torch.zeros(1, tokens, dtype=torch.long)
    block = torch.arange(tokens)[None] // 4
    attention = DenseAttention(dual_stream_mask(stream, block, block + 1)[:, None])

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (tokens, tokens):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(torch.full((1, tokens), 2), torch.arange(tokens)[None], attention)
    assert model.config.num_layers > 1 and [t.nbytes for t in kept.values()] == [4 * tokens**2]


@pytest.mark.parametrize(
    ("changes", "room", "remedy"),
    [
        ({}, 45, "it fits with --set train.micro_batch=1"),
        ({"micro_batch": 1}, 33, "it fits with --set train.activation_checkpointing=true"),
        ({"micro_batch": 1, "activation_checkpointing": True}, 25, "it fits with --sharding sharded on 2 GPUs"),
        ({"micro_batch": 1, "activation_checkpointing": True}, 0.1, "choose a smaller model or shorter samples"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(changes: dict, room: float, remedy: str) -> None:
    asked = workload(SHAPES["sdar-1.7b"], replace(PLAIN, **changes), sample_tokens=512)
    with pytest.raises(ValueError, match=remedy):
        fitting([asked], int(room * 1e9))


def test_the_base_of_an_adapter_is_cut_among_its_workers() -> None:
    alone = plan_memory(of_recipe("D2F-LLaDA", "llada-8b", workers=1, sharding="replicated"))
    four = plan_memory(of_recipe("D2F-LLaDA", "llada-8b", workers=4))
    assert four.weights == pytest.approx(alone.weights / 4, rel=1e-3)
    assert (four.num_trained, four.num_parameters) == (alone.num_trained, alone.num_parameters)
    assert four.gradients == pytest.approx(alone.gradients / 4, rel=1e-3)
    largest = 2 * (2 * 4096 * 126464 + 2 * 4 * 4096 * 4096 + 2 * 3 * 4096 * 12288)
    assert largest < four.gathered < 1.02 * largest, (
        "embeddings, head and two layers in bfloat16, and no gradient of them"
    )
    asked = of_recipe("D2F-LLaDA", "llada-8b", workers=2, sharding="replicated")
    with pytest.raises(ValueError, match="--sharding sharded on 4 GPUs"):
        fitting([asked], round(four.total / (1 - RESERVE)) + 1)


def test_packed_samples_are_fewer_and_longer_sequences() -> None:
    asked = workload(FAMILIES["sdar"], replace(PLAIN, batch_size=8), sample_tokens=16)
    packed = replace(asked, train=replace(asked.train, pack=56))
    assert (asked.sequences_at_once, packed.sequences_at_once) == (8, 3)
    assert sequence_tokens(packed)[0] == 56 / 16 * sequence_tokens(asked)[0]
    alone = replace(packed, train=replace(packed.train, micro_batch=1, pack=8))
    assert alone.sequences_at_once == 1 and sequence_tokens(alone) == sequence_tokens(asked)


def test_what_fits_is_planned() -> None:
    asked = workload(FAMILIES["sdar"])
    assert fitting([asked], 10**9) == (asked, plan_memory(asked))
