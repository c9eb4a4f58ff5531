"""An answer in a box gets the verdict of the bare answer, whatever changes nothing stands around it."""

import json
import time
from pathlib import Path

import pytest

from mbd_core.evaluation.tasks.answers.answer_forms import undressed
from mbd_core.evaluation.tasks.answers.math_worker import judge
from mbd_core.evaluation.tasks.answers.stated_answers import stated_answer

DATA = Path(__file__).resolve().parents[4] / "shared" / "benchmarks"
PLAIN = r"So it is \boxed{%s}"
DRESSES = (
    r"So it is \boxed{%s.}",
    r"So it is $\boxed{%s}$.",
    r"\fbox{%s}",
    r"$\fbox{%s}$.",
    r"\framebox{%s}",
    r"\boxed{ %s }",
    r"\boxed {%s}",
    r"\boxed{%s,}",
    r"\boxed{%s;}",
    r"\boxed{$%s$}",
    r"\boxed{$%s.$}",
    r"\boxed{$%s$.}",
    r"\boxed{\(%s\)}",
    r"\boxed{%s\!}",
    r"\boxed{\,%s\,}",
    r"\boxed{\displaystyle %s}",
    r"\[\boxed{%s}\]",
    r"\boxed{\mathbf{%s}}",
    r"\boxed{\boldsymbol{%s}}",
    r"\boxed{{%s}}",
    r"\boxed{%s\quad}",
    r"\boxed{\boxed{%s}}",
)
GROUPS = (",", "{,}", r"\,", r"\ ", r",\!", "~", "\u2009", "\u202f")
NUMBER_DRESSES = (
    "%s",
    "%s.",
    r"\$%s",
    r"\text{\$}%s",
    r"%s\text{ dollars}",
    r"%s \text{ apples}.",
    r"%s^\circ",
    r"\text{%s}",
    r"\textbf{%s}",
    r"%s \, \mathrm{cm}",
    r"%s\text{.}",
    "\u2212%s",
)


def golds(task: str) -> list[str]:
    """The benchmark's answers, or a skip."""
    folder = DATA / task
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files:
        pytest.skip(f"{folder} is not there")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows]


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_answers_of_math500_in_dress_get_the_verdict_of_the_bare_answer(every: int) -> None:
    """The right one is right, and another problem's answer gets the verdict that it had."""
    folder = DATA / "math500"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    rows = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert len(answers) == 500
    for number in range(0, 500, every):
        gold, other = answers[number], answers[(number * 7 + 1) % 500]
        assert judge(gold, PLAIN.replace("%s", gold))["correct"], gold
        verdict = judge(gold, PLAIN.replace("%s", other))["correct"]
        for dress in DRESSES:
            assert judge(gold, dress.replace("%s", gold))["correct"], dress.replace("%s", gold)
        dress = DRESSES[number % len(DRESSES)]
        assert judge(gold, dress.replace("%s", other))["correct"] == verdict, (gold, dress.replace("%s", other))


@pytest.mark.parametrize("every", [160, pytest.param(1, marks=pytest.mark.slow)])
def test_answers_of_gsm8k_in_dress_get_the_verdict_of_the_bare_answer(every: int) -> None:
    for number, answer in enumerate(golds("gsm8k")[::every]):
        gold, wrong = str(int(answer) * 1000), str(int(answer) * 1000 + 1)
        for place, dress in enumerate(NUMBER_DRESSES):
            group = GROUPS[(number + place) % len(GROUPS)]
            sign = "-" if "\u2212" in dress else ""
            for box in (r"\boxed{%s}", r"\fbox{%s}"):
                right, other = (
                    box.replace("%s", dress.replace("%s", f"{int(value):,}".replace(",", group)))
                    for value in (gold, wrong)
                )
                assert judge(sign + gold, right)["correct"], right
                assert not judge(sign + gold, other)["correct"], other


@pytest.mark.parametrize(
    ("content", "bare"),
    [
        ("9.", "9"),
        (r"70\,000", "70000"),
        (r"1{,}234{,}567", "1234567"),
        (r"\text{70,000}", "70,000"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
        (r"(1,234)", "(1,234)"),
        (r"\{1,-2\}", r"\{1,-2\}"),
        (r"{1}+{2}", "{1}+{2}"),
        (r"0.333...", "0.333..."),
        (r"\mathbf{a}+\mathbf{b}", r"\mathbf{a}+\mathbf{b}"),
        (r"$1$ and $2$", "$1$ and $2$"),
        (r"\$36", r"\$36"),
        ("", ""),
        ("...", "..."),
        ("{", "{"),
    ],
)
def test_what_changes_no_value_alone_is_taken_off(content: str, bare: str) -> None:
    assert undressed(content) == bare


def test_a_box_without_braces_holds_a_number() -> None:
    assert stated_answer(r"So \boxed 9. Yes", gold="9") == "9"
    assert stated_answer(r"So \boxed 9. Yes \fbox-12", gold="9") == "-12"


HOSTILE = ("$" * 19_000, "1," * 9000, r"\," * 9000, "{" * 9000 + "}" * 9000, ";" * 19_000, r"\text{" * 3000, "")


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_boxes_take_no_long_time(content: str) -> None:
    start = time.process_time()
    for text in (content, r"\boxed{" + content + "}", r"\boxed{" * 3000 + content, f"Answer: {content}"):
        stated_answer(text, gold="9")
        stated_answer(text, gold=r"\text{Evelyn}")
    assert time.process_time() - start < 5
