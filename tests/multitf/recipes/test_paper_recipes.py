"""The papers' recipes: the tables' numbers, and a step of each on a small random model of its family."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.multitf.data.example import encode_example
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.paper import PAPER_RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, shortened
from mbd_core.multitf.run.export import export
from mbd_core.multitf.run.start import check_model
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.trainer import Trainer

FAMILY = {
    "LLaDA2MoeModelLM": "tiny-llada2",
    "SDARForCausalLM": "tiny-sdar",
    "LLaDAModelLM": "tiny-llada",
    "DreamModel": "tiny-dream",
}
# Block, Max Group, N_rand, Steps (Table 5), then the buffer and tau_add (Table 4)
TABLE_5 = {
    "LLaDA2-Mini-DMax": (32, 2, 0, 15000, 2, 0.1),
    "LLaDA2-Mini-DMax-code": (32, 2, 2, 4000, 2, 0.9),
    "LLaDA2-Mini": (32, 2, 0, 15000, 2, 0.1),
    "LLaDA2-Mini-code": (32, 2, 0, 6500, 2, 0.9),
    "SDAR-8B-b32": (32, 4, 3, 3125, 4, 0.1),
    "SDAR-8B-b32-code": (32, 4, 3, 1670, 4, 0.9),
    "SDAR-8B-b4": (4, 4, 2, 1250, 4, 0.1),
    "SDAR-8B-b4-code": (4, 4, 2, 200, 4, 0.75),
}


@pytest.mark.parametrize("name", TABLE_5)
def test_the_rows_of_table_5_are_recipes(name: str) -> None:
    recipe = RECIPES[name]
    states, generation = recipe.states, recipe.generation
    row = (states.block_size, states.max_group, states.num_random, recipe.train.steps)
    assert (*row, generation["buffer_size"], generation["tau_add"]) == TABLE_5[name]
    bounds = states.bounds
    assert (bounds.t_low, bounds.t_high, bounds.margin, recipe.max_length) == (0.001, 1.0, 0.01, 2048)
    assert states.schedule == "chain_uniform" and states.span == "content" and states.rounding == "floor"
    assert (states.self_denoising == "both") == ("DMax" in name)
    assert (states.weighting == "block_ratio") == name.startswith("SDAR")


def test_each_names_its_source_and_needs_a_model_and_data() -> None:
    assert len({recipe.name for recipe in PAPER_RECIPES}) == len(PAPER_RECIPES)
    for recipe in PAPER_RECIPES:
        assert any(word in recipe.source for word in ("Table 5", "Table 2b", "released", "Eq. 3", "App. C.5"))
        assert (recipe.base, recipe.model, recipe.data) == (None, None, None) and recipe.architectures


@pytest.mark.parametrize("recipe", PAPER_RECIPES, ids=lambda r: r.name)
def test_a_step_of_each_on_a_small_model_of_its_family(recipe: TrainingRecipe) -> None:
    config = SHAPES[FAMILY[recipe.architectures[0]]]
    check_model(replace(recipe, max_length=config.max_positions), config, "a small one")
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    model.requires_grad_(True)
    rng, block = random.Random(0), recipe.states.block_size
    eos = config.eos_token_ids[0]
    examples = []
    for length in (30, 45):
        tokens = [rng.randrange(2, 200) for _ in range(length)]
        example = encode_example(
            tokens[:9],
            tokens[9:],
            eos_token_id=eos,
            block_size=block,
            max_length=128,
            trailing_fill=recipe.trailing_fill,
        )
        assert example is not None
        examples.append(example)
    short = shortened(replace(recipe, train=replace(recipe.train, batch_size=2, precision="float32")), 2)
    trainer = Trainer(model, examples, short.states, short.train)
    assert all(torch.isfinite(torch.tensor(trainer.step().loss)) for _ in range(2))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"layouts": "random"}, "layouts=random needs max_group >= 2 and num_random >= 1"),
        ({"layouts": "d2f", "max_group": 2}, "layouts=d2f is one layout"),
        ({"schedule": "slot_ranges"}, "needs bounds.slots"),
        ({"labels": "answer", "weighting": "block_ratio"}, "labels=answer is weighted by masked_mean"),
    ],
)
def test_training_states_that_contradict_themselves_are_refused(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StateConfig(block_size=4, **fields)


@pytest.mark.parametrize("name", ["D2F-LLaDA", "D2F-Dream", "D2F-LLaDA-block-causal"])
def test_a_model_of_d2f_is_written_so_that_it_decodes_as_recommended(
    name: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Trained in blocks of 16, decoded in blocks of 64 or 32."""
    recipe = RECIPES[name]
    words = {"vocab_size": 512, "mask_token_id": 0, "eos_token_ids": (1,), "block_size": recipe.states.block_size}
    config = replace(SHAPES[FAMILY[recipe.architectures[0]]], **words)
    tokenizer = load_tokenizer(tiny_model_dir, load_config(tiny_model_dir))
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    export(tmp_path / "model", recipe, model, tokenizer, None)
    folder = read_folder(tmp_path / "model")
    assert folder.config.block_size == folder.defaults["block_size"] == recipe.generation["block_size"] != 16
    decoding = decoding_config(folder.defaults, {}, block_size=folder.config.block_size)
    assert decoding.buffer_size == recipe.generation["buffer_size"]
