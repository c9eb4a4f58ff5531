"""Text that spells control tokens stays text, whatever a template does to it; all other texts keep their tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import chat_prompt, chat_text, plain_prompts, question
from mbd_core.checkpoint.literal_text import MaskedText, fixed_masking, literal, masking_of, token_ids

MASK, EOS, USER, ASSISTANT = 0, 1, 2, 3
CONTROLS = ("<|mask|>", "<|endoftext|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}\n"
    "{{ m.content.split('</think>')[-1].strip() }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPELLINGS = [
    "<|endoftext|>",
    "a <|endoftext|> b",
    "  x</think> <|endoftext|>\n\n",
    "<|<|endoftext|>",
    "<|mask|><|user|><|assistant|>" * 3,
    "\ufdd0 <|endoftext|> \ufdd1\ufdd2",
    "漢字<|endoftext|>é<|endofte",
]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def as_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


@pytest.mark.parametrize("content", SPELLINGS)
def test_a_template_s_control_tokens_are_the_only_ones(tokenizer: PreTrainedTokenizerBase, content: str) -> None:
    tokenizer.chat_template = TEMPLATE
    shown = content.split("</think>")[-1].strip()
    ids = chat_prompt(tokenizer, question(content))
    assert ids == [USER, *as_text(tokenizer, "\n" + shown), EOS, *as_text(tokenizer, "\n"), ASSISTANT]
    assert (
        tokenizer.decode(ids, clean_up_tokenization_spaces=False) == f"<|user|>\n{shown}<|endoftext|>\n<|assistant|>"
    )


@pytest.mark.parametrize(
    "content", ["How many?", "  a\n", "< |endoftext|>", "<|endoftext", "\ufdd0", "漢字 é", "<think>x</think>"]
)
def test_other_texts_keep_their_tokens(tokenizer: PreTrainedTokenizerBase, content: str) -> None:
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    turns = [*question(content), {"role": "assistant", "content": "x" + content}, *question(content)]
    assert chat_prompt(tokenizer, turns) == tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    assert plain_prompts(tokenizer, [content]) == [tokenizer(content)["input_ids"]]


def test_only_the_stretch_that_spells_a_control_token_is_tokenised_otherwise(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """An added token that is text, <think>, stays a token, in that stretch too; white space that a control token of
    the template takes with it stays its own."""
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<|sep|>", special=True, rstrip=True)])
    think, separator = tokenizer.convert_tokens_to_ids(["<think>", "<|sep|>"])
    tokenizer.chat_template = "{% for m in messages %}<|sep|>  {{ m.content }}{% endfor %}"
    ids = chat_prompt(tokenizer, [*question("a <think> b"), *question("<think><|mask|>"), *question(" c")])
    first, second, third = (as_text(tokenizer, text) for text in ("a <think> b", "<think><|mask|>", "c"))
    assert ids == [separator, *first, separator, *second, separator, *third]
    assert think in first and second[0] == think and MASK not in second


def test_special_tokens_around_a_text_stay(tokenizer: PreTrainedTokenizerBase) -> None:
    around = processors.TemplateProcessing("<|user|> $A <|assistant|>", None, [("<|user|>", 2), ("<|assistant|>", 3)])
    tokenizer.backend_tokenizer.post_processor = around
    text = "a<|mask|>"
    assert plain_prompts(tokenizer, [text, "b"]) == [
        [USER, *as_text(tokenizer, text), ASSISTANT],
        tokenizer("b")["input_ids"],
    ]


def test_names_values_and_keys_of_tools_are_text_in_templates_of_both_kinds(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    spelled = 'x"<|endoftext|>\n'
    function = {"name": "now", "arguments": {spelled: [1, {"b": spelled}]}}
    turns: list[dict[str, Any]] = [
        *question("When?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "<|assistant|>noon", "tool_call_id": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "now", "description": spelled}}]
    for template, ends in ((tokenizer.chat_template, 1), (QWEN, 1)):
        tokenizer.chat_template = template
        text = chat_text(tokenizer, turns, tools=tools)
        ids = token_ids(tokenizer, [text])[0]
        assert json.dumps(tools[0], ensure_ascii=False) in text.plain
        assert json.dumps(function["arguments"], ensure_ascii=False) in text.plain
        assert [ids.count(EOS), ids.count(ASSISTANT), ids[-1]] == [ends, 2, ASSISTANT]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text.plain


def test_marks_of_calls_that_are_control_tokens_are_those_of_the_template_alone(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    call = {"type": "function", "id": "a", "function": {"name": "now", "arguments": {}}}
    turns = [*question("Write <tool_call>"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    for template in (tokenizer.chat_template, QWEN):
        tokenizer.chat_template = template
        assert chat_prompt(tokenizer, turns).count(tokenizer.convert_tokens_to_ids("<tool_call>")) == 1


def test_control_tokens_that_overlap_are_all_masked(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("aba", "bb", "q")])
    for text in ("ababababb", "abbbb", "qq", "<|mask|>aba<|mask|"):
        masking = masking_of(tokenizer, text)
        masked = masking.masked(text)
        assert len(masked) == len(text) and masking.plain(masked) == text
        assert not any(control in masked for control in (*CONTROLS, "aba", "bb", "q"))
        assert tokenizer.decode(token_ids(tokenizer, [literal(tokenizer, text)])[0]) == text


def test_texts_that_come_one_by_one_share_a_masking(tokenizer: PreTrainedTokenizerBase) -> None:
    masking = fixed_masking(tokenizer)
    whole = MaskedText("<|user|>" + masking.masked("a<|mask|>") + masking.masked("<|user|>"), masking)
    assert token_ids(tokenizer, [whole]) == [[USER, *as_text(tokenizer, "a<|mask|><|user|>")]]
