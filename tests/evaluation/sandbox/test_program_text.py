"""The program in an answer, in every layout that models write."""

import contextlib
import time
from typing import Any

import pytest

from mbd_core.evaluation.sandbox.program_text import extract_program

PROMPT = (
    'from typing import List\n\ndef helper(x):\n    return x + 1\n\ndef f(xs: List[int]) -> int:\n    """Sum."""\n'
)
BODY = "    total = 0\n    for x in xs:\n        total += helper(x)\n    return total\n"
WHOLE = f"def f(xs):\n{BODY}"


def result(text: str, prompt: str = PROMPT) -> int:
    space: dict[str, object] = {}
    exec(extract_program(prompt, "f", text), space)
    return space["f"]([1, 2])  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize(
    "text",
    [
        BODY,
        BODY + "\nThis adds one to each.\n",
        BODY + "\n\nExplanation\n",
        BODY + "\nprint(f([1]))\nassert f([1]) == 3\n",
        BODY + "\nif __name__ == '__main__':\n    raise SystemExit\n",
        WHOLE,
        f"Here is the function:\n\n{WHOLE}\nIt uses `helper`.",
        f"```python\n{PROMPT}{BODY}```",
        f"```python\n{WHOLE}```",
        f"```python\n{WHOLE}",
        f"```\n{WHOLE}\n```\nprose",
        f"{WHOLE}```\nThe end of a fence that the prompt opened.",
        f"Two steps.\n```python\n{PROMPT}    pass\n```\nNow really:\n\n```python\n{WHOLE}```\n",
        f"```python\n{WHOLE}```\nUse it so:\n```python\nprint(f([1, 2]))\n```\n",
        f"```python\n{BODY}```",
        f"~~~python\r\n{WHOLE}~~~".replace("\n", "\r\n"),
        f"```python\nimport math\nLIMIT = 3\n\n@staticmethod\ndef g(x):\n    return x\n\n{WHOLE}f([3])\n```",
    ],
)
def test_a_layout_gives_the_program(text: str) -> None:
    assert result(text) == 5


def test_the_longest_code_with_the_function_counts_and_in_it_the_first_definition_as_in_evalplus() -> None:
    short = "def f(xs):\n    return 0\n"
    for blocks in ((WHOLE, short), (short, WHOLE)):
        assert result("or\n".join(f"```python\n{block}```\n" for block in blocks)) == 5
    assert result(f"```python\n{short}\n{WHOLE}```") == 0
    assert result(f"```python\ndef f(xs):\n    pass\n\n{WHOLE}```") == 5, "a stub is no definition"
    assert result(f"<think>\n{WHOLE}\n</think>\n{short}") == 0, "reasoning is no answer"


TWICE = "def f(x):\n    return 2 * x + 1"


@pytest.mark.parametrize(
    "driver",
    [
        "x = int(input('Number: '))\nprint(f(x))",
        "data = open('in.txt').read()",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\nargs = parser.parse_args()",
        "if __name__ == '__main__':\n    import sys\n    print(f(int(sys.argv[1])))",
        "import matplotlib.pyplot as plt\nplt.plot([f(1)])",
        "with open('in.txt') as file:\n    x = int(file.read())",
        "try:\n    x = int(input())\nexcept ValueError:\n    raise",
        "assert f(1) == 4",
        "while True:\n    f(1)",
        "def main():\n    print(f(int(input())))\n\nmain()",
        "class Test:\n    value = input()",
        "first, *rest = map(int, input().split())",
        "result = f('a' / 2)",
        "raise SystemExit",
        "total += 1",
        "f(",
    ],
)
def test_a_driver_neither_runs_nor_fails(driver: str) -> None:
    texts = (f"{TWICE}\n\n{driver}", f"{driver}\n\n{TWICE}", f"{TWICE}; {driver}\n")
    for text in texts[:1] if driver.startswith("f(") else texts[:2] if "\n" in driver else texts:
        assert value_of(f"```python\n{text}\n```") == 7, text


def value_of(text: str, prompt: str = "") -> object:
    space: dict[str, Any] = {}
    exec(extract_program(prompt, "f", text), space)
    return space["f"](3)


