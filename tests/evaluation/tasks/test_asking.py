"""What a sweep asks: prompts of a recipe, examples of the user's file, and limits that the models can hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    for name, numbers in (("test", (1, 2)), ("train", range(10, 40))):
        rows = [{"question": f"{n} + 0?", "answer": f"{n} + 0 = {n}\n#### {n}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def options(gsm8k: Path, **changes: Any) -> SweepOptions:
    given = {"models": ["tiny-mbd"], "tasks": ["gsm8k"], "methods": ["single"], "data": [str(gsm8k / "test.jsonl")]}
    return SweepOptions(**{**given, **changes})


def test_a_real_task_is_not_cut_at_128_tokens_and_has_the_papers_limit(gsm8k: Path) -> None:
    sweep = plan_sweep(load_inputs(options(gsm8k)))
    assert {(row["max_tokens"], row["may_shorten"]) for row in sweep.rows()} == {(4096, True)}
    assert sweep.notes == [
        "model 'tiny-mbd' holds 1024 positions, prompt and answer together: an answer of gsm8k gets the positions "
        "that its prompt leaves, not the recipe's 4096 tokens"
    ]
    generated = plan_sweep(load_inputs(options(gsm8k, tasks=["gsm-mini"], data=(), limit=1)))
    assert [row["max_tokens"] for row in generated.rows()] == [128] and not generated.notes


def test_a_limit_of_the_user_s_own_is_kept_or_refused(gsm8k: Path) -> None:
    sweep = plan_sweep(load_inputs(options(gsm8k, max_tokens=700)))
    assert {(row["max_tokens"], row["may_shorten"]) for row in sweep.rows()} == {(700, False)} and not sweep.notes
    with pytest.raises(ValueError, match="--max-tokens 1024"):
        plan_sweep(load_inputs(options(gsm8k, max_tokens=1024)))


def test_few_shot_prompts_show_the_user_s_examples_and_stop_where_the_recipe_does(gsm8k: Path) -> None:
    train = str(gsm8k / "train.jsonl")
    sweep = plan_sweep(load_inputs(options(gsm8k, recipe="fast-dllm", examples=[train])))
    first, second = sweep.rows()
    (message,) = json.loads(first["input"])
    assert message["content"].count("#### ") == 5
    assert message["content"].endswith("\n\nQuestion: 1 + 0?\nAnswer:")
    assert (
        message["content"].partition("1 + 0?")[0] != json.loads(second["input"])[0]["content"].partition("2 + 0?")[0]
    )
    assert json.loads(first["stop"]) == ["Question:", "</s>", "<|im_end|>"]
    plain = plan_sweep(load_inputs(options(gsm8k, recipe="fast-dllm-base", examples=[f"gsm8k={train}"])))
    assert json.loads(next(plain.rows())["input"]) == message["content"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recipe": "gsm"}, "unknown recipe 'gsm'; known: own, bare"),
        ({"recipe": "dream"}, "recipe 'dream' has no prompt for task 'gsm8k'; it has gsm8k-cot, math"),
        (
            {"recipe": "blockbatch"},
            "recipe 'blockbatch' shows 5 solved problems before each of gsm8k; name their file",
        ),
        ({"examples": ["train.jsonl"]}, "shows 0 solved problems before each of gsm8k; none are wanted"),
        ({"examples": ["math=a"]}, "--examples math=a: the task 'math' is not among --tasks gsm8k"),
        ({"recipe": "blockbatch", "examples": ["test.jsonl"]}, "5 examples are wanted and the file holds 2"),
    ],
)
def test_what_cannot_be_asked_is_refused(gsm8k: Path, changes: dict[str, Any], sentence: str) -> None:
    if changes.get("examples") == ["test.jsonl"]:
        changes = {**changes, "examples": [str(gsm8k / "test.jsonl")]}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        plan_sweep(load_inputs(options(gsm8k, **changes)))


def test_a_report_says_how_it_was_asked(gsm8k: Path) -> None:
    train = str(gsm8k / "train.jsonl")
    sweep = plan_sweep(load_inputs(options(gsm8k, recipe="blockbatch", examples=[train])))
    settings = sweep.settings(engine=sweep.engine, num_actors=1, on_gpu=False, machine="a")
    assert settings["recipe"] == "blockbatch (BlockBatch, Table 1 and Appendix E.3)"
    asked = settings["tasks"]["gsm8k"]
    assert (asked["examples"], asked["examples_from"], asked["max_tokens"]) == (5, train, 256)
    assert asked["extraction"] == "flexible-extract (the last number)" and len(asked["examples_sha256"]) == 64
    assert settings["models"]["tiny-mbd"]["dtype"] == "float32 (stored as bfloat16)"
    on_gpu = sweep.settings(engine=sweep.engine, num_actors=1, on_gpu=True, machine="a")
    assert on_gpu["models"]["tiny-mbd"]["dtype"] == "bfloat16"
    assert {"mbd-cluster", "torch", "ray", "transformers", "math-verify", "numpy"} == set(settings["versions"])
    assert settings["recipe_remark"].startswith("The paper names the shots")
    assert asked["setting_from"].startswith("BlockBatch") and asked["prompt"].startswith("Question: ")
