"""The exact value of a number as people and models write it, with its percent sign, unit and base.

Every value is a rational (`Fraction`), so there is no tolerance: 12.0000001 is not 12, and 0.333 is not 1/3.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from mbd_core.evaluation.tasks.answers.notation import TEXT, plain_notation
from mbd_core.evaluation.tasks.answers.units import UNITS, unit_of

LONGEST_NUMBER = 1000  # characters; Python itself refuses to convert more than 4,300 digits


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number. `unit` is a known unit's name, like `cent` or `inch^2`, or empty; `base` is a subscript's."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    base: int | None = None

    def equals(self, other: "Quantity") -> bool:
        """Whether both are the same number. Beside a number without a percent sign, P % is P or P/100, whichever is
        equal to it. A unit or base that one side omits is taken from the other."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.base and other.base and self.base != other.base:
            return False
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        percent, plain = (self, other) if self.percent else (other, self)
        return not plain.unit and percent.value / 100 == plain.value


DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
POWER = (
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<power>[+-]?\d{1,4})\s*\}?|[eE](?P<e>[+-]?\d{1,4}))"
)
CURRENCY = r"(?:\\?\$|\\(?:text|mathrm|mbox)\s*\{\s*\\?\$\s*\}|US\\?\$|USD\s|[€£¥₹₩₽฿]|\\(?:pounds|euro)\b)"
_SIGNED = rf"[+-]?\s*{DECIMAL}"
MAGNITUDE = rf"""(?:
      (?P<whole>\d+|\d{{1,3}}(?:,\d{{3}})+)\s*(?:and\s+)?\\frac\{{\s*(?P<top>\d+)\s*\}}\{{\s*(?P<bottom>\d+)\s*\}}
    | (?P<whole_2>\d+)\s+(?:and\s+)?(?P<top_2>\d+)\s*/\s*(?P<bottom_2>\d+)
    | \\frac\{{\s*(?P<numerator>{_SIGNED})\s*\}}\{{\s*(?P<denominator>{_SIGNED})\s*\}}
    | (?P<before>\d*)\.(?P<lead>\d*)\\(?:overline|bar|dot)\s*\{{?(?P<cycle>\d+)\}}?
    | (?P<over>{DECIMAL})\s*/\s*\{{?(?P<under>{DECIMAL})\}}?
    | (?P<decimal>{DECIMAL}){POWER}?
    | 10\s*\^\s*\{{?\s*(?P<ten>[+-]?\d{{1,4}})\s*\}}?
)"""
_SPACED = re.compile(r"^[+$-]*[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])")
_TEN = re.compile(r"10\s*\^\s*(?:\{\s*([+-]?\d{1,4})\s*\}|(\d))\s*$")
NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?:{CURRENCY}\s*)?(?P<sign_2>[+-]?)\s*{MAGNITUDE}", re.VERBOSE | re.ASCII)


