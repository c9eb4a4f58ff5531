"""A problem in a recipe's words: as a chat or plain, with examples before it, and as token ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from mbd_core.batch.inputs import prompt_ids
from mbd_core.checkpoint.chat import chat_prompt, question
from mbd_core.checkpoint.folder import read_folder
from mbd_core.evaluation.tasks.kinds.task import Problem
from mbd_core.evaluation.tasks.prompts import FewShotExample, PromptForm, Wording, prompt_content

ASKED = Problem(problem_id="p", prompt="What is {x} + 1?", reference="2")
SOLVED = (FewShotExample(question="One?", answer="#### 1"), FewShotExample(question="Two?", answer="#### 2"))
WORDS = {"text": "Q: {question}\nA:", "answer": "{answer}!", "joint": " "}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return read_folder(tiny_model_dir).tokenizer


@pytest.mark.parametrize(
    ("form", "whole"),
    [
        ("plain", "Q: One?\nA: #### 1!\n\nQ: Two?\nA: #### 2!\n\nQ: What is {x} + 1?\nA:"),
        ("turn", question("Q: One?\nA: #### 1!\n\nQ: Two?\nA: #### 2!\n\nQ: What is {x} + 1?\nA:")),
        (
            "turns",
            [
                {"role": "user", "content": "Q: One?\nA:"},
                {"role": "assistant", "content": "#### 1!"},
                {"role": "user", "content": "Q: Two?\nA:"},
                {"role": "assistant", "content": "#### 2!"},
                {"role": "user", "content": "Q: What is {x} + 1?\nA:"},
            ],
        ),
    ],
)
def test_examples_stand_in_one_text_in_one_turn_or_in_turns_of_their_own(form: PromptForm, whole: Any) -> None:
    assert json.loads(prompt_content(Wording(form=form, **WORDS), ASKED, SOLVED)) == whole


def test_a_problem_with_words_of_its_own_is_asked_by_them_and_may_show_its_tests() -> None:
    wording = Wording(form="plain", text="{question}|{tests}", joint="")
    problem = Problem(problem_id="p", prompt="def f():", reference="", text="Add.", tests="assert f() == {}")
    example = FewShotExample(question="Old.", answer="code", tests="assert g()")
    assert json.loads(prompt_content(wording, problem, [example])) == "Old.|assert g()code\n\nAdd.|assert f() == {}"


def test_chats_and_texts_become_ids_in_their_order(tokenizer: Any) -> None:
    chat = json.dumps(question("How many?"))
    plain, other = json.dumps("How many?"), json.dumps("Tom has 3 pens.")
    ids = prompt_ids(tokenizer, [plain, chat, other])
    assert ids == [
        list(tokenizer("How many?")["input_ids"]),
        chat_prompt(tokenizer, question("How many?")),
        list(tokenizer("Tom has 3 pens.")["input_ids"]),
    ]
    assert prompt_ids(tokenizer, []) == []
    spelled = "a <|endoftext|> b"
    as_text = tokenizer(spelled, split_special_tokens=True)["input_ids"]
    assert prompt_ids(tokenizer, [json.dumps(spelled)]) == [as_text]
