"""Recipes, models and data that do not fit are refused in one sentence, before anything is trained."""

from dataclasses import replace
from pathlib import Path

import pytest
from family_models import FAMILIES
from full_attention_folder import make_folder
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.config import LoraSettings, Sharding, ShardingChoice
from mbd_core.multitf.data.encoding import EncodedChat, tokenizer_fingerprint
from mbd_core.multitf.data.prepared import TinyData, named_data, write_record, write_samples
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, shortened, with_precision
from mbd_core.multitf.run.beginning import prepare
from mbd_core.multitf.run.start import StartingPoint, check_model
from mbd_core.multitf.step.memory import RESERVE, Workload, fitting, plan_memory
from mbd_core.multitf.step.trainer import Trainer

MULTITF, D2F = RECIPES["tiny-mbd"], replace(RECIPES["D2F-LLaDA"], architectures=())


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model_dir, load_model(tiny_model_dir).config)


def test_a_recipe_with_other_blocks_than_its_base_says_so() -> None:
    wider = replace(MULTITF, base="tiny-bd", states=replace(MULTITF.states, block_size=32))
    note = "tiny-bd has blocks of 16; recipe tiny-mbd makes a model with blocks of 32"
    assert StartingPoint.read(wider).note() == note
    assert StartingPoint.read(MULTITF).note() is None
    assert StartingPoint.read(RECIPES["tiny-bd-b8"]).note() is None  # it has no base


def test_a_base_without_blocks_has_none_that_change(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    base = str(make_folder("llada", tmp_path / "llada", tokenizer))
    assert StartingPoint.read(replace(D2F, base=base, data=TinyData(per_task=1), max_length=64)).note() is None


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_model_of_whole_sequences_is_not_trained_under_a_block_causal_mask(family: str) -> None:
    config = replace(FAMILIES[family], max_positions=4096)
    with pytest.raises(ValueError, match="D2F"):
        check_model(MULTITF, config, "mine")
    check_model(D2F, config, "mine")
    check_model(replace(RECIPES["D2F-LLaDA-block-causal"], architectures=()), config, "mine")


def test_the_refusal_comes_before_a_sample_is_drawn(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    recipe = replace(MULTITF, base=str(make_folder("dream", tmp_path / "dream", tokenizer)))
    with pytest.raises(ValueError, match="whole sequences"):
        StartingPoint.read(recipe)


def test_a_block_causal_model_has_no_bidirectional_teacher() -> None:
    with pytest.raises(ValueError, match="teacher"):
        check_model(D2F, replace(FAMILIES["sdar"], max_positions=4096), "mine")


def test_a_recipe_is_for_its_families() -> None:
    with pytest.raises(ValueError, match="SDARForCausalLM"):
        check_model(RECIPES["LLaDA2-Mini"], FAMILIES["sdar"], "mine")


def test_samples_longer_than_the_models_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="64 positions"):
        check_model(MULTITF, FAMILIES["sdar"], "mine")


def data_folder(folder: Path, tokenizer: PreTrainedTokenizerBase, *, samples: int = 24, length: int = 20) -> Path:
    folder.mkdir()
    rows = (EncodedChat([2, 3, 4], [5 + i % 40] * (length - 4)) for i in range(samples))
    about = {"tokenizer": tokenizer_fingerprint(tokenizer), "eos_token_id": 1, "mask_token_id": 0, "max_length": 2048}
    write_record(folder, about | write_samples(folder, rows))
    return folder


def test_prepared_data_are_trained_by_any_recipe_that_they_fit(
    tiny_recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    folder = data_folder(tmp_path / "data", tokenizer)
    recipe = shortened(replace(tiny_recipe, data=named_data(folder)), 3)
    model, _, examples = prepare(StartingPoint.read(recipe))
    assert len(examples) == 24 and examples[3].tokens == (2, 3, 4, *[8] * 16, 1)
    trainer = Trainer(model, examples, recipe.states, recipe.train)
    assert trainer.step().loss > 0
    filled = replace(recipe, trailing_fill=32)
    assert prepare(StartingPoint.read(filled))[2][3].tokens == (2, 3, 4, *[8] * 16, *[1] * 33)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"samples": 7}, "holds 7 samples, fewer than a batch of recipe tiny-random"),
        ({"length": 401}, "have room for 400: prepare it again with --max-length 400"),
    ],
)
def test_prepared_data_that_are_too_few_or_too_long_are_refused(
    tiny_recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, changes: dict, sentence: str
) -> None:
    recipe = replace(tiny_recipe, data=named_data(data_folder(tmp_path / "data", tokenizer, **changes)))
    with pytest.raises(ValueError, match=sentence):
        StartingPoint.read(recipe)


def test_data_of_another_tokenizer_are_refused(
    tiny_recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    recipe = replace(tiny_recipe, data=named_data(data_folder(tmp_path / "data", tokenizer)), base="tiny-bd")
    with pytest.raises(ValueError, match="prepare it again"):
        StartingPoint.read(recipe)


def test_data_that_changed_since_are_refused(
    tiny_recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    data = named_data(data_folder(tmp_path / "data", tokenizer))
    with pytest.raises(ValueError, match="changed"):
        StartingPoint.read(replace(tiny_recipe, data=replace(data, digest="other")))


def test_what_cannot_be_trained_so_is_refused_before_a_plan(tiny_recipe: TrainingRecipe) -> None:
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, attention="flex"))
    with pytest.raises(ValueError, match="attention=flex"):
        StartingPoint.read(recipe).workloads("sharded", num_workers=2, device="CPU")


def test_weights_are_sharded_where_replicas_do_not_fit(tiny_recipe: TrainingRecipe) -> None:
    train = replace(tiny_recipe.train, micro_batch=1, activation_checkpointing=True)
    recipe = replace(tiny_recipe, train=train)

    start = StartingPoint.read(with_precision(recipe, "float32"))

    def workloads(choice: ShardingChoice, workers: int = 4) -> list[Workload]:
        return start.workloads(choice, num_workers=workers, device="GPU")

    def chosen(choice: ShardingChoice, available: int, workers: int = 4) -> Sharding:
        return fitting(workloads(choice, workers), available)[0].sharding

    needed = {one.sharding: plan_memory(one).total for one in workloads("auto")}
    assert needed["sharded"] < needed["replicated"]
    room = {way: round(total / (1 - RESERVE)) + 1 for way, total in needed.items()}
    assert chosen("auto", room["replicated"]) == "replicated"
    assert chosen("auto", room["sharded"]) == "sharded"
    assert chosen("sharded", room["replicated"], workers=1) == "replicated"
    with pytest.raises(ValueError, match="--sharding sharded on 4 GPUs"):
        chosen("replicated", room["sharded"])


def test_an_adapter_may_be_trained_over_sharded_weights(tiny_recipe: TrainingRecipe) -> None:
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, lora=LoraSettings(rank=2)))
    start = StartingPoint.read(recipe)
    workloads = start.workloads("auto", num_workers=4, device="GPU")
    assert [one.sharding for one in workloads] == ["replicated", "sharded"]
    sharded, _ = fitting(start.workloads("sharded", num_workers=4, device="GPU"), 10**12)
    assert sharded.sharding == "sharded"
