"""The shipped models: complete, small, made by the recipes that lie here, and able to do their tasks."""

import itertools
import json
from dataclasses import asdict

import pytest

from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.decoding.request import Request
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.recipes import RECIPES, with_precision
from mbd_core.serving.load import load_engine
from mbd_core.tasks import gsm_mini

NAMES = sorted(p.parent.name for p in SHIPPED.glob("*/config.json"))


def test_the_two_models_are_there() -> None:
    assert {"tiny-bd", "tiny-mbd"} <= set(NAMES)


def test_together_they_are_small() -> None:
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) <= 20e6


@pytest.mark.parametrize("name", NAMES)
def test_each_carries_the_recipe_that_made_it(name: str) -> None:
    recorded = json.loads((model_folder(name) / "recipe.json").read_text())
    if recorded["model"] is not None:
        recorded["model"] = asdict(ModelConfig(**recorded["model"]))  # fields that came later have SDAR's defaults
    recorded = json.loads(json.dumps(recorded, default=str))
    computed = with_precision(RECIPES[name], "bfloat16")  # what `auto` was where they were trained
    assert recorded == json.loads(json.dumps(asdict(computed), default=str))


@pytest.mark.parametrize("name", NAMES)
def test_each_solves_unseen_problems(name: str) -> None:
    """A smoke test of weights, tokenizer and engine together; docs/findings.md has the measurement."""
    loaded = load_engine(model_folder(name), EngineConfig(max_rows=24))
    rows = list(itertools.islice(gsm_mini.generate(split="valid", seed=11), 24))
    prompts = chat_prompts(loaded.tokenizer, [question(row["question"]) for row in rows])
    requests = [
        Request(request_id=str(i), prompt=tuple(p), max_tokens=112, decoding=loaded.decoding({}))
        for i, p in enumerate(prompts)
    ]
    outputs = loaded.engine.generate(requests)
    answers = [loaded.tokenizer.decode(o.tokens) for o in outputs]
    right = sum(a.split("####")[-1] == r["answer"].split("####")[-1] for a, r in zip(answers, rows, strict=True))
    assert right >= 19
    assert all(o.finish_reason == "stop" for o in outputs)


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'tiny-x'.*known: .*tiny-mbd"):
        model_folder("tiny-x")
