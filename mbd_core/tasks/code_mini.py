"""code-mini: a described small Python function with tests to run, in HumanEval's columns.

A function takes a list of integers through a pipeline of steps (keep, change, order) to one result. The pipeline
with its constants is the *key* that decides the split.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mbd_core.tasks.split import Split, distinct

FUNCTION_NAMES = ("solve", "process", "compute", "work", "calc", "run_list", "total_up", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of the pipeline: its description, its line of Python (on `xs`) and what it does."""

    text: str
    line: str
    apply: Callable[[list[int]], Any]


def _keep(rng: random.Random) -> Stage:
    kind = rng.choice(("greater", "less", "divisible", "even", "odd"))
    n = rng.randint(2, 9)
    if kind == "greater":
        return Stage(
            text=f"keep the numbers greater than {n}",
            line=f"xs = [x for x in xs if x > {n}]",
            apply=lambda xs: [x for x in xs if x > n],
        )
    if kind == "less":
        return Stage(
            text=f"keep the numbers less than {n}",
            line=f"xs = [x for x in xs if x < {n}]",
            apply=lambda xs: [x for x in xs if x < n],
        )
    if kind == "divisible":
        return Stage(
            text=f"keep the multiples of {n}",
            line=f"xs = [x for x in xs if x % {n} == 0]",
            apply=lambda xs: [x for x in xs if x % n == 0],
        )
    rest = 0 if kind == "even" else 1
    return Stage(
        text=f"keep the {kind} numbers",
        line=f"xs = [x for x in xs if x % 2 == {rest}]",
        apply=lambda xs: [x for x in xs if x % 2 == rest],
    )


def _change(rng: random.Random) -> Stage:
    kind = rng.choice(("multiply", "add", "subtract", "square", "negate"))
    n = rng.randint(2, 9)
    if kind == "multiply":
        return Stage(
            text=f"multiply each by {n}", line=f"xs = [x * {n} for x in xs]", apply=lambda xs: [x * n for x in xs]
        )
    if kind == "add":
        return Stage(text=f"add {n} to each", line=f"xs = [x + {n} for x in xs]", apply=lambda xs: [x + n for x in xs])
    if kind == "subtract":
        return Stage(
            text=f"subtract {n} from each", line=f"xs = [x - {n} for x in xs]", apply=lambda xs: [x - n for x in xs]
        )
    if kind == "square":
        return Stage(text="square each", line="xs = [x * x for x in xs]", apply=lambda xs: [x * x for x in xs])
    return Stage(text="negate each", line="xs = [-x for x in xs]", apply=lambda xs: [-x for x in xs])


def _order(rng: random.Random) -> Stage:
    kind = rng.choice(("sort", "reverse", "first", "last", "skip"))
    n = rng.randint(2, 5)
    if kind == "sort":
        return Stage(text="sort them", line="xs = sorted(xs)", apply=sorted)
    if kind == "reverse":
        return Stage(text="reverse them", line="xs = xs[::-1]", apply=lambda xs: xs[::-1])
    if kind == "first":
        return Stage(text=f"take the first {n}", line=f"xs = xs[:{n}]", apply=lambda xs: xs[:n])
    if kind == "last":
        return Stage(text=f"take the last {n}", line=f"xs = xs[-{n}:]", apply=lambda xs: xs[-n:])
    return Stage(text=f"skip the first {n}", line=f"xs = xs[{n}:]", apply=lambda xs: xs[n:])


RESULTS = (
    Stage(text="return the list", line="return xs", apply=lambda xs: xs),
    Stage(text="return the sum", line="return sum(xs)", apply=sum),
    Stage(text="return the count", line="return len(xs)", apply=len),
    Stage(text="return the largest or 0", line="return max(xs, default=0)", apply=lambda xs: max(xs, default=0)),
    Stage(text="return the smallest or 0", line="return min(xs, default=0)", apply=lambda xs: min(xs, default=0)),
)


def _problem(rng: random.Random) -> tuple[str, dict[str, str]]:
    makers = [rng.choice((_keep, _change, _order)) for _ in range(rng.randint(2, 3))]
    stages = [make(rng) for make in makers]
    stages.append(rng.choice(RESULTS))
    name = rng.choice(FUNCTION_NAMES)
    text = ", ".join(s.text for s in stages)
    prompt = f'def {name}(xs):\n    """{text[0].upper()}{text[1:]}."""\n'
    solution = "".join(f"    {s.line}\n" for s in stages)
    checks = []
    for _ in range(6):
        xs = [rng.randint(-9, 20) for _ in range(rng.randint(4, 9))]
        value: Any = list(xs)
        for stage in stages:
            value = stage.apply(value)
        checks.append(f"    assert candidate({xs}) == {value!r}\n")
    test = "def check(candidate):\n" + "".join(checks)
    key = "code " + "; ".join(s.line for s in stages)
    return key, {"prompt": prompt, "canonical_solution": solution, "test": test, "entry_point": name}


def generate(*, split: Split, seed: int) -> Iterator[dict[str, str]]:
    """A stream of HumanEval-shaped rows of one split, no problem twice; a seed always gives the same."""
    rng = random.Random(f"code-mini/{split}/{seed}")
    for number, row in distinct(lambda: _problem(rng), split):
        yield {"task_id": f"code-mini/{split}/{seed}/{number}", **row}
