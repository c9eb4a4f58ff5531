"""The shipped models: complete, small, made by the recipes that lie here, and able to do their tasks."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.config import load_generation_defaults
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.checkpoint.shipped.adapted import adapter_names
from mbd_core.decoding.blocks.methods import read_front
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import LEAST_SLOTS, EngineConfig
from mbd_core.fields import load
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import RL_RECIPE, TrainingRecipe, with_precision
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.recipes import RL_RECIPES
from mbd_core.serving.tokens.load import load_engine
from mbd_core.tasks import gsm_mini, ledger_mini

NAMES = sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def test_the_models_are_there() -> None:
    assert {"tiny-bd", "tiny-mbd", "ledger-bd", "ledger-mbd", "ledger-tf", "ledger-opd"} <= set(NAMES)


def test_together_they_are_small() -> None:
    adapters = set(adapter_names())
    assert _num_bytes(folder for folder in SHIPPED.iterdir() if folder.name not in adapters) <= 20e6
    assert _num_bytes(SHIPPED / name for name in adapters) <= 25e6


def _num_bytes(folders: Iterable[Path]) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("name", adapter_names())
def test_an_adapted_model_of_the_package_index_writes_sentences(name: str) -> None:
    try:
        folder = model_folder(name)
    except RuntimeError as error:
        pytest.skip(f"the package index gives no model: {error}")
    loaded = load_engine(folder, EngineConfig(max_rows=1, num_pages=64))
    rewritten = "Rewrite in the third person, as 'Returns ...' for 'Return ...':\n\nReturn the name of the given user."
    (prompt,) = chat_prompts(loaded.tokenizer, [question(rewritten)])
    request = Request(request_id="0", prompt=tuple(prompt), max_tokens=48, decoding=loaded.decoding({}))
    (output,) = loaded.engine.generate([request])
    text = loaded.tokenizer.decode(output.tokens, skip_special_tokens=True)
    assert text.strip() == "Returns the name of the given user." and output.finish_reason == "stop"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RL_RECIPES])
def test_each_carries_the_recipe_that_made_it(name: str) -> None:
    recorded = json.loads((model_folder(name) / "recipe.json").read_text())
    recipe = load(TrainingRecipe, recorded)  # fields that came later have defaults that mean what was done then
    computed = with_precision(RECIPES[name], "bfloat16")  # what `auto` was where they were trained
    named = replace(computed, source=recipe.source)  # the file keeps the document's name of that time
    assert as_json(recipe) == as_json(named)


@pytest.mark.parametrize("name", [name for name in NAMES if name in RL_RECIPES])
def test_a_model_of_reinforcement_learning_carries_its_recipe_too(name: str) -> None:
    assert json.loads((model_folder(name) / RL_RECIPE).read_text()) == as_json(RL_RECIPES[name])


def as_json(recipe: TrainingRecipe | RLRecipe) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(recipe), default=str))


@pytest.mark.parametrize("name", NAMES)
def test_each_solves_unseen_problems(name: str) -> None:
    """A smoke test of weights, tokenizer and engine together; research/ledger has the measurement."""
    loaded = load_engine(model_folder(name), EngineConfig(max_rows=24))
    task, max_tokens = (ledger_mini, 192) if name.startswith("ledger") else (gsm_mini, 112)
    least = {"ledger-bd": 14, "ledger-mbd": 10}.get(name, 19)
    rows = list(itertools.islice(task.generate(split="valid", seed=11), 24))
    prompts = chat_prompts(loaded.tokenizer, [question(row["question"]) for row in rows])
    requests = [
        Request(request_id=str(i), prompt=tuple(p), max_tokens=max_tokens, decoding=loaded.decoding({}))
        for i, p in enumerate(prompts)
    ]
    outputs = loaded.engine.generate(requests)
    answers = [loaded.tokenizer.decode(o.tokens) for o in outputs]
    right = sum(a.split("####")[-1] == r["answer"].split("####")[-1] for a, r in zip(answers, rows, strict=True))
    assert right >= least
    assert all(o.finish_reason == "stop" for o in outputs)


@pytest.mark.parametrize("name", ["tiny-mbd"])
def test_each_has_a_measured_front_that_an_engine_serves_as_it_starts(name: str) -> None:
    """`speed` in requests needs one; the engine's own buffer is large enough for all of its points."""
    generation = load_generation_defaults(model_folder(name))
    front = read_front(generation, block_size=generation["block_size"])
    assert front is not None and front.tasks and front.num_samples >= 300
    assert front.speeds[0] == 0 and front.speeds[-1] == 1
    assert all(0 < point.accuracy <= 100 and point.tpf >= 1 for point in front.points)
    assert max(point.decoding["buffer_size"] for point in front.points) <= LEAST_SLOTS


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"known: .*tiny-mbd"):
        model_folder("tiny-x")


def test_an_adapter_is_said_to_be_one_with_the_command_that_merges_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="mbd convert BASE --adapter"):
        model_folder(str(tmp_path))
