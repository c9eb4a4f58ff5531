"""Verdicts on calls beside those of BFCL's own checker, on right answers and mutations of them, of every question.

The package is installed without its dependencies into a folder of its own; its checker asks one of them, the table of
its models, for nothing but whether a model's names have no dots.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mbd_core.evaluation.tasks.kinds.function_calls import VERSION, WITH_ANSWERS

PROGRAM = r'''
import collections, copy, json, random, sys, types
from pathlib import Path

models = types.ModuleType("bfcl_eval.constants.model_config")
models.MODEL_CONFIG_MAPPING = collections.defaultdict(lambda: types.SimpleNamespace(underscore_to_dot=False))
sys.modules[models.__name__] = models
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from mbd_core.evaluation.tasks.answers.called_functions import FunctionCall, WrongCall, check_calls

rng = random.Random(0)
ODD = [0, 1, True, False, "x", "", "True", None, [], {}, [1], ["a"], [[1]], [{"a": 1}], 1.5, -1, "1"]
DATA = Path(sys.argv[1]) / "bfcl_eval/data"


def plain(calls):
    return [FunctionCall(name, arguments) for call in calls for name, arguments in call.items()]


def one_of(values):
    """One right value, with one of each of its own items; `None` if the argument may only be missing."""
    known = [value for value in values if value != ""]
    if not known:
        return None
    value = copy.deepcopy(rng.choice(known))
    if isinstance(value, list):
        return [items_of(item) if isinstance(item, dict) else item for item in value]
    return items_of(value) if isinstance(value, dict) else value


def items_of(values):
    items = {name: one_of(value) if isinstance(value, list) else value for name, value in values.items()}
    return {name: value for name, value in items.items() if value is not None}


def right_answer(right):
    answer = []
    for call in right:
        ((name, arguments),) = call.items()
        given = {key: one_of(v) for key, v in arguments.items() if not ("" in v and rng.random() < 0.4)}
        answer.append({name: {key: value for key, value in given.items() if value is not None}})
    return answer


def other_value(value):
    if isinstance(value, str):
        return rng.choice([value.upper(), value + " ", value.replace(" ", "_"), value + "!", value[:-1], [value]])
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value)])
    if isinstance(value, int):
        return rng.choice([value + 1, float(value), str(value), [value], bool(value)])
    if isinstance(value, float):
        return rng.choice([int(value), value + 0.1, str(value)])
    if isinstance(value, list):
        upper = [item.upper() if isinstance(item, str) else item for item in value]
        return rng.choice([value[::-1], value + value[:1], [*map(str, value)], [*value, rng.choice(ODD)], upper])
    if isinstance(value, dict) and value:
        key, changed = rng.choice(list(value)), copy.deepcopy(value)
        changed[key] = rng.choice([*ODD, str(changed[key]).upper()])
        if rng.random() < 0.5:
            del changed[key]
        return changed
    return rng.choice(ODD)


def mutated(calls):
    calls = copy.deepcopy(calls)
    for _ in range(rng.randint(1, 2)):
        if not calls:
            return [{"f": {}}]
        number = rng.randrange(len(calls))
        ((name, arguments),) = calls[number].items()
        kind = rng.random()
        if kind < 0.08:
            del calls[number]
        elif kind < 0.16:
            calls.append(copy.deepcopy(calls[number]))
        elif kind < 0.24:
            calls[number] = {name + "x": arguments}
        elif kind < 0.32:
            rng.shuffle(calls)
        elif not arguments:
            arguments["z"] = 1
        else:
            key = rng.choice(list(arguments))
            kind = rng.random()
            if kind < 0.15:
                del arguments[key]
            elif kind < 0.25:
                arguments[key + "q"] = arguments.pop(key)
            else:
                arguments[key] = rng.choice(ODD) if kind < 0.5 else other_value(arguments[key])
    return calls


counts = collections.Counter()
for category in sys.argv[2:]:
    lines = (DATA / "possible_answer" / f"BFCL_v4_{category}.json").read_text().splitlines()
    answers = {row["id"]: row["ground_truth"] for row in map(json.loads, lines)}
    for question in map(json.loads, (DATA / f"BFCL_v4_{category}.json").read_text().splitlines()):
        functions, right = question["function"], answers[question["id"]]
        for number in range(30):
            calls = right_answer(right) if number < 6 else mutated(right_answer(right))
            theirs = ast_checker(functions, calls, right, Language.PYTHON, category, "m")["valid"]
            try:
                check_calls(functions, plain(calls), plain(right))
                ours = True
            except WrongCall:
                ours = False
            counts["right" if theirs else "wrong"] += 1
            if ours != theirs:
                counts["differ"] += 1
                print(question["id"], ours, theirs, json.dumps(calls), file=sys.stderr)
print(json.dumps(counts))
'''


@pytest.mark.slow
def test_every_verdict_is_the_checker_s(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*install, f"bfcl-eval=={VERSION}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"bfcl-eval is not installed: {done.stderr.strip().splitlines()[-1]}")
    program = f"import sys\nsys.path.append({str(tmp_path)!r})\n" + PROGRAM
    command = [sys.executable, "-c", program, str(tmp_path), *WITH_ANSWERS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    print(counts)
    assert counts.get("differ", 0) == 0, done.stderr[-2000:]
    assert min(counts["right"], counts["wrong"]) > 10_000
