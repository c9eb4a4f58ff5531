"""The study's tables: valid calls, the right function, the right arguments, by arm, with a grammar and without.

`python -m research calls --sweep out/calls/sweep --out out/calls/report` judges the answers of sweeps over
`bfcl:multiple`, `bfcl-free:multiple` and `bfcl:irrelevance`, and keeps a row an answer, without its text.
`--report-only` prints the tables of kept rows again, `--category` those of another kind of question.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from mbd_core.command_line import command, refuse_given
from mbd_core.evaluation.measures.statistics import p_text, sign_test, wins_and_losses
from mbd_core.fields import DATA, OUTPUT, Flag
from mbd_core.files import check_target_folder, folder_beside, write_text
from mbd_core.tables import Cell
from research.tables import rows_of, table_lines

KIND, ROWS, TIMES = "judged calls", "rows.jsonl", "times.jsonl"
CATEGORY = "multiple"
CALLS = ("bfcl:", "bfcl-free:")
"""How the names of the tasks begin whose answers are calls; a sweep may have other tasks, too."""
FREE, GRAMMAR, NONE_FITS = "no", "yes", "yes, none fits"
"""Whether an answer was held to a grammar of calls, as the tables say it."""
SweptArm = tuple[str, str]
"""A model and a method."""
Step = Literal["is_call", "is_valid", "is_function", "is_right"]
STEPS: Mapping[Step, str] = {
    "is_call": "a call",
    "is_valid": "valid call",
    "is_function": "right function",
    "is_right": "right call",
}
BESIDE_CONTROL: tuple[tuple[str, Step], ...] = (
    (FREE, "is_valid"),
    (FREE, "is_right"),
    (GRAMMAR, "is_function"),
    (GRAMMAR, "is_right"),
)
BESIDE_OTHERS: tuple[tuple[str, Step], ...] = ((FREE, "is_right"), (GRAMMAR, "is_right"))


@dataclass(frozen=True, kw_only=True)
class JudgedAnswer:
    """An answer to a question, judged in steps.

    is_call      it calls functions
    is_valid     it is one call, of a function that was shown, with a JSON object of the function's parameters
    is_function  it is a valid call of the right function
    is_right     the arguments are right, too; where no function fits, the answer has no call
    """

    model: str
    method: str
    task: str
    problem: str
    is_call: bool
    is_valid: bool
    is_function: bool
    is_right: bool
    tokens: int
    forwards: int

    @property
    def arm(self) -> SweptArm:
        return self.model, self.method


@dataclass(frozen=True, kw_only=True)
class TimedAnswer:
    """A request that was decoded alone: its forwards, and their seconds."""

    model: str
    method: str
    task: str
    forwards: int
    seconds: float

    @property
    def arm(self) -> SweptArm:
        return self.model, self.method


def judged(row: Mapping[str, Any]) -> JudgedAnswer:
    """A sweep's sample, judged by its question's functions and its answer's calls."""
    reference = json.loads(row["reference"])
    shown = {function["name"]: set(function["parameters"]["properties"]) for function in reference["functions"]}
    calls = json.loads(row["text"])["calls"]
    is_valid = len(calls) == 1 and calls[0]["name"] in shown and _takes(shown[calls[0]["name"]], calls[0]["arguments"])
    return JudgedAnswer(
        model=row["model"],
        method=row["method"],
        task=row["task"],
        problem=row["problem_id"],
        is_call=bool(calls),
        is_valid=is_valid,
        is_function=is_valid and calls[0]["name"] in [name for call in reference["right"] for name in call],
        is_right=row["correct"],
        tokens=row["num_tokens"],
        forwards=row["num_forwards"],
    )


def _takes(parameters: set[str], text: str) -> bool:
    """Whether a call's arguments are a JSON object of these parameters."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) <= parameters


def run(
    *,
    sweep: Annotated[tuple[Path, ...], Flag("A sweep's folder; repeatable.", DATA, metavar="DIR")] = (),
    out: Annotated[Path | None, Flag("Folder that keeps the judged rows.", OUTPUT, metavar="DIR")] = None,
    overwrite: Annotated[bool, Flag("Replace a folder that this command wrote before.", OUTPUT)] = False,
    report_only: Annotated[
        Path | None, Flag("Judge nothing: the tables of the rows in this folder.", OUTPUT, metavar="DIR")
    ] = None,
    category: Annotated[str, Flag("Questions of the tables: a category of BFCL's.", OUTPUT)] = CATEGORY,
) -> None:
    """Judges the calls of a study's sweeps, and prints its tables."""
    from mbd_core.evaluation.sweep.folder import read_samples, read_times

    if bool(sweep) == (report_only is not None):
        raise ValueError("name the folders of sweeps (--sweep), or a folder of judged rows (--report-only)")
    if out is None:
        refuse_given(run, "without --out", overwrite=overwrite)
    if report_only is not None:
        refuse_given(run, "with --report-only, which judges nothing", out=out)
        print("\n".join(report(*kept(report_only), category)))
        return
    if out is not None:
        check_target_folder(out, KIND, overwrite=overwrite)
    answers = [
        judged(row)
        for folder in sweep
        for row in read_samples(folder)
        if row["error"] is None and row["task"].startswith(CALLS)
    ]
    times = [
        TimedAnswer(
            model=row["model"],
            method=row["method"],
            task=row["task"],
            forwards=row["num_forwards"],
            seconds=row["decode_seconds"],
        )
        for folder in sweep
        for row in read_times(folder)
        if row["error"] is None and row["run"] == "alone" and row["task"].startswith(CALLS)
    ]
    print("\n".join(report(answers, times, category)))  # a category without answers is refused before a folder is made
    if out is not None:
        with folder_beside(out, KIND, overwrite=overwrite) as folder:
            for name, rows in ((ROWS, answers), (TIMES, times)):
                write_text(folder / name, "".join(json.dumps(asdict(row)) + "\n" for row in rows))


