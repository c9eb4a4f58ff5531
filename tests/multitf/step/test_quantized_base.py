"""QLoRA: an adapter on a base in 4 bits trains as one on the dequantised base, and no wide matrix stays in memory."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, random_model
from torch import Tensor
from trainer_state import D2F_STATES

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.config import load_config
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded, other_settings
from mbd_core.multitf.run import __main__ as run
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.start import allowed_shardings
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.adapter import merge_adapter
from mbd_core.multitf.step.memory import Workload, fitting, plan_memory
from mbd_core.multitf.step.quantized_base import (
    Nf4,
    Nf4Experts,
    Nf4Linear,
    check_bitsandbytes,
    dequantize_base,
    nf4_bytes,
    quantize_base,
    quantized_modules,
)
from mbd_core.multitf.step.trainer import Trainer

LORA = LoraSettings(rank=4, alpha=8, dropout=0.1)
QLORA = replace(LORA, quantize_base="nf4")
TRAIN = TrainConfig(steps=4, batch_size=2, lr=1e-2, warmup=1, optimizer="adamw", precision="float32", lora=QLORA)
CPU = torch.device("cpu")


@pytest.fixture
def _bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed (extra qlora)")


def trainer_of(model: Decoder, train: TrainConfig) -> Trainer:
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(2, 300) for _ in range(4 * rng.randrange(3, 6))), 5) for _ in range(6)]
    return Trainer(
        model, examples, D2F_STATES if model.config.attention == "full" else StateConfig(block_size=4), train
    )


def dequantized(family: str) -> Decoder:
    """A random model whose layers have what is left of them after four bits."""
    model = random_model(FAMILIES[family])
    quantize_base(model, CPU, torch.float32)
    dequantize_base(model)
    return model


@pytest.mark.usefixtures("_bitsandbytes")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("sdar", {}),
        ("sdar", {"precision": "bfloat16"}),
        ("llada2", {}),
        ("llada2", {"precision": "bfloat16", "activation_checkpointing": True}),
        ("dream", {"distillation": "student_teacher"}),  # with biases, and the base as its teacher
    ],
)
def test_it_trains_as_an_adapter_on_the_dequantised_base(family: str, changes: dict[str, object]) -> None:
    train = replace(TRAIN, **changes)
    quantized = trainer_of(random_model(FAMILIES[family]), train)
    wide = trainer_of(dequantized(family), replace(train, lora=LORA))
    unrounded = trainer_of(random_model(FAMILIES[family]), replace(train, lora=LORA))
    for step in range(train.steps):
        found, expected, other = quantized.step(), wide.step(), unrounded.step()
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        if step == 1:
            assert found.loss != pytest.approx(other.loss, rel=1e-4)
    adapters = {name: p for name, p in quantized.model.named_parameters() if p.requires_grad}
    assert adapters and all(".lora_" in name for name in adapters)
    merge_adapter(quantized.model)
    merge_adapter(wide.model)
    assert quantized.model.state_dict().keys() == random_model(FAMILIES[family]).state_dict().keys()
    for name, tensor in wide.model.state_dict().items():
        torch.testing.assert_close(quantized.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_bitsandbytes")
def test_four_bits_are_the_nearest_level_of_their_block() -> None:
    """The levels are those of the largest magnitude, whose own 8 bits are off by less than 1 %."""
    from bitsandbytes.functional import get_4bit_type

    levels = get_4bit_type("nf4", device="cpu")
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    scales = values.abs().amax(1, keepdim=True)
    nearest = levels[(values[..., None] / scales[..., None] - levels).abs().argmin(-1)] * scales
    nf4 = Nf4(values, torch.float32)
    torch.testing.assert_close(nf4.wide(), nearest, rtol=0.1, atol=0.05)
    assert nf4.num_bytes == nf4_bytes(40 * 64) == 40 * 32 + 40 + 4
    assert 8 * nf4_bytes(4096 * 4096) / 4096**2 == pytest.approx(4.127, abs=1e-3)


@pytest.mark.usefixtures("_bitsandbytes")
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_the_backward_pass_keeps_no_wide_matrix(family: str) -> None:
    def kept(lora: LoraSettings) -> set[int]:
        """Numbers in the tensors that autograd keeps, but for parameters."""
        trainer, sizes = trainer_of(random_model(FAMILIES[family]), replace(TRAIN, lora=lora)), set[int]()

        def keep(tensor: Tensor) -> Tensor:
            sizes.add(tensor.untyped_storage().nbytes() // tensor.element_size())
            return tensor

        trainer._announce(trainer.batch(0), trainer._indices(0))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.objective(trainer.batch(0))
        return sizes

    config = FAMILIES[family]
    matrices = {config.hidden_size * config.intermediate_size}
    if config.moe is not None:
        matrices.add(config.moe.num_experts * config.hidden_size * config.moe.intermediate_size)
    assert matrices & kept(LORA) and not matrices & kept(QLORA)


@pytest.mark.usefixtures("_bitsandbytes")
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_the_plan_is_what_a_training_holds(family: str) -> None:
    config = FAMILIES[family]
    model = random_model(config)
    trainer_of(model, TRAIN)
    matrices = [module.matrix for module in model.modules() if isinstance(module, Nf4Linear)]
    matrices += [s for module in model.modules() if isinstance(module, Nf4Experts) for s in module.stacks.values()]
    plan = plan_memory(workload(family))
    assert plan.weights == sum(p.nbytes for p in model.parameters()) + sum(matrix.num_bytes for matrix in matrices)
    assert plan.num_parameters == sum(p.numel() for p in model.parameters()) + sum(
        matrix.shape.numel() for matrix in matrices
    )
    assert not quantized_modules(model)


def workload(family: str, train: TrainConfig = TRAIN, **changes: object) -> Workload:
    config = SHAPES.get(family) or FAMILIES[family]
    values = {"sample_tokens": 16, "precision": "float32", "sharding": "replicated"} | changes
    return Workload(config=config, states=StateConfig(block_size=4), train=train, num_workers=1, **values)


def test_a_released_model_fits_where_an_adapter_alone_does_not() -> None:
    """8.2 billion parameters: embeddings and head in float32 with their casts, a layer at once, the rest in 4 bits."""
    train = replace(TRAIN, batch_size=1, lora=LORA, activation_checkpointing=True)
    lora, qlora = (
        plan_memory(workload("sdar-8b", replace(train, lora=each), precision="bfloat16")) for each in (LORA, QLORA)
    )
    wide = 2 * SHAPES["sdar-8b"].vocab_size * SHAPES["sdar-8b"].hidden_size
    assert lora.weights > 32e9
    assert qlora.weights == pytest.approx(4 * wide + 4.127 / 8 * (lora.num_parameters - wide), rel=0.01)
    assert qlora.gathered == pytest.approx(2 * wide + 2 * 4096 * 12288, rel=0.02)
    with pytest.raises(ValueError, match=r"--set train.lora.quantize_base=nf4$"):
        fitting([workload("sdar-8b", train, precision="bfloat16")], round(24e9))


def test_what_cannot_be_honoured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="base"):
        allowed_shardings(TRAIN, "sharded", num_workers=2)
    assert allowed_shardings(TRAIN, "auto", num_workers=2) == ["replicated"]
    with pytest.raises(ValueError, match="compile"):
        replace(TRAIN, compile=True)
    with pytest.raises(ValueError, match="quantize_base"):
        replace(LORA, quantize_base="int8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ValueError, match=r"install mbd-cluster\[qlora\]"):
        check_bitsandbytes()


@pytest.mark.usefixtures("_bitsandbytes")
def test_a_device_that_it_does_not_compute_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional

    def no_kernel(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel image is available")

    check_bitsandbytes(CPU)
    monkeypatch.setattr(functional, "quantize_4bit", no_kernel)
    with pytest.raises(ValueError, match="no kernel image"):
        trainer_of(random_model(FAMILIES["sdar"]), TRAIN)


def test_a_run_of_before_there_was_a_choice_goes_on(tiny_recipe: TrainingRecipe) -> None:
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, lora=LORA))
    recorded = as_recorded(recipe)
    del recorded["train"]["lora"]["quantize_base"]
    assert other_settings(recorded, as_recorded(recipe)) == ""
    quantized = replace(recipe, train=replace(recipe.train, lora=QLORA))
    assert "quantize_base" in other_settings(recorded, as_recorded(quantized))


@pytest.mark.usefixtures("_bitsandbytes")
def test_a_run_writes_a_peft_folder_and_goes_on(
    tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(RECIPES, tiny_recipe.name, tiny_recipe)
    monkeypatch.chdir(tmp_path)
    base = load_config(Path(str(tiny_recipe.base)))
    options = ["--recipe", tiny_recipe.name, "--steps", "4", "--lora", "2", "--set", "train.lora.quantize_base=nf4"]
    options += ["--set", f"states.block_size={base.block_size}", "--checkpoints", "run", "--every", "2"]
    assert run.main([*options, "--write", "adapter", "--out", "a"]) == 0
    assert read_adapter(Path("a"), base).rank == 2
    assert json.loads(Path("a/recipe.json").read_text())["train"]["lora"]["quantize_base"] == "nf4"
    losses = (Path("run") / LOSSES).read_text()
    (Path("run") / "step_000004" / "checkpoint.json").unlink()
    assert run.main([*options, "--out", "model"]) == 0
    assert [json.loads(line)["loss"] for line in (Path("run") / LOSSES).read_text().splitlines()] == [
        json.loads(line)["loss"] for line in losses.splitlines()
    ]
    assert load_config(Path("model")) == base