@pytest.mark.parametrize(
    "code",
    [
        "from functools import cache\n\n@cache\ndef f(x):\n    return 2 * x + 1",
        "import functools\n\n@functools.cache\ndef g(x):\n    return 2 * x\n\ndef f(x):\n    return g(x) + 1",
        "try:\n    from math import prod\nexcept ImportError:\n    prod = 0\n\ndef f(x):\n    return prod([2, x]) + 1",
        "import sys\nif sys.version_info > (3,):\n    from math import prod\n\ndef f(x):\n    return prod([2, x]) + 1",
        "from dataclasses import dataclass\n\n@dataclass\nclass P:\n    x: int\n\ndef f(x):\n    return P(x).x*2+1",
        "class A:\n    TWO = 2\n\nclass B(A):\n    pass\n\ndef f(x):\n    return B.TWO * x + 1",
        "def put(out, x):\n    out.append(x)\n\ndef f(x):\n    out = []\n    put(out, 2 * x)\n    return out[0] + 1",
        "def g(x):\n    yield x\n    yield x + 1\n\ndef f(x):\n    return sum(g(x))",
        "import asyncio\n\nasync def g(x):\n    return 2 * x\n\ndef f(x):\n    return asyncio.run(g(x)) + 1",
        "A, B = 2, 1\n\ndef f(x):\n    return A * x + B",
        "A = B = 1\nC: int = 2\n\ndef f(x, *, c=C):\n    return c * x + B",
        "import math; TWO = 2; ONE = 1\ndef f(x): return math.floor(TWO * x) + ONE\nprint(f(2)); TWO = input()",
        "count = 0\n\ndef f(x):\n    global count\n    count += 1\n    return 2 * x + count",
        "double = lambda x: 2 * x\n\ndef f(x):\n    return double(x) + 1",
        "f = lambda x: 2 * x + 1",
        "from functools import partial\n\ndef add(a, b):\n    return 2 * b + a\n\nf = partial(add, 1)",
        "def solve(x):\n    return 2 * x + 1\n\nf = solve",
        "class Solution:\n    def go(self, x):\n        return 2 * x + 1\n\nf = Solution().go",
        "from math import floor\n\ndef f(x):\n    return eval('floor(2 * x) + 1')",
        "from math import *\n\ndef f(x):\n    return floor(2 * x) + 1",
        "from typing import overload\n\n@overload\ndef f(x: int) -> int: ...\n\ndef f(x):\n    return 2 * x + 1",
        "if True:\n    def f(x):\n        return 2 * x + 1",
        "def f(x):\n    text = '''\n```\n'''\n    return 2 * x + 1",
        "from __future__ import annotations\n\ndef f(x: Undefined) -> int:\n    return 2 * x + 1",
    ],
)
def test_what_the_function_reaches_is_kept(code: str) -> None:
    assert value_of(f"```python\n{code}\n```\nText.") == 7


INDENTED = TWICE.replace("\n", "\n   ")


@pytest.mark.parametrize(
    "text",
    [
        f"1. The function:\n   ```python\n   {INDENTED}\n   ```\n2. Done.",
        "- ```py\n  def f(x):\n      return 2 * x + 1\n  ```",
        "So:\n\n    def f(x):\n        return 2 * x + 1\n\nas asked.",
        "So:\n\n\tdef f(x):\n\t    return 2 * x + 1\n",
        f"<code>{TWICE}</code>",
        '<pre><code class="python">def f(x):\n    return 2 * (x if 0 &lt; x else x) + 1</code></pre>',
        f"[PYTHON]\n{TWICE}\n[/PYTHON]",
        f"<answer>\n```python\n{TWICE}\n```\n</answer>",
        "> ```python\n> def f(x):\n>     return 2 * x + 1\n> ```",
        "Use `f = lambda x: 2 * x + 1`.",
        "```python def f(x): return 2 * x + 1```",
        f"````python\n{TWICE}\n````",
        f"``` {{.python title='a.py'}}\n{TWICE}\n```",
        f"\ufeff{TWICE}",
        f"<think>\nThen def f.\n</think>\n{TWICE}",
        f"<think>\n{TWICE}\n</think>\nAs above.",
        f"```bash\npip install x\n```\n```python\n{TWICE}\n```\n```python\n" + "assert f(1) == 3\n" * 20 + "```",
    ],
)
def test_code_is_found_in_lists_quotes_tags_and_fences(text: str) -> None:
    assert value_of(text) == 7


def test_a_program_may_begin_with_future_imports_whatever_the_prompt_begins_with() -> None:
    prompt = "from typing import List\n\ndef helper(x):\n    return x\n\ndef f(x: List[int]) -> int:\n"
    answer = "from __future__ import annotations\n\ndef f(x: List[int]) -> Undefined:\n    return helper(2 * x) + 1\n"
    assert value_of(f"```python\n{answer}```", prompt) == 7


@pytest.mark.parametrize(
    "text", ['"""\nf\n' * 3000, "f = (\n" * 3000, "@f\n" * 1000, "    def f(x):\n" * 3000, "`f" * 20_000]
)
def test_no_text_takes_long(text: str) -> None:
    start = time.monotonic()
    extract_program("", "f", text)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("text", ["", "I cannot.", "```\n```", "def g(): pass", "\0", "(" * 10_000])
def test_an_answer_without_the_function_is_no_pass(text: str) -> None:
    with contextlib.suppress(SyntaxError, ValueError, NameError, MemoryError, RecursionError, TypeError):
        assert result(text) != 5


def test_a_truncated_body_keeps_its_whole_lines() -> None:
    assert "total = 0" in extract_program(PROMPT, "f", BODY[:40])
