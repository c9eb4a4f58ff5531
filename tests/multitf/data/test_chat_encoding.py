"""Conversations as the template writes them: all turns, one boundary, and no other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import chat_prompt, chat_text, decode_text, question
from mbd_core.checkpoint.literal_text import token_ids
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.data.chats import Chat
from mbd_core.multitf.data.conversation_rows import Columns
from mbd_core.multitf.data.encoding import EncodedChat, encode_chats, encode_rows, fill_token, tokenizer_fingerprint
from mbd_core.multitf.data.known_names import REASONING
from mbd_core.multitf.data.prepared import TinyData, conversations
from mbd_core.multitf.data.tool_calls import tools_of
from mbd_core.serving.api.chat_fields import turns
from mbd_core.serving.api.requests import ChatRequest

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
    with pytest.raises(ValueError, match="row 7"):
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


CALL = {"id": "b", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
OTHER = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOLED = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]},
        {"role": "tool", "tool_call_id": "c", "content": "second"},
        {"role": "tool", "tool_call_id": "b", "content": "first"},
        {"role": "assistant", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds."}}],
}


def test_tool_turns_and_content_parts_are_what_serving_makes_of_them(tokenizer: PreTrainedTokenizerBase) -> None:
    fields = TOOLED | {"messages": TOOLED["messages"][:-1]}
    body = ChatRequest.model_validate({"model": "m", **fields})
    served = chat_text(tokenizer, turns(body.messages), tools=body.shown_tools)
    messages, tools = Columns.of(TOOLED).messages(TOOLED), tools_of(TOOLED)
    (row,) = encode_rows(tokenizer, [Chat("row", messages, tools)], eos_token_id=1, every=True)
    (sample,) = row.samples
    assert sample.prompt == token_ids(tokenizer, [served])[0] and "first" in served.text
    ((start, stop),) = sample.earlier
    assert decode_text(tokenizer, sample.tokens[start:stop]).count("<tool_call>") == 2
    assert tools_of({"tools": json.dumps(TOOLED["tools"])}) == tools_of({"tools": [TOOLED["tools"][0]["function"]]})


def test_numbers_as_ids_of_calls_are_their_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        [
            *question("x"),
            {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": call_id}]},
            {"role": "tool", "content": "1", "tool_call_id": call_id},
            {"role": "assistant", "content": "z"},
        ]
        for call_id in (7, "7")
    ]
    chats = [Chat("row", Columns(chat="messages").messages({"messages": messages})) for messages in rows]
    number, text = encode_rows(tokenizer, chats, eos_token_id=1, every=True)
    assert number == text and not number.error


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "text parts"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "only an assistant"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}, "arguments"),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": ["b"]}]},
            r"'id' is neither .* but \['b'\]",
        ),
        ({"role": "tool", "content": "", "tool_call_id": {"b": 1}}, "'tool_call_id' that is neither .* but {'b': 1}"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not valid JSON"),
    ],
)
def test_a_turn_that_no_template_takes_says_why(turn: dict, reason: str) -> None:
    messages = [*question("x"), turn, *question("y"), {"role": "assistant", "content": "z"}]
    with pytest.raises(ValueError, match=reason):
        Columns(chat="messages").messages({"messages": messages})


def test_answers_that_the_template_shows_otherwise_later_are_samples_of_their_own(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        *question("a"),
        {"role": "assistant", "content": "first"},
        *question("b"),
        {"role": "assistant", "content": "second"},
        *question("c"),
        {"role": "assistant", "content": "third"},
    ]
    every = {"eos_token_id": 1, "every": True}
    (row,) = encode_rows(tokenizer, [Chat("row", messages)], **every)
    (joined,) = row.samples
    apart = [encode_chats(tokenizer, [("row", messages[:end])], eos_token_id=1)[0] for end in (2, 4, 6)]
    assert replace(joined, earlier=()) == apart[-1] and [len(one.tokens) for one in apart[:2]] == [
        stop for _, stop in joined.earlier
    ]
    # a template that, as of thinking models, drops what earlier answers hold
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }}<|endoftext|>",
        "{% if loop.last %}{{ message['content'] }}{% endif %}<|endoftext|>",
    )
    (row,) = encode_rows(tokenizer, [Chat("row", messages)], **every)
    assert len(row.samples) == 3 and not any(sample.earlier for sample in row.samples)
    assert [decode_text(tokenizer, sample.response) for sample in row.samples] == ["first", "second", "third"]


def test_the_last_answer_is_trained_whatever_is_before_it(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Yes."}]
    for every in (False, True):
        (row,) = encode_rows(tokenizer, [Chat("row", messages)], eos_token_id=1, every=every)
        assert [decode_text(tokenizer, sample.response) for sample in row.samples] == ["Yes."]


def test_answers_that_are_not_to_be_trained_are_context(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [
        *question("7*8?"),
        {"role": "assistant", "content": "54"},
        *question("Check."),
        {"role": "assistant", "content": "56"},
    ]
    (both,) = encode_rows(tokenizer, [Chat("row", turns)], eos_token_id=1, every=True)
    (second,) = encode_rows(tokenizer, [Chat("row", turns, untrained=[1])], eos_token_id=1, every=True)
    assert second.samples == (replace(both.samples[0], earlier=()),)
    (first,) = encode_rows(tokenizer, [Chat("row", turns, untrained=[3])], eos_token_id=1, every=True)
    assert [decode_text(tokenizer, sample.response) for sample in first.samples] == ["54"]
    for every, untrained in ((True, [1, 3]), (False, [3])):
        (row,) = encode_rows(tokenizer, [Chat("row", turns, untrained=untrained)], eos_token_id=1, every=every)
        assert "is to be trained" in row.error


@pytest.mark.parametrize("given", REASONING)
@pytest.mark.parametrize("shown", REASONING)
def test_reasoning_is_in_the_answer_where_the_template_shows_it(
    tokenizer: PreTrainedTokenizerBase, given: str, shown: str
) -> None:
    turns = [*question("Is 91 prime?"), {"role": "assistant", given: "It is 7 x 13 <|mask|>.", "content": "No."}]
    (row,) = encode_rows(tokenizer, [Chat("row", turns)], eos_token_id=1)
    assert f"an answer has '{given}'" in row.error and f"--ignore-columns messages.{given}" in row.error
    part = "{% if message." + shown + " is defined %}<think>{{ message." + shown + " }}</think>{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>{{", "<|assistant|>" + part + "{{")
    (row,) = encode_rows(tokenizer, [Chat("row", turns)], eos_token_id=1)
    (sample,) = row.samples
    assert decode_text(tokenizer, sample.response, special=True) == "<think>It is 7 x 13 <|mask|>.</think>No."


def test_variables_that_the_template_has_not_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = Chat("row", [*question("x"), {"role": "assistant", "content": "y"}], variables={"tone": "dry"})
    (row,) = encode_rows(tokenizer, [chat], eos_token_id=1)
    assert "'tone'" in row.error and "--ignore-columns chat_template_kwargs.tone" in row.error
    tokenizer.chat_template = "{{ tone }}" + tokenizer.chat_template
    (row,) = encode_rows(tokenizer, [chat], eos_token_id=1)
    assert decode_text(tokenizer, row.samples[0].prompt) == "dryx"
