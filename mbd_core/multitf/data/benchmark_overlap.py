"""Which training prompts repeat a benchmark's problems: the same run of words in both."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mbd_core.multitf.data.known_names import PROMPTS

RUN = 13
"""The length of a run in words, as is usual in decontamination; a shorter problem counts as a whole."""
MOST_EXAMPLES = 5
PROBLEM_COLUMNS = (*PROMPTS, "text")


def words(text: str) -> list[str]:
    """The text's words and numbers in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def runs(text: str, size: int = RUN) -> Iterator[tuple[str, ...]]:
    """Every run of `size` words; of a shorter text all its words, if there are at least three."""
    if len(words(text)) >= size:
        yield from _windows(text, size)
    elif len(words(text)) >= 3:
        yield tuple(words(text))


@dataclass
class Benchmark:
    """A benchmark's problems as runs of words, and the counts of training prompts that repeat them."""

    name: str
    problems: dict[tuple[str, ...], int]
    lengths: frozenset[int]
    rows: int = 0
    seen: set[int] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> "Benchmark":
        """The benchmark of a file's rows, each with its name. Raises `ValueError` if they hold no problem."""
        problems: dict[tuple[str, ...], int] = {}
        for number, (row_name, row) in enumerate(rows):
            column = next((c for c in PROBLEM_COLUMNS if isinstance(row.get(c), str)), None)
            if column is None:
                raise ValueError(f"{row_name}: a benchmark's row needs one of {', '.join(PROBLEM_COLUMNS)}, as text")
            for run in runs(row[column]):
                problems.setdefault(run, number)
        if not problems:
            raise ValueError(f"{name} holds no problem with which to compare")
        return cls(name, problems, frozenset(map(len, problems)))

    def check(self, name: str, prompts: Sequence[str]) -> bool:
        """Whether a row's prompts repeat a problem; counts the row if so."""
        problems = {
            self.problems[run]
            for prompt in prompts
            for size in self.lengths
            for run in _windows(prompt, size)
            if run in self.problems
        }
        if problems:
            self.rows += 1
            self.seen |= problems
            if len(self.examples) < MOST_EXAMPLES:
                self.examples.append(name)
        return bool(problems)

    def report(self) -> dict[str, object]:
        """The number of rows that repeat a problem, the number of repeated problems, and the first rows' names."""
        return {"rows": self.rows, "problems": len(self.seen), "first": list(self.examples)}


def _windows(text: str, size: int) -> Iterator[tuple[str, ...]]:
    row = words(text)
    return (tuple(row[i : i + size]) for i in range(len(row) - size + 1))
