"""The program in an answer beside that of EvalPlus's own sanitiser, on many answers as models write them.

EvalPlus brings packages that this project does without: install it elsewhere (`pip install evalplus==0.3.1`) and put
its `evalplus.sanitize` on PATH.
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mbd_core.evaluation.sandbox.program_text import extract_program

RIGHT = (  # each gives 2 * x + 1
    "def f(x):\n    return 2 * x + 1",
    'def f(x: int) -> int:\n    """Twice.\n\n    >>> f(1)\n    3\n    """\n    result = x + x\n    return result + 1',
    "import math\n\ndef f(x):\n    return math.floor(2 * x) + 1",
    "from typing import List, Optional\n\ndef f(x: Optional[int]) -> int:\n    return sum([x, x, 1])",
    "def double(n):\n    return n * 2\n\ndef f(x):\n    return double(x) + 1",
    "ONE = 1\nFACTORS = {'two': 2}\n\ndef f(x):\n    return FACTORS['two'] * x + ONE",
    "class Two:\n    two = 2\n\n    def of(self, x):\n        return self.two * x\n\n"
    "def f(x):\n    return Two().of(x) + 1",
    "double = lambda x: 2 * x\n\ndef f(x):\n    return double(x) + 1",
    "f = lambda x: 2 * x + 1",
    "def f(x):\n    def inner(y):\n        return y + 1\n    return inner(2 * x)",
    "from functools import reduce\n\ndef f(x):\n    return reduce(lambda a, b: a + b, [x, x, 1])",
    "def add(a, b):\n    if a < 0:\n        return -f(-a)\n    return a + b\n\n\n"
    "def f(x):\n    # twice\n    return add(add(x, x), 1)",
    "def f(x):\n    text = '''\n```\nno fence\n```\n'''\n    return 2 * x + 1",
    "def f(x):\n    if x > 0:\n        return 2 * x + 1\n    elif x == 0:\n        return 1\n"
    "    else:\n        return None",
    "def f(x): return (\n    2 * x\n    + 1\n)",
    "from math import *\ndef f(x):\n    try:\n        return int(floor(2.0 * x)) + 1\n    finally:\n        pass",
)
WRONG = (
    "def f(x):\n    return 2 * x",
    "def f(x):\n    return undefined(x)",
    "def f(x):\n    return 2 * x +",
    "def g(x):\n    return 2 * x + 1",
    "def f(x)\n    return 2 * x + 1",
    "",
)
BEFORE = (
    "",
    "from __future__ import annotations",
    "import sys\nsys.setrecursionlimit(10000)",
    "'''A module.'''",
    "# Solution",
    "limit = int(input())",
    "import os, re",
)
BEHIND = (
    "",
    "print(f(3))",
    "assert f(1) == 3\nassert f(2) == 6",
    "n = int(input('Number: '))\nprint(f(n))",
    "data = open('in.txt').read()",
    "import argparse\nparser = argparse.ArgumentParser()\nargs = parser.parse_args()\nprint(f(args.n))",
    "if __name__ == '__main__':\n    import sys\n    print(f(int(sys.argv[1])))",
    "for value in range(3):\n    print(f(value))",
    "while True:\n    f(1)",
    "def test_f():\n    assert f(1) == 3\n\ntest_f()",
    "def main():\n    n = int(input())\n    print(f(n))\n\nmain()",
    "raise SystemExit",
    "with open('in.txt') as file:\n    print(f(int(file.read())))",
    "import unittest\n\nclass Test(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 3)\n\n"
    "unittest.main()",
    "values = [int(v) for v in input().split()]\nvalues.sort()",
    "total += 1",
)
LAYOUTS = (
    "{code}",
    "```python\n{code}\n```",
    "```\n{code}\n```",
    "```py\n{code}\n```\nThis doubles the number (and adds one).",
    "Here is the function:\n\n```python\n{code}\n```\n\nIt's right, isn't it?",
    "~~~python\n{code}\n~~~",
    "Sure!\n\n```Python3\n{code}",
    "# Solution\n\n## Code\n```python\n{code}\n```\n## Use\n```python\nprint(f(1))\n```",
    "Install:\n```bash\npip install numpy\n```\nThen:\n```python\n{code}\n```",
    "I think\n{code}\n\nExplanation: the function doubles.",
    "{code}\n```\nThe end.",
    'First the steps:\n1. double\n2. add one\n\n```python title="a.py"\n{code}\n```\n- O(1) time',
    "```python\n{code}\n```\n\nTest:\n```python\n>>> f(1)\n3\n```",
    "Answer:\n\r\n```python\r\n{code}\r\n```",
)
SANITIZE = """
import json, sys
from evalplus.sanitize import sanitize
json.dump([sanitize(answer, "f") for answer in json.load(sys.stdin)], sys.stdout)
"""
JUDGE = """
import contextlib, io, json, signal, sys
programs, verdicts, out = json.load(sys.stdin), [], sys.stdout
sys.stdin, sys.argv = io.StringIO(), ["x"]
def stop(*_): raise TimeoutError
signal.signal(signal.SIGALRM, stop)
for program in programs:
    space = {}
    signal.alarm(5)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(program, space)
            verdicts.append([space["f"](x) for x in (0, 1, 5)] == [1, 3, 11])
    except BaseException:
        verdicts.append(False)
    signal.alarm(0)
