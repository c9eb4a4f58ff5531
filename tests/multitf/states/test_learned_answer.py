"""A served choice, as JSON, is all that a learner needs: its log-probabilities are the engine's."""

import json
from pathlib import Path
from typing import Any

import pytest
from local_server import answers

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.states.answer import read_answer
from mbd_core.multitf.step.learner import Learner
from mbd_core.multitf.step.objective import PolicyObjective

DECODING = DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.02)
ASKED = {
    "max_tokens": 26,
    "temperature": 1.0,
    "return_token_ids": True,
    "return_step_map": True,
    "decoding": {"buffer_size": 3, "tau_m2t": 0.02},
}


def test_a_learner_trains_on_answers_of_the_endpoint(tiny_model_dir: Path) -> None:
    asked = [
        ("chat", ASKED | {"seed": 1, "n": 2}),
        ("complete", ASKED | {"seed": 2, "stop_token_ids": list(range(200, 328))}),
        ("complete", ASKED | {"seed": 3, "template": [{"hole": 5}, " pens", {"hole": 3}], "max_tokens": None}),
    ]
    replies = [whole for (whole,) in answers(tiny_model_dir, *asked)]
    choices = [choice for reply in replies for choice in json.loads(json.dumps(reply))["choices"]]
    assert all(reply["mbd"]["oldest_weights"] == reply["mbd"]["newest_weights"] == 0 for reply in replies)
    limits = [26, 26, 26, len(choices[-1]["token_ids"])]
    lessons = [
        read_answer(choice, decoding=DECODING, max_tokens=limit, advantage=(-1) ** place, correct=True)
        for place, (choice, limit) in enumerate(zip(choices, limits, strict=True))
    ]
    assert any(lesson.tail.tokens for lesson in lessons) and 0 in lessons[-1].steps
    config = TrainConfig(steps=9, batch_size=4, lr=1e-3, warmup=1, optimizer="adamw", precision="float32")
    report = Learner(load_model(tiny_model_dir), config, PolicyObjective()).update(lessons)
    assert report.answers == 4 and report.d_max < 2e-4


CHOICE: dict[str, Any] = {
    "prompt_token_ids": [5, 6],
    "token_ids": [7, 8, 9],
    "rollout": {
        "step_map": [1, 1, 2],
        "logprobs": [-1, -0.5, -0.25],
        "terminal": {"token_ids": [1, 3, 2], "step_map": [2, 3, 3], "logprobs": [-1.0, -1.0, -1.0]},
    },
}


def read(choice: dict[str, Any]) -> Any:
    return read_answer(choice, decoding=DECODING, max_tokens=20, advantage=0.5, correct=False)


def test_what_an_answer_lacks_is_named() -> None:
    assert read(CHOICE | {"index": 0}).logprobs == (-1.0, -0.5, -0.25, -1.0, -1.0, -1.0)
    rollout = CHOICE["rollout"]
    for wrong, message in (
        ({"prompt_token_ids": None}, "'prompt_token_ids' is None, not a list"),
        ({"token_ids": [7, 8.5, 9]}, "'token_ids' is a list of whole numbers"),
        ({"rollout": rollout | {"logprobs": [-1, "x", 0]}}, r"'rollout.logprobs' is a list of numbers"),
        ({"rollout": rollout | {"terminal": {}}}, r"no 'rollout.terminal.token_ids'.*return_step_map"),
        ({"rollout": rollout | {"step_map": [1, 1]}}, "has 2 steps and 3 log-probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            read(CHOICE | wrong)
    with pytest.raises(ValueError, match="rollout"):
        read({name: value for name, value in CHOICE.items() if name != "rollout"})
