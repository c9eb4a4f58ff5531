"""Right and wrong texts for the benchmarks' answers: notations of a value, and places where an answer stands.

Each form writes a text for a gold answer, or `None` if it does not apply to the gold. A wrong text has another value;
its form computes that value itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

TextForm = Callable[[str, random.Random], str | None]

OWN_GOLDS = {
    "gsm8k": ("73", "18", "1,234", "-3", "540", "2,125", "65,960", "7", "20", "1,450,000"),
    "math500": (
        *("73", "-9", r"\frac{14}{3}", "3.25", r"11,\! 100", r"2\frac{1}{4}", r"-\dfrac{5}{8}", r"\$32.50", ".0625"),
        *(r"120^\circ", r"7.5 \text{ cents}", r"36\mbox{ cm}^2", "243_5", r"\text{Maria}", r"\text{(D)}", "x=7"),
        *(r"\left( 2, \frac{\pi}{3} \right)", "(3,5]", r"(-\infty, 2) \cup (5, \infty)", "2, 5, 11", r"\{4,-1\}"),
        *(r"x \in [-4,6]", r"\begin{pmatrix} 2 \\ -5 \\ 9 \end{pmatrix}", "(7,-4,2)", r"5\sqrt{7}", r"12\pi", "3-4i"),
        *(r"3 \pm \sqrt{5}", "4x^2-3x+7", "y = 3x - 8", "3x + 5y - 2z + 9 = 0", r"\frac{7+3b}{10}", r"\tan x"),
    ),
}
"""Golds of our own in the forms of the benchmarks' golds, for use without the benchmarks' files."""

_DECIMAL = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
_FRACTION = re.compile(r"(-?)(\d*)\\[dt]?frac\s*\{?(\d+|\d)\}?\s*\{?(\d+)\}?")


def value_of(gold: str) -> Fraction | None:
    """The exact value of a gold that is a number without unit, percent sign and base; else `None`."""
    plain = re.sub(r"(?<=\d),(?:\\!\s*)?(?=\d{3}(?!\d))|\\\$|\s", "", gold)
    if match := re.fullmatch(r"(-?)\\frac(\d)(\d)", plain):
        plain = rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    if _DECIMAL.fullmatch(plain):
        return Fraction(plain)
    if match := _FRACTION.fullmatch(plain):
        value = Fraction(int(match[2] or 0)) + Fraction(int(match[3]), int(match[4]))
        return -value if match[1] else value
    return None


def decimal_of(value: Fraction) -> str | None:
    """The finite decimal of a value, `None` if it has none."""
    for places in range(13):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
            whole, part = digits[: len(digits) - places], digits[len(digits) - places :]
            return ("-" if value < 0 else "") + whole + (f".{part}" if part else "")
    return None


def _number(write: Callable[[Fraction, random.Random], str | None]) -> TextForm:
    """A form of golds that are numbers."""

    def form(gold: str, draw: random.Random) -> str | None:
        value = value_of(gold)
        return None if value is None else write(value, draw)

    return form


def _whole(write: Callable[[int, random.Random], str | None]) -> TextForm:
    """A form of golds that are whole numbers."""
    return _number(lambda value, draw: write(value.numerator, draw) if value.denominator == 1 else None)


def _decimal(write: Callable[[str, random.Random], str | None]) -> TextForm:
    """A form of golds that are finite decimals."""

    def form(value: Fraction, draw: random.Random) -> str | None:
        decimal = decimal_of(value)
        return None if decimal is None else write(decimal, draw)

    return _number(form)


def _bare(form: TextForm) -> TextForm:
    """A form of golds without a sign of money."""
    return lambda gold, draw: None if "$" in gold else form(gold, draw)


def _box(content: str) -> str:
    return rf"So it is \boxed{{{content}}}."


def _fraction(value: Fraction, factor: int = 1) -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator) * factor}}}{{{value.denominator * factor}}}"


def _mixed(value: Fraction, _draw: random.Random) -> str | None:
    whole, rest = divmod(abs(value), 1)
    sign = "-" if value < 0 else ""
    return _box(rf"{sign}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}") if whole and rest else None


def _thousands(number: int, mark: str) -> str | None:
    return f"{number:,}".replace(",", mark) if abs(number) >= 1000 else None


def _scientific(decimal: str, draw: random.Random) -> str:
    value = Fraction(decimal)
    power = draw.choice([-2, -1, 1, 2, 3])
    mantissa = decimal_of(value / Fraction(10) ** power)
    return _box(
        draw.choice([rf"{mantissa} \times 10^{{{power}}}", rf"{mantissa}\cdot 10^{{{power}}}", f"{mantissa}e{power}"])
    )


_UNITS = ("apples", "miles per hour", "dollars", "cm", "square feet", "hours", "people", "degrees")
_WORDS = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """A whole number below a million in English words."""
    if number < 0:
        return f"minus {in_words(-number)}"
    if number >= 1000:
        rest = f" {in_words(number % 1000)}" if number % 1000 else ""
        return f"{in_words(number // 1000)} thousand{rest}"
    if number >= 100:
        rest = f" and {in_words(number % 100)}" if number % 100 else ""
        return f"{_WORDS[number // 100]} hundred{rest}"
    if number >= 20:
        return _TENS[number // 10] + (f"-{_WORDS[number % 10]}" if number % 10 else "")
    return _WORDS[number]


RIGHT_NUMBERS: Mapping[str, TextForm] = {
    "1,234": _whole(lambda n, _: (t := _thousands(n, ",")) and _box(t)),
    "1{,}234": _whole(lambda n, d: (t := _thousands(n, d.choice(["{,}", r",\!"]))) and _box(t)),
    r"1\,234": _whole(lambda n, d: (t := _thousands(n, d.choice([r"\,", r"\ ", "~", "\u202f"]))) and _box(t)),
    "5.00": _decimal(lambda t, d: _box(t + ("" if "." in t else ".") + "0" * d.randint(1, 4))),
    "a fraction": _number(lambda v, d: _box(_fraction(v, d.randint(2, 9)))),
    "a/b": _number(lambda v, d: f"The answer is {v.numerator * (k := d.randint(2, 9))}/{v.denominator * k}."),
    r"\dfrac, \tfrac": _number(
        lambda v, d: _box(_fraction(v, 3).replace("frac", d.choice(["dfrac", "tfrac", "cfrac"])))
    ),
    "mixed": _number(_mixed),
    "decimal": _decimal(lambda t, _: _box(t.replace("0.", ".", 1) if t.startswith("0.") else t)),
    "scientific": _decimal(_scientific),
    "money": _decimal(
        lambda t, d: _box(
            ("-" if "-" in t else "")
            + d.choice([r"\$%s", r"\text{\$}%s", r"%s\text{ dollars}", "$%s", "€%s"]) % t.removeprefix("-")
        )
    ),
    "a unit": _bare(
        _decimal(lambda t, d: _box(d.choice([r"%s\text{ %s}", r"%s \, \mathrm{%s}", "%s %s"]) % (t, d.choice(_UNITS))))
    ),
    "percent": _decimal(lambda t, d: _box(t + d.choice([r"\%", "%", r"\text{ percent}", " percent"]))),
    "percent of a part": _decimal(
        lambda t, _: _box((decimal_of(Fraction(t) * 100) or "") + r"\%") if Fraction(t) < 1 else None
    ),
    "other minus signs": _decimal(
        lambda t, d: _box(t.replace("-", d.choice("\u2212\u2013\ufe63"))) if "-" in t else None
    ),
    "in words": _whole(lambda n, _: f"The answer is {in_words(n)}." if abs(n) < 10**6 else None),
    "name = value": _decimal(
        lambda t, d: _box(d.choice(["x = %s", r"\text{Total} = %s", "2 + 3 = %s", "f(2)=%s"]) % t)
    ),
}


def _nearby(value: Fraction, draw: random.Random) -> str:
    return _box(decimal_of(value + draw.choice([-1, 1])) or _fraction(value + draw.choice([-1, 1])))


def _tiny(value: Fraction, draw: random.Random) -> str | None:
    other = value + (value or Fraction(1)) * Fraction(1, 10 ** draw.randint(6, 12)) * draw.choice([-1, 1])
    return _box(decimal_of(other) or _fraction(other))


def _swapped_digits(number: int, draw: random.Random) -> str | None:
    digits = str(abs(number))
    place = draw.randrange(max(1, len(digits) - 1))
    other = digits[:place] + digits[place : place + 2][::-1] + digits[place + 2 :]
    return None if other == digits else _box(("-" if number < 0 else "") + other)


def _rounded(value: Fraction, _draw: random.Random) -> str | None:
    return _box(f"{float(value):.6f}") if decimal_of(value) is None else None


def _turned(value: Fraction, _draw: random.Random) -> str | None:
    return None if value == 0 or abs(value) == 1 else _box(_fraction(1 / value))


WRONG_NUMBERS: Mapping[str, TextForm] = {
    "one more or less": _number(_nearby),
    "a millionth off": _number(_tiny),
    "the other sign": _number(lambda v, _: _box(_fraction(-v)) if v else None),
    "digits swapped": _whole(_swapped_digits),
    "numerator and denominator swapped": _number(_turned),
    "a rounded fraction": _number(_rounded),
    "a hundredth or hundredfold": _number(
        lambda v, d: _box(_fraction(v * d.choice([Fraction(1, 100), Fraction(100)]))) if v else None
    ),
    "another percent": _decimal(lambda t, _: _box(f"{Fraction(t) + 1}".split("/")[0] + r".5\%")),
    "times pi": _decimal(lambda t, _: _box(rf"{t}\pi") if Fraction(t) else None),
    "times a variable": _decimal(lambda t, d: _box(f"{t}{d.choice('kxn')}") if Fraction(t) else None),
    "two answers": _decimal(
        lambda t, d: _box(d.choice([r"%s \text{ or } %s", "%s, %s"]) % (t, decimal_of(Fraction(t) + 2)))
    ),
}

_EARLIER = "The first part gives {other}, and half of it is 3.\n\n"
RIGHT_PLACES: Mapping[str, str] = {
    "#### N": _EARLIER + "#### {gold}",
    "#### **N**": _EARLIER + "#### **{gold}**",
    "**Answer: N**": _EARLIER + "**Answer: {gold}**",
    "Final Answer: **N**": "So the answer for the first shelf is {other}.\n\nFinal Answer: **{gold}**",
    "a heading": _EARLIER + "### Final Answer\n\n**{gold}**",
    "$...$": _EARLIER + "The final answer is ${gold}$. I hope it is correct.",
    r"\(...\)": _EARLIER + r"The answer is therefore \({gold}\).",
    r"\[...\]": _EARLIER + "The answer is:\n\\[\n{gold}\n\\]",
    "$$...$$": _EARLIER + "Thus the answer is $${gold}$$",
    r"\fbox": _EARLIER + r"\fbox{{ {gold} }}",
    "boxes in boxes": _EARLIER + r"$\boxed{{\boxed{{{gold}}}}}$.",
    "a code fence": _EARLIER + "Answer:\n```\n{gold}\n```",
    "a table": _EARLIER + "| | |\n|---|---|\n| **Answer** | {gold} |",
    "an item": _EARLIER + "- **Answer:** {gold}",
    "N is the answer": _EARLIER + "Hence ${gold}$ is the answer.",
    "<answer>": _EARLIER + "<answer>{gold}</answer>",
    "after a thought": "<think>The answer is {other}.</think>\n\nThe answer is ${gold}$.",
    "corrected": "Answer: {other}\n\nWait, that leaves out the second part.\n\n**Answer:** ${gold}$",
    "a box, corrected": "\\boxed{{{other}}} is not right, as 2 + 2 = 4.\n\n\\boxed{{{gold}}}",
    "with a sentence after": "It is $\\boxed{{{gold}}}$. She does this 7 days a week, {other} times.",
}
WRONG_PLACES: Mapping[str, str] = {
    "right, then corrected": "Answer: {gold}\n\nWait, that leaves out a part.\n\nAnswer: {other}",
    "right box, then another": "\\boxed{{{gold}}} would be too simple. \\boxed{{{other}}}",
    "right number on the way": "The first part is ${gold}$.\n\n#### {other}",
    "right number after": "**Answer: {other}**\n\nThis is not ${gold}$.",
    "right in a thought": "<think>The answer is {gold}.</think>\n\nThe answer is ${other}$.",
    "struck out": "Answer: ~~{gold}~~ {other}",
}


def _where(pattern: str, write: Callable[[str, random.Random], str | None]) -> TextForm:
    """A form of golds in which a pattern stands."""
    return lambda gold, draw: write(gold, draw) if re.search(pattern, gold) else None


def _is_expression(gold: str) -> bool:
    """Whether a gold is one expression: no list, interval, equation, text, unit or base."""
    return not re.search(r",|=|\\text|\\mbox|_|\\cup|\\in\b|\\begin|\\pm|\\circ|\\\$|\\\{", gold)


def _expression(write: Callable[[str, random.Random], str | None]) -> TextForm:
    return lambda gold, draw: _box_of(write(gold, draw)) if _is_expression(gold) else None


def _box_of(content: str | None) -> str | None:
    return None if content is None else _box(content)


def _rewritten(how: str) -> TextForm:
    """A form in which sympy has expanded or factored the gold."""

    def form(gold: str, _draw: random.Random) -> str | None:
        if not _is_expression(gold) or not re.search(r"[a-z]", re.sub(r"\\[a-z]+", "", gold)) or "i" in gold:
            return None
        import sympy
        from math_verify import parse

        value = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)[0]
        return _box(sympy.latex({"expanded": sympy.expand, "factored": sympy.factor}[how](value.doit())))

    return form


_SEQUENCE = r"^(?:-?[\w\\{}]+,\s*)+-?[\w\\{}]+$"
_TUPLE = r"^(?:\\left)?\(.*,.*(?:\\right)?\)$"
_INTERVAL = r"^(?=.*(?:\[|\]|infty))(?:x \\in )?(?:\\left)?[(\[][^()\[\],]*,[^()\[\],]*(?:\\right)?[)\]]$"


def _items(gold: str) -> list[str]:
    inner = re.sub(r"^\\\{|\\\}$", "", gold)
    return [item.strip() for item in inner.split(",")]


def _tuple_items(gold: str) -> list[str]:
    return [item.strip() for item in re.sub(r"\\(?:left|right)", "", gold).strip("() ").split(",")]


def _list_form(write: Callable[[list[str], random.Random], str | None]) -> TextForm:
    """A form of golds that are lists or sets without order; numbers with marks of thousands are not lists."""

    def form(gold: str, draw: random.Random) -> str | None:
        is_list = re.search(_SEQUENCE, gold) or gold.startswith(r"\{")
        return _box_of(write(_items(gold), draw)) if is_list and value_of(gold) is None else None

    return form


def _inequality(gold: str, _draw: random.Random) -> str | None:
    """An interval as an inequality."""
    plain = re.sub(r"x \\in |\\left|\\right", "", gold).strip()
    low, high = (part.strip() for part in plain[1:-1].split(","))
    below, above = ("<" if plain[0] == "(" else r"\le"), ("<" if plain[-1] == ")" else r"\le")
    if low.startswith(r"-\infty"):
        return _box(f"x {above} {high}")
    return _box(
        f"x {'>' if below == '<' else chr(92) + 'ge'} {low}" if "infty" in high else f"{low} {below} x {above} {high}"
    )


def _other_end(gold: str, draw: random.Random) -> str | None:
    place = draw.choice([0, 1])
    signs = [m.start() for m in re.finditer(r"[(\[]" if place == 0 else r"[)\]]", gold)]
    at = signs[0] if place == 0 else signs[-1]
    turned = {"(": "[", "[": "(", ")": "]", "]": ")"}[gold[at]]
    return _box(gold[:at] + turned + gold[at + 1 :])


def _other_number(gold: str, draw: random.Random) -> str | None:
    """The gold with one of its numbers changed by one."""
    numbers = list(re.finditer(r"\d+", gold))
    if not numbers:
        return None
    at = draw.choice(numbers)
    other = int(at[0]) + draw.choice([-1, 1] if int(at[0]) > 2 else [1])
    changed = gold[: at.start()] + str(other) + gold[at.end() :]
    return None if re.search(r"\\frac\{?0", changed) or re.search(r",\\!|^0", gold) else _box(changed)


def _decimals_of(gold: str, _draw: random.Random) -> str | None:
    """An irrational constant, rounded to seven places."""
    if not _is_expression(gold) or not re.search(r"\\sqrt|\\pi", gold) or re.search(r"(?<![\\a-z])[a-z]", gold):
        return None
    from math_verify import parse

    return _box(f"{float(parse(rf'{chr(92)}boxed{{{gold}}}', parsing_timeout=None)[0].evalf()):.7f}")


RIGHT_EXPRESSIONS: Mapping[str, TextForm] = {
    "as it is": lambda gold, draw: _box(gold),
    "other spaces": lambda gold, draw: _box(
        re.sub(r"(?<=[,+=(])", d if (d := draw.choice([" ", r"\,", "  "])) else "", gold)
        if not re.search(r"\d,|\\text|\\mbox", gold)
        else f" {gold} "
    ),
    r"\dfrac, \left(": lambda gold, _: (
        _box(
            re.sub(r"(?<!\\left)\(", r"\\left(", gold.replace(r"\frac", r"\dfrac"))
            .replace(")", r"\right)")
            .replace(r"\right\right", r"\right")
        )
        if re.search(r"frac|\(", gold) and not re.search(r"\[|\]|text", gold)
        else None
    ),
    "expanded": _rewritten("expanded"),
    "factored": _rewritten("factored"),
    "times 2 over 2": _expression(lambda g, _: rf"\frac{{2 \left({g}\right)}}{{2}}"),
    "plus 1 minus 1": _expression(lambda g, _: rf"1 + {g.lstrip()} - 1" if not g.startswith("-") else rf"1 {g} - 1"),
    "name = expression": _expression(lambda g, d: f"{d.choice(['A', 'f(t)', 'S_n'])} = {g}"),
    "a list in another order": _list_form(lambda items, draw: ", ".join(draw.sample(items, len(items)))),
    "a set": _list_form(lambda items, _: r"\{" + ", ".join(items) + r"\}"),
    "x = a or x = b": _list_form(
        lambda items, _: r" \text{ or } ".join(f"x = {item}" for item in items) if len(items) < 4 else None
    ),
    "+ and - apart": _where(
        r"^[^,{]*\\pm[^,]*$", lambda g, _: _box(g.replace(r"\pm", "+") + " , " + g.replace(r"\pm", "-"))
    ),
    "an interval as inequality": _where(_INTERVAL, lambda g, d: _inequality(g, d)),
    "a union turned": _where(r"\\cup", lambda g, _: _box(r" \cup ".join(reversed(g.split(r"\cup"))))),
    "an equation turned": _where(r"^[^\\]*[a-z].* = ", lambda g, _: _box(" = ".join(reversed(g.split(" = "))))),
    "sides moved": _where(r"^y = ", lambda g, _: _box(f"y - ({g[4:]}) = 0")),
    "a text in bold": _where(
        r"^\\text\{\w+\}$",
        lambda g, d: f"The answer is **{g[6:-1]}**." if d.random() < 0.5 else _box(rf"\textbf{{{g[6:-1]}}}"),
    ),
    "a choice": _where(
        r"^\\text\{\(\w\)\}$",
        lambda g, d: (
            d.choice(
                ["The answer is (%s).", "Answer: %s", r"\boxed{%s}", r"\boxed{\textbf{(%s)}\ 5}", "**Answer: (%s)**"]
            )
            % g[7]
        ),
    ),
    "a unit left out": _where(
        r"\\circ|\\text|\\mbox|\\\$",
        lambda g, _: (
            _box(re.sub(r"\^\\circ|\\(?:text|mbox)\{[^{}]*\}(?:\^2)?|\\\$", "", g).strip())
            if not re.match(r"\\text", g)
            else None
        ),
    ),
    "degrees": _where(
        r"\\circ",
        lambda g, d: _box(g.replace(r"^\circ", d.choice(["°", r"^{\circ}", " degrees", r"\text{ degrees}"]))),
    ),
    "a base": _where(
        r"^\d+_",
        lambda g, d: _box(
            d.choice([r"%s_{%s}", r"%s_{\text{%s}}", r"(%s)_{%s}", r"%s \text{ (base %s)}"])
            % tuple(g.replace("{", "").replace("}", "").split("_"))
        ),
    ),
    "a matrix in fractions": _where(
        "matrix",
        lambda g, d: _box(
            re.sub(r"(-?\d+)/(\d+)", r"\\frac{\1}{\2}", g).replace("pmatrix", d.choice(["pmatrix", "bmatrix"]))
        ),
    ),
}
WRONG_EXPRESSIONS: Mapping[str, TextForm] = {
    "a number changed": lambda gold, draw: _other_number(gold, draw),
    "one more": _expression(lambda g, _: f"{g} + 1"),
    "a ten-millionth more": _expression(lambda g, _: f"{g} + 0.0000001"),
    "the other sign": _expression(lambda g, _: rf"-\left({g}\right)" if g != "0" else None),
    "an irrational number rounded": _decimals_of,
    "conjugated": _where(
        r"^-?\d+ ?[+-] ?\d*i$",
        lambda g, _: _box(re.sub(r"(?<=\d)( ?)([+-])", lambda m: m[1] + "+-"["-+".index(m[2])], g)),
    ),
    "an item missing": _list_form(lambda items, draw: ", ".join(draw.sample(items, len(items) - 1))),
    "an item more": _list_form(lambda items, _: ", ".join([*items, "1234"])),
    "a tuple's items swapped": _where(
        _TUPLE,
        lambda g, _: (
            _box("(" + ", ".join(reversed(i)) + ")")
            if "cup" not in g and (i := _tuple_items(g)) and i[0] != i[-1]
            else None
        ),
    ),
    "an end open or closed": _where(r"^(?:x \\in )?(?:\\left)?[(\[].*,.*[)\]]$", _other_end),
    "another equation": _where(" = ", lambda g, d: _box(g + d.choice([" + 1", " - 2"]))),
    "another variable": _where(r"^[xy] ?= ?", lambda g, _: _box("z" + g[1:])),
    "another text": _where(
        r"^\\text\{[A-Za-z]", lambda g, d: _box(rf"\text{{{d.choice(['Tom', 'north', 'circle', 'odd'])}}}")
    ),
    "another choice": _where(
        r"^\\text\{\(\w\)\}$", lambda g, d: _box(rf"\text{{({d.choice(sorted({*'ABCDE'} - {g[7]}))})}}")
    ),
    "another base": _where(r"^\d+_", lambda g, _: _box(re.sub(r"_\{?(\d)\}?", lambda m: f"_{int(m[1]) % 9 + 1}", g))),
    "another unit": _where(
        r"cents|\\\$",
        lambda g, _: _box(g.replace("cents", "dollars") if "cents" in g else g.replace(r"\$", "") + r"\text{ cents}"),
    ),
}
