"""The study's questions: which function of Python's standard library to call, and with which arguments.

`python -m research calls-data --out out/calls/data` writes `train.jsonl` (conversations with functions, for
`mbd prepare`), and the folder `test` of unseen questions in the files of the Berkeley Function-Calling Leaderboard,
which tasks `bfcl:multiple` and `bfcl:irrelevance` read (`--data`). A hash of a function's name decides its split: no
function of the test was called or shown in training. Names, parameters and descriptions are those of the
Python that runs, so they differ a little from version to version.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from mbd_core.batch.tool_chats import ToolChat
from mbd_core.command_line import command
from mbd_core.evaluation.tasks.kinds.function_calls import named_task
from mbd_core.fields import OUTPUT, Flag
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.tasks.split import split_of
from research.real.data import NO_VERBS, third_person_of

KIND = "data of the study on calls"
SEED = 11
TRAINED, ASKED = 2_000, 200
"""Samples to train, and questions of the test."""
NONE_FITS = 5
"""One question in this many shows no function that fits."""
SHOWN = 3
"""Functions that a question shows."""
NO_CALL = "None of these functions does that."

KINDS: Mapping[str, tuple[str, str]] = {
    "path": (
        "string",
        "path src dst filename file dir directory pathname target source topdir root",
    ),
    "word": (
        "string",
        "s string text name key pattern pat prefix suffix encoding message msg url word line title value domain "
        "command cmd attribute typename format sep which",
    ),
    "integer": (
        "integer",
        "n k i count size length width indent level port fd pid uid gid mode offset year month day lineno status "
        "flags number index limit depth step",
    ),
    "float": ("float", "x y timeout delay seconds secs interval"),
}
"""For each kind of values: the leaderboard's name of the type, and the names of parameters that take such values."""
LOADING = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "lib2to3"}
"""Modules that do something when they are imported, or need a screen."""
TYPES = {bool: "boolean", int: "integer", float: "float", str: "string"}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A function's parameter: its type as the leaderboard names it, and its default; `None` where it must be given."""

    name: str
    kind: str
    default: Any


@dataclass(frozen=True, kw_only=True)
class PythonFunction:
    """A function of the standard library. `does` is its docstring's first sentence, which begins with a verb."""

    module: str
    name: str
    does: str
    parameters: Sequence[Parameter]

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"

    def described(self) -> dict[str, Any]:
        """The function as the leaderboard describes it, in the third person; a question begins with the bare verb."""
        return {
            "name": self.full_name,
            "description": third_person_of(self.does),
            "parameters": {
                "type": "dict",
                "properties": {parameter.name: {"type": parameter.kind} for parameter in self.parameters},
                "required": [parameter.name for parameter in self.parameters if parameter.default is None],
            },
        }


