"""code-mini: small Python functions to write from a description, with tests, in HumanEval's columns.

A function applies a pipeline of stages (keep, change, order) to a list of integers and returns one result. The
pipeline with its constants is the *key* that decides the split.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.tasks.split import Split, distinct

FUNCTION_NAMES = ("solve", "process", "compute", "work", "calc", "run_list", "total_up", "pipeline")


ListStep = Callable[[list[int]], Any]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the pipeline: its description, its line of Python (on `xs`), its function, and near misses of it."""

    text: str
    line: str
    apply: ListStep
    near_misses: tuple[ListStep, ...] = ()


def _stage(n: int, text: str, line: str, make: Callable[[int], ListStep]) -> Stage:
    """A stage with the constant `n`; its near misses have n - 1 and n + 1."""
    return Stage(text=text, line=line, apply=make(n), near_misses=(make(n - 1), make(n + 1)))


def _keep(rng: random.Random) -> Stage:
    kind = rng.choice(("greater", "less", "divisible", "even", "odd"))
    n = rng.randint(2, 9)
    match kind:
        case "greater":
            text, line = f"keep the numbers greater than {n}", f"xs = [x for x in xs if x > {n}]"
            return _stage(n, text, line, lambda m: lambda xs: [x for x in xs if x > m])
        case "less":
            text, line = f"keep the numbers less than {n}", f"xs = [x for x in xs if x < {n}]"
            return _stage(n, text, line, lambda m: lambda xs: [x for x in xs if x < m])
        case "divisible":
            text, line = f"keep the multiples of {n}", f"xs = [x for x in xs if x % {n} == 0]"
            return _stage(n, text, line, lambda m: lambda xs: [x for x in xs if x % m == 0])
    remainder = 0 if kind == "even" else 1
    return Stage(
        text=f"keep the {kind} numbers",
        line=f"xs = [x for x in xs if x % 2 == {remainder}]",
        apply=lambda xs: [x for x in xs if x % 2 == remainder],
        near_misses=(lambda xs: [x for x in xs if x % 2 != remainder],),
    )


def _change(rng: random.Random) -> Stage:
    kind = rng.choice(("multiply", "add", "subtract", "square", "negate"))
    n = rng.randint(2, 9)
    match kind:
        case "multiply":
            text, line = f"multiply each by {n}", f"xs = [x * {n} for x in xs]"
            return _stage(n, text, line, lambda m: lambda xs: [x * m for x in xs])
        case "add":
            text, line = f"add {n} to each", f"xs = [x + {n} for x in xs]"
            return _stage(n, text, line, lambda m: lambda xs: [x + m for x in xs])
        case "subtract":
            text, line = f"subtract {n} from each", f"xs = [x - {n} for x in xs]"
            return _stage(n, text, line, lambda m: lambda xs: [x - m for x in xs])
        case "square":
            return Stage(text="square each", line="xs = [x * x for x in xs]", apply=lambda xs: [x * x for x in xs])
    return Stage(text="negate each", line="xs = [-x for x in xs]", apply=lambda xs: [-x for x in xs])


def _order(rng: random.Random) -> Stage:
    kind = rng.choice(("sort", "reverse", "first", "last", "skip"))
    n = rng.randint(2, 5)
    match kind:
        case "first":
            return _stage(n, f"take the first {n}", f"xs = xs[:{n}]", lambda m: lambda xs: xs[:m])
        case "last":
            return _stage(n, f"take the last {n}", f"xs = xs[-{n}:]", lambda m: lambda xs: xs[-m:])
        case "skip":
            return _stage(n, f"skip the first {n}", f"xs = xs[{n}:]", lambda m: lambda xs: xs[m:])
        case "sort":
            return Stage(text="sort them", line="xs = sorted(xs)", apply=sorted)
    return Stage(text="reverse them", line="xs = xs[::-1]", apply=lambda xs: xs[::-1])


RESULTS = (
    Stage(text="return the list", line="return xs", apply=lambda xs: xs),
    Stage(text="return the sum", line="return sum(xs)", apply=sum),
    Stage(text="return the count", line="return len(xs)", apply=len),
    Stage(text="return the largest or 0", line="return max(xs, default=0)", apply=lambda xs: max(xs, default=0)),
    Stage(text="return the smallest or 0", line="return min(xs, default=0)", apply=lambda xs: min(xs, default=0)),
)


def run(steps: Sequence[ListStep], xs: list[int]) -> Any:
    """The result of a pipeline on a list."""
    value: Any = list(xs)
    for step in steps:
        value = step(value)
    return value


def wrong_pipelines(stages: Sequence[Stage]) -> list[list[ListStep]]:
    """All pipelines with one stage (not the last) removed, or with one stage replaced by a near miss."""
    steps = [s.apply for s in stages]
    wrong = [steps[:i] + steps[i + 1 :] for i in range(len(stages) - 1)]
    for i, stage in enumerate(stages):
        wrong += [[*steps[:i], miss, *steps[i + 1 :]] for miss in stage.near_misses]
    return wrong


def checks(stages: Sequence[Stage], key: str) -> list[tuple[list[int], Any]]:
    """At least 6 inputs with their results, such that every wrong pipeline fails on one of them.

    At most 200 inputs are tried, because a wrong pipeline may be equivalent to the right pipeline.
    """
    rng = random.Random(key)
    steps, pipelines = [s.apply for s in stages], wrong_pipelines(stages)
    examples: list[tuple[list[int], Any]] = []
    for _ in range(200):
        xs = [rng.randint(-9, 20) for _ in range(rng.randint(4, 12))]
        value = run(steps, xs)
        remaining_pipelines = [wrong for wrong in pipelines if run(wrong, xs) == value]
        if len(remaining_pipelines) < len(pipelines) or len(examples) < 6:
            examples.append((xs, value))
        pipelines = remaining_pipelines
        if not pipelines and len(examples) >= 6:
            break
    return examples


def _problem(rng: random.Random) -> tuple[str, tuple[str, list[Stage]]]:
    makers = [rng.choice((_keep, _change, _order)) for _ in range(rng.randint(2, 3))]
    stages = [make(rng) for make in makers]
    stages.append(rng.choice(RESULTS))
    return "code " + "; ".join(s.line for s in stages), (rng.choice(FUNCTION_NAMES), stages)


def generate(*, split: Split, seed: int) -> Iterator[dict[str, str]]:
    """A stream of rows of one split, in HumanEval's columns, without repeats; a seed always gives the same stream."""
    rng = random.Random(f"code-mini/{split}/{seed}")
    for number, key, (name, stages) in distinct(lambda: _problem(rng), split):
        text = ", ".join(s.text for s in stages)
        tests = "".join(f"    assert candidate({xs}) == {value!r}\n" for xs, value in checks(stages, key))
        yield {
            "task_id": f"code-mini/{split}/{seed}/{number}",
            "prompt": f'def {name}(xs):\n    """{text[0].upper()}{text[1:]}."""\n',
            "canonical_solution": "".join(f"    {s.line}\n" for s in stages),
            "test": "def check(candidate):\n" + tests,
            "entry_point": name,
        }
