"""A tokenizer for a model of random weights: its family's special tokens and chat template, and a text for every id.

A release's tokenizer is not ours to copy. This tokenizer has the names of the release's special tokens, and their ids
if the vocabulary has the release's size. Text is encoded by bytes and by merges learned from the generated tasks.
Every other id is one word.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mbd_core.checkpoint.families import FAMILIES
from mbd_core.models.model_config import NO_MASK, ModelConfig
from mbd_core.tasks.generated import GENERATED_TASKS
from mbd_core.tasks.tiny_tokenizer import ASSISTANT, EOS, MASK, USER, train_tokenizer

LEARNED, LEARNED_FROM_LESSONS = 512, 8192  # ids of the tokenizer that learns bytes and merges
LESSONS = {"gsm-mini": 200, "code-mini": 200}  # the number of each task's problems from which it learns
NEVER_IN_TEXT = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
"""The byte tokens that no UTF-8 text has."""


@dataclass(frozen=True)
class ChatTokens:
    """A family's special tokens and chat template.

    mask  the name of its mask, if it has a mask
    ends  the names of the tokens that end a text or a turn, the release's EOS first
    ids   its special tokens' ids in the release
    """

    mask: str | None
    ends: tuple[str, ...]
    ids: dict[str, int]
    template: str
    pad: str = "<|endoftext|>"


QWEN_IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}


def _chat_ml(mask: str | None, mask_id: int, ends: tuple[str, ...], ids: dict[str, int] = QWEN_IDS) -> ChatTokens:
    """Qwen's form of a chat."""
    return ChatTokens(
        mask,
        ends,
        ids if mask is None else {**ids, mask: mask_id},
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


QWEN_TOKENS = _chat_ml(None, NO_MASK, ("<|im_end|>", "<|endoftext|>"))
# the names are ours; SmolLM2's chats have this form, Mistral's have another
LLAMA_TOKENS = _chat_ml(
    None, NO_MASK, ("<|im_end|>", "<|endoftext|>"), {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
)
SDAR_TOKENS = _chat_ml("<|MASK|>", 151669, ("<|im_end|>", "<|endoftext|>"))
CHAT_TOKENS = {
    "SDARForCausalLM": SDAR_TOKENS,
    "SDARMoeForCausalLM": SDAR_TOKENS,
    "LlamaForCausalLM": LLAMA_TOKENS,
    "MistralForCausalLM": LLAMA_TOKENS,
    "Qwen2ForCausalLM": QWEN_TOKENS,
    "Qwen3ForCausalLM": QWEN_TOKENS,
    "Qwen3MoeForCausalLM": QWEN_TOKENS,
    "A2DLlamaLMHeadModel": replace(LLAMA_TOKENS, mask="<|mask|>", ids={**LLAMA_TOKENS.ids, "<|mask|>": 16}),
    "A2DQwen2LMHeadModel": replace(QWEN_TOKENS, mask="<|mask|>", ids={**QWEN_IDS, "<|mask|>": 16}),
    "A2DQwen3LMHeadModel": replace(QWEN_TOKENS, mask="<|mask|>", ids={**QWEN_IDS, "<|mask|>": 16}),
    "DreamModel": _chat_ml("<|mask|>", 151666, ("<|endoftext|>", "<|im_end|>")),
    "Fast_dLLM_QwenForCausalLM": _chat_ml("|<MASK>|", 151665, ("<|im_end|>", "<|endoftext|>")),
    # the ids are the configuration's; the names are ours
    "NemotronLabsDiffusionModel": _chat_ml(
        "<|mask|>", 100, ("<|im_end|>", "<|endoftext|>"), {"<|endoftext|>": 2, "<|im_start|>": 10, "<|im_end|>": 11}
    ),
    "DiffusionGemmaForBlockDiffusion": ChatTokens(
        None,
        ("<eos>", "<turn|>", "<|tool_response>"),
        {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<|tool_response>": 50, "<|turn>": 105, "<turn|>": 106},
        "<bos>{% for message in messages %}<|turn>{{ {'assistant': 'model'}.get(message['role'], message['role']) }}\n"
        "{{ message['content'] }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}",
        pad="<pad>",
    ),
    "LLaDA2MoeModelLM": ChatTokens(
        "<|mask|>",
        ("<|endoftext|>", "<|role_end|>"),
        {"<|endoftext|>": 156892, "<|mask|>": 156895, "<|role_end|>": 156900},
        "{% for message in messages %}<role>{{ {'system': 'SYSTEM', 'assistant': 'ASSISTANT'}.get(message['role'], "
        "'HUMAN') }}</role>{{ message['content'] }}<|role_end|>{% endfor %}"
        "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}",
    ),
    "LLaDAModelLM": ChatTokens(
        "<|mdm_mask|>",
        ("<|endoftext|>", "<|eot_id|>"),
        {
            "<|startoftext|>": 126080,
            "<|endoftext|>": 126081,
            "<|mdm_mask|>": 126336,
            "<|start_header_id|>": 126346,
            "<|end_header_id|>": 126347,
            "<|eot_id|>": 126348,
        },
        "<|startoftext|>{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
}


def writes_text(config: ModelConfig) -> bool:
    """Whether the vocabulary has room for every byte of a text beside the special tokens."""
    return config.vocab_size >= 256 - len(NEVER_IN_TEXT) + len(CHAT_TOKENS[config.architecture].ids)


def shape_tokenizer(config: ModelConfig, *, lessons: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer, with the model's mask and EOS ids; it learns merges from `lessons`, by default generated tasks.

    Raises `ValueError` if the vocabulary is too small to write text.
    """
    if not writes_text(config):
        raise ValueError(f"a vocabulary of {config.vocab_size} tokens is too small to write text; give another shape")
    chat, special = CHAT_TOKENS[config.architecture], special_ids(config)
    if lessons is None:
        learned = _learned_from_own_lessons()
    else:
        learned = _learned(lessons, vocab_size=LEARNED_FROM_LESSONS, min_frequency=2)
    data: dict[str, Any] = json.loads(learned)
    model, special_names = data["model"], {number: name for name, number in special.items()}
    learned_tokens = sorted(model["vocab"].keys() - {MASK, EOS, USER, ASSISTANT}, key=model["vocab"].__getitem__)
    learned_tokens.sort(key=lambda token: token in NEVER_IN_TEXT)  # last, because the last tokens may find no room
    names = itertools.chain(learned_tokens, (f"Ġ<{n}>" for n in itertools.count()))
    ids = {special_names[n] if n in special_names else next(names): n for n in range(config.vocab_size)}
    model["vocab"] = ids
    model["merges"] = [pair for pair in model["merges"] if all(token in ids for token in (*pair, "".join(pair)))]
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [
        {"id": number, "content": special_names[number], **flags} for number in sorted(special_names)
    ]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        mask_token=chat.mask,
        eos_token=special_names[config.eos_token_ids[0]],
        pad_token=chat.pad,
        additional_special_tokens=[name for name in special if name not in (chat.mask, *chat.ends)],
        chat_template=chat.template,
        clean_up_tokenization_spaces=False,
    )


def special_ids(config: ModelConfig) -> dict[str, int]:
    """The special tokens' ids: the configuration's, then the release's where free, then any free id."""
    chat, family = CHAT_TOKENS[config.architecture], FAMILIES[config.architecture]
    release_ids = chat.ids if config.vocab_size in family.vocab_sizes else {}
    names = {number: name for name, number in release_ids.items()}
    ids = {} if chat.mask is None else {chat.mask: config.mask_token_id}
    for number in config.eos_token_ids:
        free = [names.get(number), *chat.ends, f"<|end_{number}|>"]
        ids[next(name for name in free if name is not None and name not in ids)] = number
    for name in chat.ids:
        if name not in ids:
            candidates = itertools.chain([release_ids[name]] if name in release_ids else [], itertools.count())
            ids[name] = next(number for number in candidates if number not in ids.values())
    return ids


def _learned(lessons: Iterable[str], **settings: int) -> str:
    """The JSON of a tokenizer that has learned merges from the lessons."""
    return str(train_tokenizer(lessons, **settings).backend_tokenizer.to_str())


@cache
def _learned_from_own_lessons() -> str:
    return _learned(_own_lessons(), vocab_size=LEARNED)


def _own_lessons() -> Iterator[str]:
    """Questions and answers of the generated tasks."""
    for name, number in LESSONS.items():
        task = GENERATED_TASKS[name]
        for row in itertools.islice(task.generate(split="train", seed=0), number):
            yield row[task.question_column]
            yield row[task.answer_column]
