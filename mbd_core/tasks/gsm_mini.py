"""gsm-mini: arithmetic word problems of several steps, in GSM8K's columns (`question`, `answer` ending in `#### N`).

A problem is a short chain of steps over one running count. Its *key* (the verbs and numbers, without the names and
things) decides the split, so no test problem occurs in training with another name or other things. The same numbers
may occur in training with another verb of the same meaning (research/ledger/gsm_mini.md has the frequency).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mbd_core.tasks.split import Split, distinct

NAMES = ("Tom", "Mia", "Sam", "Ana", "Leo", "Zoe", "Max", "Eva", "Ben", "Lily", "Omar", "Nina")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "marbles", "cups", "stones")
CONTAINERS = ("bags", "boxes", "packs")
MAX_COUNT = 99


@dataclass(frozen=True, kw_only=True)
class CountChange:
    """One change of the running count, with its sentence in the question and its working in the answer."""

    verb: str
    numbers: tuple[int, ...]
    sentence: str
    working: str
    result: int


def _gain(rng: random.Random, count: int, name: str, thing: str) -> CountChange | None:
    high = min(40, MAX_COUNT - count)
    if high < 2:
        return None
    verb = rng.choice(("buys", "finds", "gets"))
    n = rng.randint(2, high)
    return CountChange(
        verb=verb,
        numbers=(n,),
        sentence=f"{name} {verb} {n} more {thing}.",
        working=f"{name} {verb} {n}, so there are {count} + {n} = {count + n} {thing}.",
        result=count + n,
    )


def _loss(rng: random.Random, count: int, name: str, thing: str) -> CountChange | None:
    if count < 4:
        return None
    verb = rng.choice(("loses", "sells", "gives away"))
    n = rng.randint(2, min(40, count - 1))
    return CountChange(
        verb=verb,
        numbers=(n,),
        sentence=f"{name} {verb} {n} {thing}.",
        working=f"{name} {verb} {n}, so there are {count} - {n} = {count - n} {thing}.",
        result=count - n,
    )


def _packs(rng: random.Random, count: int, name: str, thing: str) -> CountChange | None:
    n, each = rng.randint(2, 6), rng.randint(2, 6)
    if count + n * each > MAX_COUNT:
        return None
    box = rng.choice(CONTAINERS)
    total = n * each
    return CountChange(
        verb=box,
        numbers=(n, each),
        sentence=f"{name} buys {n} {box} with {each} {thing} each.",
        working=f"The {box} hold {n} * {each} = {total}, so there are {count} + {total} = {count + total} {thing}.",
        result=count + total,
    )


def _double(rng: random.Random, count: int, name: str, thing: str) -> CountChange | None:
    if not 2 <= count <= MAX_COUNT // 2:
        return None
    return CountChange(
        verb="doubles",
        numbers=(),
        sentence=f"{name} doubles the number of {thing}.",
        working=f"{name} doubles them, so there are {count} * 2 = {count * 2} {thing}.",
        result=count * 2,
    )


STEPS = (_gain, _loss, _packs, _gain, _loss, _double)


def _problem(rng: random.Random) -> tuple[str, dict[str, str]]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start = count = rng.randint(3, 40)
    steps: list[CountChange] = []
    num_steps = rng.randint(2, 3)
    while len(steps) < num_steps:
        step = rng.choice(STEPS)(rng, count, name, thing)
        if step is not None:
            steps.append(step)
            count = step.result
    key = f"gsm {start} " + " ".join(f"{s.verb}{s.numbers}" for s in steps)
    question = " ".join(
        [f"{name} has {start} {thing}."] + [s.sentence for s in steps] + [f"How many {thing} does {name} have now?"]
    )
    answer = "\n".join([s.working for s in steps] + [f"#### {count}"])
    return key, {"question": question, "answer": answer}


def generate(*, split: Split, seed: int) -> Iterator[dict[str, str]]:
    """A stream of `{"question", "answer"}` rows of one split, without repeats; a seed always gives the same stream."""
    rng = random.Random(f"gsm-mini/{split}/{seed}")
    for _, _, row in distinct(lambda: _problem(rng), split):
        yield row