json.dump(verdicts, out)
"""


def drawn_answers(seed: int, number: int) -> Iterator[tuple[str, bool]]:
    """So many answers, and whether the code in it is right, whole and alone."""
    draw = random.Random(seed)
    for _ in range(number):
        is_right = draw.random() < 0.85
        around = [draw.choice(BEFORE), draw.choice(RIGHT if is_right else WRONG)]
        around += draw.choices(BEHIND, k=draw.randint(0, 2))
        text = draw.choice(("\n", "\n\n", "\n\n\n")).join(filter(None, around))
        if draw.random() < 0.1:
            is_right, second = False, draw.choice(RIGHT + WRONG)
            text += draw.choice((f"\n\n{second}", f"\n```\nor\n```python\n{second}"))
        if draw.random() < 0.1:
            is_right, text = False, text[: draw.randint(len(text) // 2, len(text))]
        yield draw.choice(LAYOUTS).replace("{code}", text), is_right


def run_script(python: str, script: str, value: object) -> list[object]:
    done = subprocess.run([python, "-c", script], input=json.dumps(value), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def test_the_right_code_is_found_whatever_stands_around_it() -> None:
    answers = [answer for answer, is_right in drawn_answers(1, 400) if is_right]
    verdicts = run_script(sys.executable, JUDGE, [extract_program("", "f", answer) for answer in answers])
    assert [answer for answer, verdict in zip(answers, verdicts, strict=True) if not verdict] == []


@pytest.mark.slow
def test_what_passes_by_evalplus_s_sanitizer_passes_here() -> None:
    """The other way round, what fails there and passes here is right code that the sanitiser loses, and little."""
    command = shutil.which("evalplus.sanitize")
    if command is None:
        pytest.skip("no evalplus.sanitize on PATH")
    answers = [answer for answer, _ in drawn_answers(2, 2000)]
    theirs = run_script(sys.executable, JUDGE, run_script(str(Path(command).with_name("python")), SANITIZE, answers))
    ours = run_script(sys.executable, JUDGE, [extract_program("", "f", answer) for answer in answers])
    pairs = list(zip(theirs, ours, strict=True))
    counts = {pair: pairs.count(pair) for pair in ((True, True), (False, False), (False, True), (True, False))}
    print(f"{len(answers)} answers, passed by EvalPlus's sanitiser and here: {counts}")
    lost = [answer for answer, (there, here) in zip(answers, pairs, strict=True) if there and not here]
    assert lost == []
    assert counts[False, True] <= 0.03 * len(answers)