def read_quantity(text: str) -> Quantity | None:
    """The number that the whole text is, in any notation; `None` if it is none, or has more than `LONGEST_NUMBER`
    characters."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = plain_notation(text)
    while text.startswith(("(", "{")) and text.endswith((")", "}")) and re.fullmatch(r"[({][^(){}]*[)}]", text):
        text = text[1:-1].strip()
    if match := _IN_TEXT.fullmatch(text):
        text = match[1].strip()
    text = _SPACED.sub(lambda number: number[0].replace(" ", ""), text)
    text = re.sub(r"^\(([0-9]+)\)(?=\s*_)", r"\1", text)
    if match := _TEN.match(text):
        return Quantity(value=Fraction(10) ** int(match[1] or match[2]))
    match = NUMBER.match(text)
    if match is None or (match["sign"] and match["sign_2"]):
        return in_words(text)
    try:
        value = _magnitude(match)
    except (ZeroDivisionError, ValueError):
        return None
    if value is None:
        return None
    sign = -1 if "-" in (match["sign"], match["sign_2"]) else 1
    in_dollars = "dollar" if "$" in match[0] else ""
    return _with_suffix(Quantity(value=sign * value, unit=in_dollars), text[match.end() :].strip())


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _magnitude(match: re.Match[str]) -> Fraction | None:
    for whole, top, bottom in (("whole", "top", "bottom"), ("whole_2", "top_2", "bottom_2")):
        if match[whole]:
            part = Fraction(int(match[top]), int(match[bottom]))
            return _number(match[whole]) + part if part < 1 else None
    if match["numerator"]:
        return _number(match["numerator"]) / _number(match["denominator"])
    if match["cycle"]:
        lead, cycle = match["lead"], match["cycle"]
        repeated = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(lead))
        return Fraction(int(match["before"] or 0)) + Fraction(int(lead or 0), 10 ** len(lead)) + repeated
    if match["over"]:
        return _number(match["over"]) / _number(match["under"])
    if match["ten"]:
        return Fraction(10) ** int(match["ten"])
    return _number(match["decimal"]) * Fraction(10) ** int(match["power"] or match["e"] or 0)


PERCENT = re.compile(rf"(?:\\?%|(?:{TEXT}\{{)?\s*(?:percent(?:age points?)?|per cent|pct\.?|\\?%)\s*\}}?)\.?", re.I)
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![A-Za-z])")
_IN_TEXT = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")
_BASE = re.compile(
    rf"_\s*\{{?\s*(?:{TEXT})?\{{?\s*(?:base\s*)?(\w+)\s*\}}*"
    rf"|(?:{TEXT}\{{)?\s*\(?\s*(?:in )?base[ -]?(\w+)\s*\)?\s*\}}?",
    re.I,
)
_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALE = re.compile(rf"(?:{TEXT}\{{)?\s*({'|'.join(_SCALES)})s?\b\s*", re.I)


def _with_suffix(quantity: Quantity, suffix: str) -> Quantity | None:
    """The quantity with its suffix; `None` if the suffix makes it something else."""
    if suffix in ("$", r"\$"):
        return Quantity(value=quantity.value, unit="dollar")
    if suffix[:1] in ("€", "£", "¥", "₹", "¢"):
        named_unit = "cent" if suffix[0] == "¢" else ""
        return None if suffix[1:].strip(" .") else Quantity(value=quantity.value, unit=named_unit)
    if match := _SCALE.match(suffix):
        scaled = Quantity(value=quantity.value * _SCALES[match[1].lower()], unit=quantity.unit)
        return _with_suffix(scaled, suffix[match.end() :].strip(" }"))
    if not suffix.strip(" ."):
        return quantity
    if match := PERCENT.match(suffix):
        rest = suffix[match.end() :].strip()
        named = unit_of(rest) is not None if rest else True
        return Quantity(value=quantity.value, percent=True) if named else None
    if match := _DEGREE.match(suffix):
        rest = suffix[match.end() :].strip(" .")
        named = not rest or rest in ("C", "F") or unit_of(rest) is not None
        return Quantity(value=quantity.value, unit="degree") if named else None
    if (match := _BASE.fullmatch(suffix)) and (base := _small_number(match[1] or match[2])):
        return Quantity(value=quantity.value, base=base)
    unit = unit_of(suffix.removeprefix("/"))
    return None if unit is None else Quantity(value=quantity.value, unit=quantity.unit or unit)


def _small_number(text: str) -> int | None:
    if text.isdecimal():
        return int(text) if len(text) < 3 else None
    return _ONES.get(text.lower())


_AFTER_NUMBER = re.compile(
    rf"\s?(?:{PERCENT.pattern}(?![A-Za-z])|{_DEGREE.pattern}|(?:{'|'.join(_SCALES)})\b|_\{{?\w+\}}?"
    rf"|(?:{'|'.join(name for name in UNITS if len(name) > 3)})\b)",
    re.I,
)


def number_end(text: str) -> int:
    """The end of the number at the text's start, with the percent sign, scale or known unit after it; 0 if the text
    begins with no number."""
    match = NUMBER.match(text) or _IN_WORDS.match(text)
    if match is None:
        return 0
    suffix = _AFTER_NUMBER.match(text, match.end())
    return suffix.end() if suffix else match.end()


_ONES = {
    word: value
    for value, word in enumerate(
        (  # noqa: SIM905
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen"
        ).split()
    )
}
_TENS = {
    word: value
    for value, word in zip(
        range(20, 100, 10),
        "twenty thirty forty fifty sixty seventy eighty ninety".split(),  # noqa: SIM905
        strict=True,
    )
}
_WORD = rf"(?:{'|'.join([*_ONES, *_TENS, *_SCALES])})"
_IN_WORDS = re.compile(
    rf"(?P<sign>minus |negative )?(?P<words>(?:{'|'.join([*_ONES, *_TENS])})(?:(?:-| and |,? ){_WORD})*)\b"
    r"(?P<half> and (?:a|one)[ -]half\b)?",
    re.I,
)
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_PART_IN_WORDS = re.compile(
    rf"(?:(?P<number>a|{'|'.join(_ONES)})[ -])?(?P<part>{'|'.join(_PARTS)})s?\b(?:\s+of\b.*)?", re.I | re.DOTALL
)


def in_words(text: str) -> Quantity | None:
    """The quantity that a text spells, like `seventy-three apples` or `minus two and a half`."""
    if part := _PART_IN_WORDS.fullmatch(text.strip(" .")):
        return Quantity(value=Fraction(_ONES.get((part["number"] or "one").lower(), 1), _PARTS[part["part"].lower()]))
    match = _IN_WORDS.match(text)
    if match is None or text[match.end() :].lstrip().startswith("of "):
        return None
    total = group = 0
    for word in re.findall(r"[a-z]+", match["words"].lower()):
        if word in ("hundred", "dozen"):
            group *= _SCALES[word]
        elif word in _SCALES:
            total, group = total + group * _SCALES[word], 0
        elif word != "and":
            group += _ONES.get(word, 0) + _TENS.get(word, 0)
    value = Fraction(total + group) + (Fraction(1, 2) if match["half"] else 0)
    return _with_suffix(Quantity(value=-value if match["sign"] else value), text[match.end() :].strip())
