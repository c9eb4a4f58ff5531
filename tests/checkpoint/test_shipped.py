"""The shipped models: complete, small, made by the recipes that lie here, and able to do their tasks."""

import itertools
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.config import load_generation_defaults
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.decoding.blocks.methods import read_front
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import LEAST_SLOTS, EngineConfig
from mbd_core.fields import load
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, with_precision
from mbd_core.serving.tokens.load import load_engine
from mbd_core.tasks import gsm_mini, ledger_mini

NAMES = sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def test_the_models_are_there() -> None:
    assert {"tiny-bd", "tiny-mbd", "ledger-bd", "ledger-mbd", "ledger-tf"} <= set(NAMES)


def test_together_they_are_small() -> None:
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) <= 20e6


@pytest.mark.parametrize("name", NAMES)
def test_each_carries_the_recipe_that_made_it(name: str) -> None:
    recorded = json.loads((model_folder(name) / "recipe.json").read_text())
    recipe = load(TrainingRecipe, recorded)  # fields that came later have defaults that mean what was done then
    computed = with_precision(RECIPES[name], "bfloat16")  # what `auto` was where they were trained
    named = replace(computed, source=recipe.source)  # the file keeps the document's name of that time
    assert as_json(recipe) == as_json(named)


def as_json(recipe: TrainingRecipe) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(recipe), default=str))


@pytest.mark.parametrize("name", NAMES)
def test_each_solves_unseen_problems(name: str) -> None:
    """A smoke test of weights, tokenizer and engine together; research/README.md has the measurement."""
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
