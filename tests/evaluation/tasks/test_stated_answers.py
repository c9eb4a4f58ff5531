"""The answer that a text states last is its answer, whatever Markdown stands around it."""

import pytest

from mbd_core.evaluation.tasks.answers.markdown_text import without_markdown
from mbd_core.evaluation.tasks.answers.stated_answers import stated_answer

RIGHT = (
    "So the answer for the first shelf is 40.\nThe second shelf adds 33 books.\n\nFinal Answer: **73**",
    "The first shelf has 40.\n**Answer: 73**",
    "40 + 33 = 73\n#### **73**",
    "#### 73\n\nLet me know if you need 2 more examples!",
    "First 40.\n\n### Final Answer\n\n**73**",
    "First 40.\n\nAnswer:\n```\n73\n```",
    "| part | books |\n|---|---|\n| **Answer** | 73 |\n",
    "1. First 40\n2. Then 33\n3. **Answer:** 73 books",
    "> *Answer: 73*",
    "Answer: ~~40~~ 73",
    "<answer>73</answer>",
    '{"reasoning": "40 and 33", "answer": "73"}',
    "The answer is therefore \\(73\\). I hope it is correct.",
    "The final answer is:\n\\[\n73\n\\]",
    "The answer is 40 + 33 = 73 books.",
    "Hence $73$ is our answer, and 40 is not.",
    "<think>The answer is 40.</think>\nThe answer is 73.",
    "Answer: 40\n\nWait, that leaves out a shelf.\n\nAnswer: 73",
    "Answer: 40. No, it should be 73.",
    "#### 40\nor 73",
    r"\boxed{40} leaves out a shelf. \boxed{73}",
    r"\boxed{40}. No: the answer is 73.",
    r"So it is $\boxed{73}$. She does this 7 days a week.",
    "Altogether there are **73** books on the 2 shelves.",
    "#### 2. Count the books\n40 + 33 = 73",
    r"It is \boxed{73}. Let us check our answer: $73 - 33 = 40$.",
    "The shelves have 40 and 33 books, so 73.",
    "The shelves have 40 and 33 cm^2, so it is 73 cm².",
    "40 + 33\n\n73 cm^{2}",
    "答案：73。",
    "40 books. 答案（books）：７３。",
)


@pytest.mark.parametrize("text", RIGHT)
def test_the_last_statement_counts(text: str) -> None:
    answer = stated_answer(text, gold="5")
    assert answer is not None and answer.removesuffix(" books") == "73"


@pytest.mark.parametrize(
    ("gold", "text", "answer"),
    [
        ("1,-2", r"$x = \boxed{1}$ or $x = \boxed{-2}$", "1 , -2"),
        ("1,-2", "The answers are $1$ and $-2$.", "1 , -2"),
        ("5", "The answer is 4 or 5.", "4 or 5"),
        (r"\text{Evelyn}", "Ann is slow. The answer is **Evelyn**.", "Evelyn"),
        (r"\text{(C)}", "The correct option is **C**", "C"),
        ("28", r"$\boxed{28}$ percent", r"28\%"),
        ("-5", "The answer is - 5.", "-5"),
        ("-5", "The answer is minus 5.", "-5"),
        ("-5", "Negative 5", "-5"),
        ("5", "10 minus 5", "5"),
        ("5", "The answer is 10 minus 5 = 5.", "5"),
        ("5", "It costs $4 and then $5.", "$5"),
        ("5", "Which one it is, nobody knows.", None),
        ("5", "", None),
    ],
)
def test_lists_words_and_signs_are_whole_answers(gold: str, text: str, answer: str | None) -> None:
    assert stated_answer(text, gold=gold) == answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("**a** __b__ *c* _d_ `e` ***f***", "a b c d e f"),
        ("2 * 3 * 4 and 2**3 and x_1 + y_2", "2 * 3 * 4 and 2**3 and x_1 + y_2"),
        ("## Title\n- item\n> quote\n---", "Title\nitem\nquote\n"),
        ("#### 73", "#### 73"),
    ],
)
def test_markdown_comes_off_and_mathematics_stays(text: str, plain: str) -> None:
    assert without_markdown(text) == plain
