"""How often the grader of mathematical answers and math-verify are wrong, on right and wrong texts of many kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from benchmarks.graded_texts import (
    OWN_GOLDS,
    RIGHT_EXPRESSIONS,
    RIGHT_NUMBERS,
    RIGHT_PLACES,
    WRONG_EXPRESSIONS,
    WRONG_NUMBERS,
    WRONG_PLACES,
    TextForm,
    value_of,
)
from benchmarks.measuring import markdown
from jobs.command_line import JsonFile, Seed
from mbd_core.command_line import CommandText, command
from mbd_core.evaluation.tasks.answers.math_judge import MathJudge
from mbd_core.fields import DATA, OUTPUT, Flag, Ge
from mbd_core.files import check_new_file, write_json
from mbd_core.row_files.rows import read_file

FILES = {"gsm8k": "gsm8k/test.jsonl", "math500": "math500/test.jsonl"}
MOST_TRIES = 200  # golds that are tried for each wanted text
COLUMNS = {
    "task": "golds",
    "kind": "texts",
    "is_right": "are",
    "number": "number",
    "distinct": "distinct",
    "wrong": "wrong verdicts",
    "alone": "of math-verify alone",
}
TOTALS = {
    "task": "golds",
    "right": "right texts",
    "false_wrongs": "false wrongs",
    "false_wrongs_alone": "of math-verify alone",
    "wrong": "wrong texts",
    "false_rights": "false rights",
    "false_rights_alone": "of math-verify alone ",
}


@dataclass(frozen=True, kw_only=True)
class GraderKind:
    """Texts of one notation, or with the answer in one place: pairs of a gold and a text. `is_right` holds for all."""

    task: str
    name: str
    is_right: bool
    texts: Sequence[tuple[str, str]]


def load_golds(task: str, folder: Path | None) -> list[str]:
    """The answers of a benchmark's file, or golds of our own."""
    if folder is None:
        return list(OWN_GOLDS[task])
    path = folder / FILES[task]
    if not path.exists():
        raise ValueError(f"{path} is not there; name a folder that has {' and '.join(FILES.values())}")
    golds = []
    for row in read_file(str(path)):
        answer = row.values.get("answer")
        if not isinstance(answer, str):
            raise ValueError(f"{row.place}: answer must be a text, as in the benchmark's own file")
        golds.append(answer.rpartition("#### ")[2].strip())
    if not golds:
        raise ValueError(f"{path} holds no rows; give the benchmark's own file")
    return golds


def kinds_of(task: str, golds: Sequence[str], *, number: int, seed: int) -> Iterator[GraderKind]:
    """Every kind of which the golds have texts, with at most `number` texts each."""
    forms: list[tuple[bool, Mapping[str, TextForm]]] = [(True, RIGHT_NUMBERS), (False, WRONG_NUMBERS)]
    if task == "math500":
        forms += [(True, RIGHT_EXPRESSIONS), (False, WRONG_EXPRESSIONS)]
    for is_right, places in ((True, RIGHT_PLACES), (False, WRONG_PLACES)):
        forms.append((is_right, {name: partial(_in_place, place, golds) for name, place in places.items()}))
    for is_right, named in forms:
        for name, form in named.items():
            draw = random.Random(f"{seed} {task} {is_right} {name}")
            texts: list[tuple[str, str]] = []
            for _ in range(MOST_TRIES * number):
                gold = draw.choice(golds)
                if (text := form(gold, draw)) is not None:
                    texts.append((gold, text))
                if len(texts) == number:
                    break
            if texts:
                yield GraderKind(task=task, name=name, is_right=is_right, texts=texts)


def _in_place(place: str, golds: Sequence[str], gold: str, draw: random.Random) -> str | None:
    """A text with a gold in the place of an answer, and another number before or after it; `None` unless the gold
    is a number."""
    value, other = value_of(gold), value_of(draw.choice(golds))
    if value is None or other is None or value == other or "." in gold or "frac" in gold:
        return None
    return place.format(gold=gold, other=str(other.numerator) if other.numerator != value else "12345")


def math_verify_alone(gold: str, text: str) -> bool:
    """The verdict of math-verify, called as its documentation says."""
    from math_verify import parse, verify

    return bool(verify(parse(rf"\boxed{{{gold}}}"), parse(text)))


def count(kind: GraderKind, judge: MathJudge, *, alone: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A row of the table, and the texts with a wrong verdict."""
    failures = [(gold, text) for gold, text in kind.texts if judge.judge(gold, text).correct != kind.is_right]
    row = {
        "task": kind.task,
        "kind": kind.name,
        "is_right": "right" if kind.is_right else "wrong",
        "number": len(kind.texts),
        "distinct": len({*kind.texts}),
        "wrong": len(failures),
        "alone": sum(math_verify_alone(gold, text) != kind.is_right for gold, text in kind.texts) if alone else None,
    }
    return row, failures


def totals(rows: Sequence[Mapping[str, Any]], task: str) -> dict[str, Any]:
    """The sums of a benchmark's rows."""

    def total(is_right: str, column: str) -> int | None:
        values = [row[column] for row in rows if row["task"] == task and row["is_right"] == is_right]
        return None if None in values else sum(values)

    return {
        "task": task,
        "right": total("right", "number"),
        "false_wrongs": total("right", "wrong"),
        "false_wrongs_alone": total("right", "alone"),
        "wrong": total("wrong", "number"),
        "false_rights": total("wrong", "wrong"),
        "false_rights_alone": total("wrong", "alone"),
    }


def run_graders(
    command_line: CommandText,
    *,
    data_dir: Annotated[
        Path | None,
        Flag("Folder of gsm8k/test.jsonl and math500/test.jsonl (default: golds of our own)", DATA, metavar="DIR"),
    ] = None,
    number: Annotated[int, Ge(1), Flag("Texts of each kind.", DATA)] = 500,
    seed: Seed = 0,
    alone: Annotated[bool, Flag("Ask math-verify alone too.", DATA, name="--alone/--no-alone")] = True,
    show: Annotated[int, Ge(0), Flag("Texts with a wrong verdict to print, of each kind.", OUTPUT)] = 3,
    json: JsonFile = None,
) -> int:
    """Right and wrong texts of many kinds, judged by the grader of GSM8K and MATH and by math-verify alone.

    A kind is a notation of the gold answer or a place where an answer stands. A wrong text has another value. The exit
    code is 1 if the grader gives a wrong verdict.
    """
    if json is not None:
        check_new_file(json)
    kinds = [kind for task in FILES for kind in kinds_of(task, load_golds(task, data_dir), number=number, seed=seed)]
    judge, rows = MathJudge(), []
    for kind in tqdm(kinds, unit="kind", desc="graders", mininterval=1.0):
        row, failures = count(kind, judge, alone=alone)
        rows.append(row)
        for gold, text in failures[:show]:
            tqdm.write(f"{kind.task}, {kind.name}, {'right' if kind.is_right else 'wrong'}: {gold!r} and {text!r}")
    judge.close()
    sums = [totals(rows, task) for task in FILES]
    print(markdown(rows, COLUMNS), markdown(sums, TOTALS), sep="\n\n")
    if json is not None:
        write_json(json, {"settings": {"command": command_line}, "rows": rows, "totals": sums})
    return int(any(row["wrong"] for row in rows))


graders = command(run_graders, "python -m benchmarks graders")
