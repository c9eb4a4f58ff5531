"""The tiny models' tokenizer: a digit is a token, a word of the tasks is one, and any text survives the round trip."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mbd_core.tasks.tiny_tokenizer import train_tokenizer

TEXTS = ["Tom has 12 pens. Tom buys 30 more pens.", "    xs = [x for x in xs if x > 3]\n"] * 40


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=512)


def test_a_digit_and_a_word_of_the_texts_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.tokenize("Tom buys 120 pens.")
    assert len(tokens) == len(["Tom", " buys", " 1", "2", "0", " pens", "."])


@given(text=st.text(max_size=40))
@settings(max_examples=50)
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
