"""Training samples from the task generators, tokenised in the chat format."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.multitf.sample import Example, encode_example
from mbd_core.tasks import code_mini, gsm_mini

TOKENIZER_PAIRS = 8000
"""A fresh model's tokenizer learns its merges from so many conversations."""


@dataclass(frozen=True, kw_only=True)
class TinyData:
    """How many problems of each task, and the stream they come from."""

    per_task: int
    seed: int = 0


def conversations(data: TinyData) -> list[tuple[str, str]]:
    """(user, assistant) pairs of both tasks' train splits, interleaved."""
    gsm = itertools.islice(gsm_mini.generate(split="train", seed=data.seed), data.per_task)
    code = itertools.islice(code_mini.generate(split="train", seed=data.seed), data.per_task)
    pairs = []
    for g, c in zip(gsm, code, strict=True):
        pairs += [(g["question"], g["answer"]), (c["prompt"], c["canonical_solution"])]
    return pairs


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]], *, block_size: int, max_length: int
) -> list[Example]:
    """Tokenise the pairs; one longer than `max_length` tokens is a `ValueError`, since nothing is cut silently."""
    prompts = chat_prompts(tokenizer, [question(user) for user, _ in pairs])
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    examples = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        example = encode_example(
            prompt, answer, eos_token_id=tokenizer.eos_token_id, block_size=block_size, max_length=max_length
        )
        if example is None:
            raise ValueError(f"training sample {number} is longer than max_length={max_length} tokens")
        examples.append(example)
    return examples
