"""Training samples from the task generators, tokenised in the chat format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mbd_core.checkpoint.chat import question
from mbd_core.multitf.chat_encoding import EncodedChat, encode_chats, tokenizer_fingerprint
from mbd_core.multitf.example import filled_length
from mbd_core.multitf.prepared_data import BATCH, write_record, write_samples
from mbd_core.tasks.generated import GENERATED_TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_PAIRS = 8000
"""A fresh model's tokenizer learns its merges from so many conversations."""


@dataclass(frozen=True, kw_only=True)
class TinyData:
    """How many problems of each task, and the stream they come from."""

    per_task: int
    seed: int = 0
    tasks: tuple[str, ...] = ("gsm-mini", "code-mini")


def conversations(data: TinyData) -> Iterator[tuple[str, str]]:
    """(user, assistant) pairs of the tasks' train splits, interleaved."""
    tasks = [GENERATED_TASKS[name] for name in data.tasks]
    streams = [task.generate(split="train", seed=data.seed) for task in tasks]
    for rows in itertools.islice(zip(*streams, strict=True), data.per_task):
        for task, row in zip(tasks, rows, strict=True):
            yield row[task.asked], row[task.answered]


def write_conversations(
    folder: Path, tokenizer: PreTrainedTokenizerBase, data: TinyData, *, block_size: int, max_length: int
) -> None:
    """Tokenise them into a folder of samples, some at a time.

    One longer than `max_length` tokens when it fills its blocks is a `ValueError`, since nothing is cut silently.
    """
    ids = {"eos_token_id": tokenizer.eos_token_id, "mask_token_id": tokenizer.mask_token_id}

    def samples() -> Iterator[EncodedChat]:
        for first, pairs in _batches(conversations(data)):
            names = [f"training sample {number}" for number in range(first, first + len(pairs))]
            chats = [[*question(user), {"role": "assistant", "content": answer}] for user, answer in pairs]
            encoded = encode_chats(tokenizer, list(zip(names, chats, strict=True)), eos_token_id=ids["eos_token_id"])
            for name, sample in zip(names, encoded, strict=True):
                length = len(sample.prompt) + len(sample.response) + 1
                if filled_length(length, block_size) > max_length:
                    raise ValueError(f"{name} is longer than max_length={max_length} tokens")
                yield sample

    written = write_samples(folder, samples())
    write_record(folder, {**written, **ids, "tokenizer": tokenizer_fingerprint(tokenizer), "max_length": max_length})


def _batches(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """The pairs in lists, each with the number of its first."""
    source, first = iter(pairs), 0
    while batch := list(itertools.islice(source, BATCH)):
        yield first, batch
        first += len(batch)