def kept(folder: Path) -> tuple[list[JudgedAnswer], list[TimedAnswer]]:
    """The rows that an earlier call kept. Raises `ValueError` if the folder has none."""
    for name in (ROWS, TIMES):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; name the --out of an earlier call")
    return rows_of(folder / ROWS, JudgedAnswer), rows_of(folder / TIMES, TimedAnswer)


def report(answers: Sequence[JudgedAnswer], times: Sequence[TimedAnswer], category: str = CATEGORY) -> list[str]:
    """A table of the arms, a table of paired comparisons, and a table of a forward's milliseconds.

    The first arm is the control. Raises `ValueError` if no answer is to a question of the category.
    """
    named = {f"bfcl-free:{category}": FREE, f"bfcl:{category}": GRAMMAR, "bfcl:irrelevance": NONE_FITS}
    of: dict[tuple[SweptArm, str], list[JudgedAnswer]] = defaultdict(list)
    for row in answers:
        if row.task in named:
            of[row.arm, named[row.task]].append(row)
    if not any(held != NONE_FITS for _, held in of):
        present = ", ".join(sorted({row.task for row in answers})) or "no answers to bfcl's tasks"
        raise ValueError(f"no answer is to bfcl:{category}; there are {present}")
    times = [replace(row, task=named[row.task]) for row in times if row.task in named]
    arms = list(dict.fromkeys(row.arm for row in answers))
    return [
        *table_lines(
            ["model", "method", "grammar", *(f"{text} (%)" for text in STEPS.values()), "tokens a forward"],
            [line for arm in arms for line in _arm_lines(arm, of)],
            num_text=3,
        ),
        "",
        *table_lines(
            ["of the same questions", "by", "and by", "first alone", "second alone", "p"],
            [line for number, arm in enumerate(arms) for line in _pair_lines(arm, arms[:number], of)],
            num_text=3,
        ),
        *_time_table(arms, times),
    ]


def _time_table(arms: Sequence[SweptArm], times: Sequence[TimedAnswer]) -> list[str]:
    """The milliseconds of a forward; nothing for sweeps that timed no request."""
    lines = [line for arm in arms for line in _time_lines(arm, times)]
    head = ["model", "method", "ms a forward", "with a grammar", "ratio"]
    return ["", *table_lines(head, lines, num_text=2)] if lines else []


def _arm_lines(arm: SweptArm, of: Mapping[tuple[SweptArm, str], Sequence[JudgedAnswer]]) -> Iterator[list[Cell]]:
    for held in (FREE, GRAMMAR, NONE_FITS):
        if rows := of.get((arm, held)):
            shares = [f"{100 * sum(getattr(row, step) for row in rows) / len(rows):.1f}" for step in STEPS]
            if held == NONE_FITS:
                shares[1:3] = ["", ""]  # the right answer has no call
            tpf = sum(row.tokens for row in rows) / sum(row.forwards for row in rows)
            yield [*arm, held, *shares, f"{tpf:.2f}"]


def _pair_lines(
    arm: SweptArm, earlier: Sequence[SweptArm], of: Mapping[tuple[SweptArm, str], Sequence[JudgedAnswer]]
) -> Iterator[list[Cell]]:
    """Exact sign tests: of the arm and the control, of the arm and other models' arms, and of the arm with a grammar
    and without."""
    named = " ".join(arm)
    for other in earlier:
        steps = BESIDE_CONTROL if other == earlier[0] else BESIDE_OTHERS if other[0] != arm[0] else ()
        for held, step in steps:
            what = f"{STEPS[step]}, {'free' if held == FREE else 'with a grammar'}"
            yield [what, " ".join(other), named, *_alone(of[other, held], of[arm, held], step)]
    alone = _alone(of[arm, GRAMMAR], of[arm, FREE], "is_right")
    yield [STEPS["is_right"], f"{named}, with a grammar", f"{named}, free", *alone]


def _alone(first: Sequence[JudgedAnswer], second: Sequence[JudgedAnswer], step: Step) -> tuple[int, int, str]:
    values, others = ({row.problem: int(getattr(row, step)) for row in rows} for rows in (first, second))
    wins, losses = wins_and_losses((problem, values[problem] - others[problem]) for problem in values.keys() & others)
    return wins, losses, p_text(sign_test(wins, losses))


def _time_lines(arm: SweptArm, times: Sequence[TimedAnswer]) -> Iterator[list[Cell]]:
    """The median of the requests' milliseconds a forward."""
    free, held = (
        [1000 * row.seconds / row.forwards for row in times if row.arm == arm and row.task == held]
        for held in (FREE, GRAMMAR)
    )
    if free and held:
        yield [*arm, f"{median(free):.1f}", f"{median(held):.1f}", f"{median(held) / median(free):.3f}"]


main = command(run, "python -m research calls")
