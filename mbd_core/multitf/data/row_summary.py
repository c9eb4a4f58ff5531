"""A summary of the rows: columns, turns and tokens as tables, and samples as the model sees them."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.literal_text import control_tokens
from mbd_core.multitf.data.chats import Chat
from mbd_core.multitf.data.encoding import EncodedChat
from mbd_core.tables import PAIRS, Cell, Table

MOST_TURN_COUNTS = 8  # in the table; rows with more turns are counted together


class ShownSample(NamedTuple):
    """A sample by its row's name and its number among that row's samples."""

    name: str
    number: int
    sample: EncodedChat


@dataclass
class RowSummary:
    """Counts of the rows. `num_shown` rows are kept with their samples.

    `fates` counts the fates of each column or field. `roles` counts the kept rows' messages by role, and `turns` the
    kept rows by their number of messages. `tokens` counts all samples' tokens with their EOS, `trained` the tokens
    with a label.
    """

    num_shown: int = 0
    ignored: frozenset[str] = frozenset()
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    answers: int = 0
    assistant_turns: int = 0
    tokens: int = 0
    trained: int = 0
    shown: list[ShownSample] = field(default_factory=list)
    _rows_shown: int = 0

    def add_row(self, notes: Iterable[tuple[str, str]]) -> None:
        """Counts the fates of a row's columns and fields."""
        self.fates.update(notes)

    def add_samples(self, chat: Chat, samples: Sequence[EncodedChat], copies: int) -> None:
        """Counts a kept row, `copies` times."""
        self.roles.update(message["role"] for message in chat.messages)
        self.turns[len(chat.messages)] += 1
        self.assistant_turns += copies * sum(message["role"] == "assistant" for message in chat.messages)
        for sample in samples:
            self.samples += copies
            self.answers += copies * (1 + len(sample.earlier))
            self.tokens += copies * (len(sample.tokens) + 1)
            self.trained += copies * trained_tokens(sample)
        if self._rows_shown < self.num_shown:
            self._rows_shown += 1
            self.shown += [ShownSample(chat.name, number, sample) for number, sample in enumerate(samples, start=1)]

    @property
    def is_full(self) -> bool:
        """Whether all rows to show are there."""
        return self._rows_shown >= self.num_shown

    @property
    def unread(self) -> list[str]:
        """The columns and fields that are left out."""
        return sorted({name for name, fate in self.fates if fate.startswith("left out")})

    @property
    def columns_table(self) -> Table:
        """The fate of each column and field; columns that were read come first."""
        fates = sorted(self.fates.items(), key=lambda item: (item[0][1].startswith(("left out", "empty")), item[0]))
        rows: list[list[Cell]] = [[name, count, fate] for (name, fate), count in fates]
        seen = {name for name, _ in self.fates}
        rows += [[name, 0, "no row has it (--ignore-columns)"] for name in sorted(self.ignored - seen)]
        return Table(title="Columns", columns=("column", "times", "what became of it"), rows=rows)

    @property
    def samples_table(self) -> Table:
        """Turns and tokens."""
        few = sorted(number for number in self.turns if number <= MOST_TURN_COUNTS)
        turns = [f"{number}: {self.turns[number]:,}" for number in few]
        if more := sum(count for number, count in self.turns.items() if number > MOST_TURN_COUNTS):
            turns.append(f"more: {more:,}")
        share = self.trained / self.tokens if self.tokens else 0.0
        rows: list[list[Cell]] = [
            ["turns", ", ".join(f"{role} {count:,}" for role, count in self.roles.most_common())],
            ["rows by turns", ", ".join(turns)],
            ["answers", f"{self.answers:,} trained of {self.assistant_turns:,}, in {self.samples:,} samples"],
            ["tokens", f"{self.tokens:,}, of which {self.trained:,} are trained ({share:.1%}); none is cut"],
        ]
        return Table(title="Samples", columns=PAIRS, rows=rows)


def trained_tokens(sample: EncodedChat) -> int:
    """The tokens of a sample's answers, each with its EOS."""
    return len(sample.response) + 1 + sum(stop + 1 - start for start, stop in sample.earlier)


def show(shown: ShownSample, tokenizer: PreTrainedTokenizerBase, eos_token_id: int, *, colour: bool) -> str:
    """A sample as text, with trained text in green and control tokens in blue. Without colours, `[[` and `]]` enclose
    the trained text."""
    sample = shown.sample
    tokens = [*sample.tokens, eos_token_id]
    trained = [False] * len(sample.prompt) + [True] * (len(sample.response) + 1)
    for start, stop in sample.earlier:
        trained[start : stop + 1] = [True] * (stop + 1 - start)
    controls = set(tokenizer.convert_tokens_to_ids(sorted(control_tokens(tokenizer))))
    kinds = [(is_trained, colour and token in controls) for is_trained, token in zip(trained, tokens, strict=True)]
    text = "".join(_styled(part, *kind, colour=colour) for kind, part in _parts(tokenizer, tokens, kinds))
    count = f"{len(tokens):,} tokens, {trained_tokens(sample):,} trained"
    return f"--- {shown.name}, sample {shown.number}: {count}\n{text}"


def _parts(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], kinds: Sequence[tuple[bool, bool]]
) -> Iterator[tuple[tuple[bool, bool], str]]:
    """The runs of tokens of one kind as texts; joined, they are the text of all tokens."""
    end, before = 0, ""
    for kind, run in itertools.groupby(kinds):
        end += len(list(run))
        text = decode_text(tokenizer, tokens[:end], special=True)
        yield kind, text[len(before) :]
        before = text


GREEN, BLUE, GREEN_BLUE, PLAIN = "\033[32m", "\033[34m", "\033[1;36m", "\033[0m"


def _styled(text: str, is_trained: bool, is_control: bool, *, colour: bool) -> str:
    if not colour:
        return f"[[{text}]]" if is_trained else text
    style = (GREEN_BLUE if is_trained else BLUE) if is_control else (GREEN if is_trained else "")
    return f"{style}{text}{PLAIN}" if style else text
