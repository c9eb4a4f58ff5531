"""LiveCodeBench: its rows, its windows of dates, its prompt, and its grader on right and wrong programs."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from jobs.grade import main
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.livecodebench import ContestProblem, extract_code, same_output, same_result
from mbd_core.evaluation.tasks.kinds.task import Grade, Problem
from mbd_core.evaluation.tasks.problems import load_problems

TASK = find_task("livecodebench")
SUMS = [("1 2\n", "3\n"), ("10 20", "30"), ("-5 5\n", "0")]


def listed(tests: list[tuple[str, str]], kind: str = "stdin") -> str:
    return json.dumps([{"input": given, "output": out, "testtype": kind} for given, out in tests])


def pickled(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def row_of(tests: list[tuple[str, str]] = SUMS, **fields: Any) -> dict[str, Any]:
    function = fields.pop("function", "")
    kind = "functional" if function else "stdin"
    return {
        "question_title": "A",
        "question_content": "Add two numbers.",
        "platform": "leetcode" if function else "atcoder",
        "question_id": "abc001_a",
        "contest_id": "abc001",
        "contest_date": "2024-08-31T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": listed(tests[:1], kind),
        "private_test_cases": pickled(listed(tests[1:], kind)),
        "metadata": json.dumps({"func_name": function} if function else {}),
        **fields,
    }


def problem_of(tests: list[tuple[str, str]] = SUMS, **fields: Any) -> Problem:
    return TASK.problem("1", row_of(tests, **fields))


def graded(program: str, problem: Problem) -> Grade:
    return TASK.grade_program(problem, program)


READING = "a, b = map(int, {read}.split())\nprint(a + b)"


@pytest.mark.parametrize(
    "program",
    [
        READING.format(read="input()"),
        "import sys\n" + READING.format(read="sys.stdin.readline()"),
        "from sys import stdin, stdout\na, b = map(int, stdin.read().split())\nstdout.write(f'{a + b}')",
        "import sys\n" + READING.format(read="sys.stdin.buffer.read()"),
        READING.format(read="open(0).read()"),
        "def main():\n    print(sum(map(int, input().split())))\n    exit()\nif __name__ == '__main__':\n    main()",
        "with open('/dev/stdin') as file:\n    print(sum(map(int, file.read().split())), end='\\n\\n  ')",
        "print(reduce(operator.add, map(float, input().split())))",
        "import sys\na, b = map(int, sys.stdin.buffer.read().split())\nsys.stdout.buffer.write(str(a + b).encode())",
        "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(b'%d' % sum(map(int, line.split())))",
        "import sys\nwrite = sys.stdout.buffer.write\nprint(end='')\nwrite(b'%d' % sum(map(int, input().split())))",
        "import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\n" + READING.format(read="input()"),
        "import sys, io\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\n" + READING.format(read="input()"),
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def deep(n):\n    return n and deep(n - 1)\n"
        "def main():\n    deep(20000)\n    print(sum(map(int, input().split())))\n"
        "thread = threading.Thread(target=main)\nthread.start()\nthread.join()",
        "import threading, time\ndef main():\n    time.sleep(0.1)\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=main).start()",
    ],
)
def test_a_program_that_reads_its_input_passes_every_test(program: str) -> None:
    assert graded(program, problem_of()).reason == "passed"


@pytest.mark.parametrize(
    "rest",
    [
        "sys.stdin.buffer.read()",
        "b''.join(sys.stdin.buffer)",
        "b''.join(sys.stdin.buffer.readlines())",
        "sys.stdin.buffer.read1() + sys.stdin.buffer.read(100)",
        "sys.stdin.read()",
        "''.join(sys.stdin)",
        "open(0, 'rb').read()",
    ],
)
@pytest.mark.parametrize(
    "first", ["input()", "sys.stdin.readline()", "sys.stdin.buffer.readline()", "next(sys.stdin)"]
)
def test_text_and_bytes_of_the_input_have_one_place(first: str, rest: str) -> None:
    problem = problem_of([("2\n10 20\n30 40\n", "100\n"), ("1\n5 5", "10\n")])
    program = f"import sys\nn = int({first})\nprint(sum(map(int, ({rest}).split())))"
    assert graded(program, problem).reason == "passed"


def test_text_and_bytes_of_the_output_keep_their_order() -> None:
    program = (
        "from sys import stdout\nfor n in range(3):\n"
        "    print(n)\n    stdout.buffer.write(b'b\\n')\n    stdout.write('t\\n')"
    )
    assert graded(program, problem_of([("", "0\nb\nt\n1\nb\nt\n2\nb\nt")])).reason == "passed"
    assert graded("import sys\nsys.stdout.buffer.write(b'\\xff')", problem_of()).reason == "wrong"


@pytest.mark.parametrize(
    "read",
    [
        "__import__('os').read(0, 1 << 20)",
        "__import__('os').read(__import__('sys').stdin.fileno(), 1 << 20)",
        "open(__import__('sys').stdin.fileno()).read()",
        "__import__('mmap').mmap(0, 0).read()",
    ],
)
def test_there_is_no_descriptor_of_the_input_as_in_the_benchmark(read: str) -> None:
    assert graded(READING.format(read=read), problem_of()).reason == "error"


def test_a_program_behind_the_benchmark_s_own_imports_has_no_future_import() -> None:
    assert (
        graded("from __future__ import annotations\n" + READING.format(read="input()"), problem_of()).reason == "error"
    )
    method = "from __future__ import annotations\nclass Solution:\n    def add(self, a, b):\n        return a + b"
    assert graded(method, problem_of([("1\n2", "3")], function="add")).reason == "error"


def test_every_wrong_input_is_named_and_counted() -> None:
    tests = [(f"{n}\n", f"{n * n}\n") for n in range(60)]
    found = graded("n = int(input())\nprint(n * n if n % 2 else -1)", problem_of(tests))
    assert (found.correct, found.reason) == (False, "wrong")
    assert found.detail.startswith("input 0; wrong inputs: 0, 2, 4,") and found.detail.endswith("(30 of 60)")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(3)", "wrong"),
        ("raise SystemExit", "wrong"),
        ("import os\nos._exit(0)", "error"),
        ("print(", "error"),
        ("", "error"),
        ("1 / 0", "error"),
        ("print('x' * (1 << 20))", "wrong"),
        ('import os\nos.write(5, b\'=["str","3",0.1]\\n\' * 9)', "error"),
    ],
)
def test_a_program_that_prints_something_else_fails(program: str, reason: str) -> None:
    found = graded(program, problem_of())
    assert (found.correct, found.reason) == (False, reason), found


def test_a_test_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbd_core.evaluation.tasks.kinds.livecodebench.TEST_SECONDS", 0.3)
    problem = problem_of([(f"{n} 0", f"{n}") for n in range(5)], question_id="timed")
    sleeping = "import time\ntime.sleep({})\n" + READING.format(read="input()")
    assert graded(sleeping.format(0.1), problem).reason == "passed", "half a second in all"
    assert graded(sleeping.format(2), problem).reason == "timeout"


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("class Solution:\n    def pairs(self, xs: List[int], k: int):\n        return [(x, k) for x in xs]", False),
        (
            "class Solution:\n    def pairs(self, xs: List[int], k: int):\n        return tuple([x, k] for x in xs)",
            True,
        ),
        ("def pairs(xs, k):\n    return [[x, k] for x in xs]", True),
        ("class Solution:\n    def other(self, xs, k):\n        return []", False),
    ],
)
def test_a_method_is_called_with_a_line_of_json_for_each_argument(program: str, right: bool) -> None:
    problem = problem_of([("[1, 2]\n7", "[[1, 7], [2, 7]]"), ("[]\n0", "[]")], function="pairs")
    assert graded(program, problem).correct == right


@pytest.mark.parametrize(
    ("out", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3 \n\n", "3", True),
        ("1 2\n 3 ", "1 2\n3", True),
        ("1  2", "1 2", True),  # by the numbers' values
        ("1.50 2", "1.5 2.0", True),
        ("50000000000000001", "50000000000000000", False),
        ("1.4999999999999999", "1.5", False),  # no tolerance
        ("yes", "YES", False),
        ("a  b", "a b", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("sNaN", "1", False),
    ],
)
def test_outputs_are_the_same_line_by_line(out: str, expected: str, same: bool) -> None:
    assert same_output(out, expected) == same
    assert not same_result([(1,)], [[1]]) and same_result((1, 2), [1, 2])


def test_the_program_stands_between_the_last_two_fences() -> None:
    assert extract_code("```python\nold\n```\ntext\n```python\nnew\n```\n") == "new"
    assert extract_code("a = 1\n```") == "" == extract_code("print(3)")
    text = "So:\n```python\n" + READING.format(read="input()") + "\n```"
    assert TASK.grade(problem_of(), text).correct


def test_private_tests_are_read_in_both_forms_and_never_unpickled() -> None:
    tests = ContestProblem.of_row(row_of()).tests()
    assert tests == ContestProblem.of_row(row_of(private_test_cases=listed(SUMS[1:]))).tests() == SUMS
    old = base64.b64encode(zlib.compress(pickle.dumps(listed(SUMS[1:]), protocol=2))).decode()
    assert ContestProblem.of_row(row_of(private_test_cases=old)).tests() == SUMS
    ran: list[str] = []

    class Hostile:
        def __reduce__(self) -> Any:
            return ran.append, ("code",)

    for private in (
        base64.b64encode(zlib.compress(b"c__builtin__\nprint\n(S'x'\ntR.")).decode(),
        pickled(["a list"]),
        pickled(print),
        "!",
        base64.b64encode(b"no zlib").decode(),
        pickled("no JSON"),
        pickled('{"input": 1}'),
        pickled(listed(SUMS))[:-8],
    ):
        with pytest.raises(ValueError, match="private_test_cases"):
            ContestProblem.of_row(row_of(private_test_cases=private))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "hold no test"),
        ({"public_test_cases": '[{"input": 1, "output": "2"}]'}, "public_test_cases"),
        ({"metadata": '{"func_name": "a b"}'}, "func_name"),
        ({"contest_date": "31 August"}, "contest_date"),
        ({"starter_code": None}, "starter_code"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of()) + "\n" + json.dumps(row_of(question_id="b", **fields)) + "\n")
    with pytest.raises(ValueError, match=f"line 2: .*{named}"):
        load_problems(find_task("livecodebench:2024-01.."), data=str(path))


DATES = ("2024-07-31", "2024-08-01T00:00:00", "2024-09-15", "2025-01-31", "2025-02-01")


@pytest.mark.parametrize(
    ("window", "held"),
    [
        ("2024-08..2025-01", 3),
        ("2024-08..", 4),
        ("..2024-08", 2),
        ("2024-08-02..2025-01-30", 1),
        ("2024-08..2024-08", 1),
    ],
)
def test_a_window_holds_both_its_ends(tmp_path: Path, window: str, held: int) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [row_of(question_id=date, contest_date=date) for date in DATES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load_problems(find_task(f"livecodebench:{window}"), data=str(path)).problems) == held
    with pytest.raises(ValueError, match="2026-01"):
        load_problems(find_task("livecodebench:2026-01.."), data=str(path))


@pytest.mark.parametrize("window", ["2024-08", "..", "", "v6", "2024-13..", "2025-01..2024-08", "2024..2025"])
def test_what_is_no_window_is_refused(window: str) -> None:
    with pytest.raises(ValueError, match=r"window"):
        find_task(f"livecodebench:{window}")


def test_a_problem_is_asked_as_the_benchmark_asks_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    starter = row_of([("1\n2", "3")], function="add", question_id="2", starter_code="class Solution: {0}")
    path.write_text(json.dumps(row_of()) + "\n" + json.dumps(starter) + "\n")
    name = "livecodebench:2024-08..2024-08"
    options: dict[str, Any] = {
        "tasks": [name],
        "models": ["tiny-bd"],
        "methods": ["single"],
        "data": [f"{name}={path}"],
    }
    sweep = plan_sweep(load_inputs(SweepOptions(**options, recipe="lcb-runner", samples=2, temperature=0.2)))
    rows = list(sweep.rows())
    assert [(row["task"], row["problem_id"], row["draw"]) for row in rows] == [
        (name, problem, draw) for problem in ("abc001_a", "2") for draw in (0, 1)
    ]
    system, user = json.loads(rows[0]["input"])
    assert system["role"] == "system" and "expert Python programmer" in system["content"]
    assert user["content"].startswith("### Question:\nAdd two numbers.\n\n### Format: Read the inputs from stdin")
    assert user["content"].endswith("```\n\n### Answer: (use the provided format with backticks)\n\n")
    assert "```python\nclass Solution: {0}\n```" in json.loads(rows[2]["input"])[1]["content"]
    with pytest.raises(ValueError, match="--data PATH"):
        plan_sweep(load_inputs(SweepOptions(**{**options, "tasks": ["livecodebench"], "data": []})))


def test_anybodys_samples_are_graded_by_kind(tmp_path: Path) -> None:
    data, samples, out = tmp_path / "rows.jsonl", tmp_path / "samples.jsonl", tmp_path / "grades"
    rows = [row_of(), row_of([("1\n2", "3")], function="add", question_id="2", difficulty="hard")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = READING.format(read="input()")
    answers = [
        {"question_id": "abc001_a", "solution": program},
        {"question_id": "abc001_a", "text": f"```\n{program}\n```"},
        {"question_id": "2", "text": "no program"},
    ]
    samples.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    command = ["--task", "livecodebench", "--data", str(data), "--samples", str(samples), "--out", str(out)]
    assert main(command) == 0
    report = json.loads((out / "report.json").read_text())
    assert (report["samples"], report["correct"]) == (3, 2)
    assert report["by"]["easy"] == {"samples": 2, "correct": 2} and report["by"]["hard"]["correct"] == 0
    assert report["by"]["2024-08"]["samples"] == 3
    samples.write_text(json.dumps({"question_id": "2", "completion": "x"}) + "\n")
    assert main([*command, "--overwrite"]) == 2, "its prompts are no code that goes on"
