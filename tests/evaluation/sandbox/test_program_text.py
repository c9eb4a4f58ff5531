"""The program in an answer, in every layout that models write."""

import contextlib

import pytest

from mbd_core.evaluation.sandbox.programs import extract_program

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


def test_the_last_definition_counts() -> None:
    assert result(f"```python\n{WHOLE}```\nor\n```python\ndef f(xs):\n    return 0\n```") == 0


@pytest.mark.parametrize("text", ["", "I cannot.", "```\n```", "def g(): pass", "\0", "(" * 10_000])
def test_an_answer_without_the_function_is_no_pass(text: str) -> None:
    with contextlib.suppress(SyntaxError, ValueError, NameError, MemoryError, RecursionError, TypeError):
        assert result(text) != 5


def test_a_truncated_body_keeps_its_whole_lines() -> None:
    assert "total = 0" in extract_program(PROMPT, "f", BODY[:40])
