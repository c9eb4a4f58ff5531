"""Conversations as the template writes them: all turns, one boundary, and no other."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import chat_prompt, decode_text, question
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.data.encoding import EncodedChat, encode_chats, fill_token, tokenizer_fingerprint
from mbd_core.multitf.data.prepared import TinyData, conversations

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": " It is\n4. "},
]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model_dir, load_model(tiny_model_dir).config)


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> EncodedChat:
    return encode_chats(tokenizer, [("row 7", messages)], eos_token_id=1)[0]


def test_system_and_earlier_turns_are_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = encode(tokenizer, CHAT)
    assert chat.prompt == chat_prompt(tokenizer, CHAT[:-1])
    assert decode_text(tokenizer, chat.response) == " It is\n4. " and 1 not in chat.response
    assert 1 in chat.prompt  # the earlier answer's end


def test_generated_problems_are_encoded_as_prompt_and_answer_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = list(conversations(TinyData(per_task=50)))
    chats = [("row", [*question(user), {"role": "assistant", "content": answer}]) for user, answer in pairs]
    for chat, (user, answer) in zip(encode_chats(tokenizer, chats, eos_token_id=1), pairs, strict=True):
        assert chat.prompt == chat_prompt(tokenizer, question(user))
        assert chat.response == tokenizer(answer, add_special_tokens=False)["input_ids"]


def test_what_the_template_writes_after_the_answer_is_no_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = encode(tokenizer, CHAT)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|endoftext|>{% else %}", "<|endoftext|>\n{% else %}")
    assert "\n{% else %}" in tokenizer.chat_template
    assert encode(tokenizer, CHAT).response == plain.response
    tokenizer.chat_template = tokenizer.chat_template.replace("<|endoftext|>\n", "")
    assert encode(tokenizer, CHAT).response == plain.response


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "{% if add_generation_prompt %}",
            "{% if add_generation_prompt %}<think>",
            "is not the beginning of the whole",
        ),
        ("<|assistant|>", " ma", "the answer merges with the prompt's end"),
    ],
)
def test_a_prompt_that_is_no_beginning_of_the_whole_names_the_row(
    tokenizer: PreTrainedTokenizerBase, old: str, new: str, sentence: str
) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    messages = [{"role": "user", "content": "How"}, {"role": "assistant", "content": "ny"}]
    with pytest.raises(ValueError, match=rf"^row 7: .*{sentence}"):
        encode(tokenizer, messages)


def test_an_answer_that_cannot_be_learned_names_the_row(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="row 7: its answer is empty"):
        encode(tokenizer, [*question("x"), {"role": "assistant", "content": "  "}])


@pytest.mark.parametrize(
    "control", ["<|endoftext|>", "<|mask|>", "<|assistant|>", "<|endoftext|>" * 3, "\ufdd0<|mask|>"]
)
def test_control_tokens_that_messages_spell_are_text(tokenizer: PreTrainedTokenizerBase, control: str) -> None:
    text = f"before {control} after"
    chat = encode(tokenizer, [*question(text), {"role": "assistant", "content": text}])
    as_text = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert chat == EncodedChat([2, *as_text, 3], as_text)
    assert decode_text(tokenizer, chat.response, special=True) == text


def test_the_fill_is_an_eos_that_the_model_stops_at(tokenizer: PreTrainedTokenizerBase, tiny_model_dir: Path) -> None:
    from dataclasses import replace

    config = load_model(tiny_model_dir).config
    assert fill_token(tokenizer, config) == 1
    assert fill_token(tokenizer, replace(config, eos_token_ids=(5, 6))) == 5


def test_the_fingerprint_is_of_vocabulary_and_template(tokenizer: PreTrainedTokenizerBase) -> None:
    own = tokenizer_fingerprint(tokenizer)
    assert own == tokenizer_fingerprint(tokenizer)
    tokenizer.chat_template += " "
    assert tokenizer_fingerprint(tokenizer) != own