@cache
def functions() -> list[PythonFunction]:
    """The public functions of the standard library whose parameters' types are known, by name."""
    found: dict[str, PythonFunction] = {}
    for module in sorted(sys.stdlib_module_names - LOADING):
        if module.startswith("_"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                members = vars(importlib.import_module(module))
            except ImportError:
                continue
        for name, member in sorted(members.items()):
            function = _function(module, name, member)
            if function is not None:
                found.setdefault(f"{function.name} {function.does}", function)
    first_words = Counter(function.does.split(" ", 1)[0] for function in found.values())
    verbs = {word for word, count in first_words.items() if count >= 2} - NO_VERBS
    by_name = sorted(found.values(), key=lambda function: function.full_name)
    return [function for function in by_name if function.does.split(" ", 1)[0] in verbs]


def _function(module: str, name: str, member: Any) -> PythonFunction | None:
    """The function behind a name of a module; `None` if it is none, or its sentence or a parameter cannot be asked."""
    if name.startswith("_") or not (inspect.isfunction(member) or inspect.isbuiltin(member)):
        return None
    first = re.split(r"(?<=\.)\s", " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split()))[0]
    if not re.fullmatch(r"[A-Z][a-z]+ [^>()]{12,110}[a-z]\.", first) or first.split(" ", 1)[0].endswith("s"):
        return None
    try:
        signature = inspect.signature(member)
    except (ValueError, TypeError):
        return None
    parameters = [_parameter(parameter) for parameter in signature.parameters.values()]
    known = [parameter for parameter in parameters if parameter is not None]
    unknown = [own for own, read in zip(signature.parameters.values(), parameters, strict=True) if read is None]
    if not 1 <= len(known) <= 4 or any(own.default is own.empty for own in unknown):
        return None
    if all(parameter.default is not None for parameter in known):
        return None
    return PythonFunction(module=module, name=name, does=first, parameters=known)


def _parameter(parameter: inspect.Parameter) -> Parameter | None:
    default = None if parameter.default is parameter.empty else parameter.default
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    if type(default) in TYPES:
        return Parameter(name=parameter.name, kind=TYPES[type(default)], default=default)
    for kind, names in KINDS.values():
        if parameter.name in names.split() and parameter.default is parameter.empty:
            return Parameter(name=parameter.name, kind=kind, default=None)
    return None


def questions(split: Literal["train", "test"]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Endless questions in the leaderboard's form, each with its right call; `None` where no function fits."""
    every = functions()
    own = [function for function in every if (split_of(function.full_name) == "train") == (split == "train")]
    words = sorted({word for function in every for word in re.findall(r"\b[a-z]{4,9}\b", function.does)})
    rng = random.Random(f"calls/{SEED}/{split}")
    for number in itertools.count():
        asked = rng.choice(own)
        near = [function for function in own if function.does != asked.does]
        same = [function for function in near if function.module == asked.module]
        others = rng.sample(same, min(len(same), rng.randint(0, SHOWN - 1)))
        others += rng.sample([function for function in near if function not in others], SHOWN - len(others))
        fits = number % NONE_FITS != NONE_FITS - 1
        shown = [*others[: SHOWN - 1], asked] if fits else others[:SHOWN]
        rng.shuffle(shown)
        given = {p.name: _value(p, words, rng) for p in asked.parameters if p.default is None or rng.random() < 0.5}
        text = rng.choice(ASKING).format(do=asked.does[:-1], values=_listed(given))
        row = {"question": [[{"role": "user", "content": text}]], "function": [each.described() for each in shown]}
        right: dict[str, list[Any]] = {name: [value] for name, value in given.items()}
        # an argument that the question leaves out may be missing, or equal its default
        right |= {p.name: [p.default, ""] for p in asked.parameters if p.name not in given}
        yield row, {asked.full_name: right} if fits else None


ASKING = ("{do}. Use {values}.", "{do}, with {values}.", "Take {values}. {do}.", "Please do this with {values}: {do}.")


def _value(parameter: Parameter, words: Sequence[str], rng: random.Random) -> Any:
    if parameter.kind == "boolean":
        return not parameter.default
    if parameter.kind == "integer":
        return rng.randint(2, 400)
    if parameter.kind == "float":
        return rng.randint(11, 999) / 10
    first, second = rng.choice(words), rng.choice(words)
    if parameter.name in KINDS["path"][1].split():
        return f"{first}/{second}.{rng.choice(('txt', 'csv', 'py', 'log'))}"
    return rng.choice((first, f"{first} {second}", f"{first}_{second}"))


def _listed(given: Mapping[str, Any]) -> str:
    texts = [f"{name} {json.dumps(value)}" for name, value in given.items()]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def conversation(row: Mapping[str, Any], right: Mapping[str, Any] | None) -> dict[str, Any]:
    """The question as a sample to train: the functions as the task shows them, and the right call or the refusal."""
    truth = [] if right is None else [right]
    problem = named_task("bfcl:multiple").problem("0", {"id": "0", **row, "ground_truth": truth})
    chat = ToolChat.of_input(problem.prompt)
    assert chat is not None
    answer: dict[str, Any] = {"role": "assistant", "content": NO_CALL}
    for call in json.loads(problem.reference)["right"]:
        ((name, values),) = call.items()
        arguments = {key: value[0] for key, value in values.items() if "" not in value}
        answer |= {
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        }
    return {"messages": [*chat.messages, answer], "tools": chat.tools}


def run(*, out: Annotated[Path, Flag("Folder to write.", OUTPUT, metavar="DIR")]) -> None:
    """Writes the conversations of the study on calls, and unseen questions as tasks `bfcl:CATEGORY` read them."""
    check_target_folder(out, KIND)
    with folder_beside(out, KIND) as folder:
        train = [conversation(*pair) for pair in itertools.islice(questions("train"), TRAINED)]
        _write(folder / "train.jsonl", train)
        asked = list(itertools.islice(questions("test"), ASKED))
        for category, fits in (("multiple", True), ("irrelevance", False)):
            own = [(row, right) for row, right in asked if (right is not None) == fits]
            rows = [{"id": f"{category}_{number}", **row} for number, (row, _) in enumerate(own)]
            _write(folder / "test" / f"BFCL_v4_{category}.json", rows)
            if fits:
                answers = [
                    {"id": row["id"], "ground_truth": [right]} for row, (_, right) in zip(rows, own, strict=True)
                ]
                _write(folder / "test" / "possible_answer" / f"BFCL_v4_{category}.json", answers)
    print(f"wrote {out}")


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


main = command(run, "python -m research calls-data")
