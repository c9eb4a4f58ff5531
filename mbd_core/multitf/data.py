"""Training samples from the task generators, tokenised in the chat format."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import question
from mbd_core.multitf.chat_encoding import encode_chats
from mbd_core.multitf.example import Example, encode_example
from mbd_core.tasks.generated import GENERATED_TASKS

TOKENIZER_PAIRS = 8000
"""A fresh model's tokenizer learns its merges from so many conversations."""


@dataclass(frozen=True, kw_only=True)
class TinyData:
    """How many problems of each task, and the stream they come from."""

    per_task: int
    seed: int = 0
    tasks: tuple[str, ...] = ("gsm-mini", "code-mini")


def conversations(data: TinyData) -> list[tuple[str, str]]:
    """(user, assistant) pairs of the tasks' train splits, interleaved."""
    streams = []
    for name in data.tasks:
        task = GENERATED_TASKS[name]
        rows = itertools.islice(task.generate(split="train", seed=data.seed), data.per_task)
        streams.append([(row[task.asked], row[task.answered]) for row in rows])
    return list(itertools.chain.from_iterable(zip(*streams, strict=True)))


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
