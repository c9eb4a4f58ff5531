"""Equal answers in other forms are right, other values wrong: lists, intervals, matrices, text, expressions."""

import pytest

from mbd_core.evaluation.tasks.answers.math_worker import judge
from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.evaluation.tasks.kinds.task import Problem

RIGHT = (
    ("3,5,7", r"7, 3 \text{ and } 5"),
    ("3,5,7", r"\{3,5,7\}"),
    ("-2,1", r"x = 1 \text{ or } x = -2"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
    ("(-2,1)", "(x, y) = (-2, 1)"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \tfrac{\pi}{2})"),
    ("(3,4]", r"3 < x \leq 4"),
    (r"x \in [-2,7]", r"-2 \le x \le 7"),
    (r"(2,\infty)", "x > 2"),
    (r"(2,\infty)", r"(2,+\infty)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty) \cup (-\infty,2)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"x<2 \text{ or } x>3"),
    (r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", r"\left(\begin{array}{c} -2 \\ -14 \end{array}\right)"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{bmatrix} \frac{1}{5} \\ -3.6 \end{bmatrix}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{ellipse}", r"\text{an Ellipse}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(r,\theta) = (3, \frac\pi2)"),
    (r"\frac13", r"0.\dot{3}"),
    (r"\text{(C)}", r"\textbf{(C)}\ 5"),
    (r"\text{(C)}", r"\text{Option C}"),
    ("5:30", r"5:30 \text{ p.m.}"),
    ("x=5", "5"),
    ("y = 2x + 3", "y - 2x = 3"),
    ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z = 4"),
    ("p - q", "-q+p"),
    ("2k+2", "2(k+1)"),
    ("6 - 5i", r"6-5\mathrm{i}"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    ("146", "2(73)"),
    ("720", "6!"),
    ("7.14", r"\sqrt{51} \approx 7.14"),
    ("10^{9999}", "1e9999"),
    ("1e-400", r"10^{-400}"),
    (r"3\sqrt{13}", "3*sqrt(13)"),
    (r"3\sqrt{13}", r"3\sqrt13"),
    (r"3\sqrt{13}", "3√13"),
    (r"\frac{1}{2}", r"\sin 30^\circ"),
    (r"\frac{\sqrt{3}}{2}", "cos(30°)"),
    (r"\tan 45^{\circ}", "1"),
    (r"\sin^2 20^\circ", r"1 - \cos^2 (20^\circ)"),
    (r"\emptyset", r"\varnothing"),
    (r"\varnothing", "∅"),
    (r"\varnothing", r"\{\}"),
    (r"\{\}", r"\emptyset"),
    ("1000", "1'000"),
    ("1234567.5", "1’234’567.5"),
    ("0.5", "0,5"),
    (r"-\frac{1}{4}", "-0,25"),
    ("5.5", "5,5"),
    ("3.14", "3{,}14"),
)
WRONG = (
    (r"\sqrt{51}", "7.141428"),
    (r"\pi", "3.141593"),
    (r"\frac13", "0.333333"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    (r"1 - \frac{1}{e}", r"1 + \frac{1}{e}"),
    ("x^3+3x-6", "x^3+3x-6.0000001"),
    (r"\pm 2021", "2021"),
    ("12:00", "1:00"),
    ("4", r"4\sqrt{2}"),
    ("2", "2k"),
    ("2k", "2"),
    ("4", r"4 \text{ or } 5"),
    ("3,5,7", "3,5"),
    ("3,5,7", "3,5,7,9"),
    ("2,3,4", "n=1,2,3"),
    ("(-2,1)", "(1,-2)"),
    ("(-2,1)", r"\{-2,1\}"),
    ("(0,1)", "D = (0,1.5)"),
    ("(3,4]", "[3,4)"),
    ("(3,4]", "3 < x < 4"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (r"\text{east}", r"\text{west}"),
    (r"\text{(E)}", r"\text{(D)}"),
    ("x=5", "y=5"),
    ("y=2x+3", "y=2x+4"),
    ("5x - 7y + 11z + 4 = 0", "0"),
    ("6-5i", "6+5i"),
    ("0", "10^{-9}"),
    ("18", "1 8"),
    (r"\frac{12}{99}", r"0.\dot{1}\dot{3}"),
    (r"\text{(C)}", "Option B"),
    ("5", ""),
    ("5", r"\{\}"),
    ("0", r"\varnothing"),
    (r"\emptyset", "0"),
    (r"3\sqrt{13}", r"3\sqrt{1}3"),
    (r"\frac{1}{2}", r"\sin 30"),
    (r"\frac{1}{2}", r"\cos 30^\circ"),
    ("1000", "1'00"),
    ("0.5", "5,0"),
    ("5", "0,5"),
    ("(0,5)", "0.5"),
    ("0,5", "0.5"),
    ("2.75", "2,750"),
)


@pytest.mark.parametrize(("gold", "content"), RIGHT)
def test_an_equal_answer_in_another_form_is_right(gold: str, content: str) -> None:
    assert judge(gold, rf"So it is \boxed{{{content}}}.")["correct"]


@pytest.mark.parametrize(("gold", "content"), WRONG)
def test_another_value_is_wrong(gold: str, content: str) -> None:
    assert not judge(gold, rf"So it is \boxed{{{content}}}.")["correct"]


@pytest.mark.parametrize(
    ("task", "gold", "text", "correct"),
    [
        ("math500", "12.5", r"\boxed{12.5\%}", True),
        ("math500", r"12.5\%", r"\boxed{12.5}", True),
        ("math500", "50", r"\boxed{50\%}", True),
        ("math500", "0.125", r"\boxed{12.5\%}", True),
        ("math500", "12", r"\boxed{12.0000001}", False),
        ("gsm8k", "20", "#### 20%", True),
        ("gsm8k", "20", "The rate is 20 percent.", True),
        ("gsm8k", "20", "#### 0.2%", False),
        ("gsm8k", "73", "The answer for the first shelf is 40.\n\nFinal Answer: **73**", True),
        ("gsm8k", "40", "The answer for the first shelf is 40.\n\nFinal Answer: **73**", False),
    ],
)
def test_a_grade_follows_the_last_answer_and_its_percent_sign(task: str, gold: str, text: str, correct: bool) -> None:
    result = TASKS[task].grade(Problem(problem_id="p", prompt="?", reference=gold), text)
    assert (result.correct, result.reason) == (correct, "passed" if correct else "wrong")
