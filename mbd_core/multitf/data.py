"""Training samples from the task generators, tokenised in the chat format."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import question
from mbd_core.multitf.chat_encoding import encode_chats
from mbd_core.multitf.example import Example, encode_example
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
    chats = [
        (f"training sample {number}", [*question(user), {"role": "assistant", "content": answer}])
        for number, (user, answer) in enumerate(pairs)
    ]
    eos, mask = tokenizer.eos_token_id, tokenizer.mask_token_id
    examples = []
    for (name, _), chat in zip(
        chats, encode_chats(tokenizer, chats, eos_token_id=eos, mask_token_id=mask), strict=True
    ):
        example = encode_example(
            chat.prompt, chat.response, eos_token_id=eos, block_size=block_size, max_length=max_length
        )
        if example is None:
            raise ValueError(f"{name} is longer than max_length={max_length} tokens")
        examples.append(example)
    return examples
