"""The exact value of a number as people and models write it, with its percent sign, unit and base.

Every value is a rational (`Fraction`), so there is no tolerance: 12.0000001 is not 12, and 0.333 is not 1/3.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 1000  # characters; Python itself refuses to convert more than 4,300 digits


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number. `unit` is a known unit's name, like `cent` or `inch^2`, or empty; `base` is a subscript's."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    base: int | None = None

    def equals(self, other: "Quantity") -> bool:
        """Whether both are the same number. P % is P or P/100, whichever the other side, without the sign, says; a
        unit or base that one side leaves out is the other's."""
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


# Notation.

_FRACTION_SLASH = "\u2044"
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
        "\uff0b": "+",
        "\u00d7": r"\times ",
        "\u22c5": r"\cdot ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u2215": "/",
        _FRACTION_SLASH: "/",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u221e": r"\infty ",
        "\u222a": r"\cup ",
        "\u2208": r"\in ",
        "\u03c0": r"\pi ",
        "\u00b1": r"\pm ",
        "\u2248": r"\approx ",
        "\u00b0": r"^\circ ",
        "\u00ba": r"^\circ ",
        "\uff05": "%",
        "\uff04": "$",
        "\uff0c": ",",
        "\u3002": ". ",
        "\uff0e": ".",
        "\uff1a": ":",
        "\uff1b": ";",
        "\uff08": "(",
        "\uff09": ")",
        "\u2032": "'",
    }
)
_RAISED = {
    "⁰": "0",
    "¹": "1",
    "²": "2",
    "³": "3",
    "⁴": "4",
    "⁵": "5",
    "⁶": "6",
    "⁷": "7",
    "⁸": "8",
    "⁹": "9",
    "⁻": "-",
}
_LOWERED = {chr(0x2080 + digit): str(digit) for digit in range(10)}
_LONG_DASH = re.compile(r"(?<![\s({\[=:,$*])\s*\u2014\s*")  # behind a word it divides a sentence
_ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_SPACE = re.compile(r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])|[~\s\u00a0\u2009\u202f\u2006\u2005]")
THOUSANDS = re.compile(
    r"(?<=\d)(?:\\[,;:! ]|\s*\{\s*,\s*\}|~|,\\!\s*|[\u00a0\u2009\u202f]|,\s*(?=\\!))(?=\d{3}(?!\d))"
)
_FRACTION_NAME = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_ROMAN_LETTER = re.compile(r"\\(?:mathrm|text|mathit|rm)\s*\{([ie])\}")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\d|\\pi|[A-Za-z]))"
_SHORT_FRACTION = re.compile(rf"\\frac{_ARGUMENT}{_ARGUMENT}")
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])\.?|\\(?:display|text)style(?![A-Za-z])")


def plain_notation(text: str) -> str:
    """The text in one notation: ASCII signs and LaTeX's commands, `\\frac{a}{b}`, no marks of thousands that LaTeX or
    typography alone knows, one kind of space, no sizes of brackets."""
    text = _ROMAN_LETTER.sub(r" \1", _SIZES.sub("", ascii_notation(text)))
    text = _SHORT_FRACTION.sub(lambda part: rf"\frac{{{part[1] or part[2]}}}{{{part[3] or part[4]}}}", text)
    return re.sub(r" {2,}", " ", _SPACE.sub(" ", text)).strip()


def ascii_notation(text: str) -> str:
    """The text with ASCII signs and LaTeX's commands for others, one name for fractions, and without marks of
    thousands that LaTeX or typography alone knows."""
    return THOUSANDS.sub("", _FRACTION_NAME.sub(r"\\frac", text if text.isascii() else _ascii(text)))


def _ascii(text: str) -> str:
    text = _LONG_DASH.sub(" : ", text)
    parts = list[str]()
    for index, sign in enumerate(text):
        if unicodedata.decomposition(sign).startswith("<fraction>"):
            numerator, _, denominator = unicodedata.normalize("NFKC", sign).partition(_FRACTION_SLASH)
            space = " " if index and text[index - 1].isdigit() else ""
            parts.append(f"{space}{numerator}/{denominator}")
        elif sign in _RAISED:
            parts.append(("" if index and text[index - 1] in _RAISED else "^{") + _RAISED[sign])
            if text[index + 1 : index + 2] not in _RAISED:
                parts.append("}")
        elif sign in _LOWERED:
            parts.append(("" if index and text[index - 1] in _LOWERED else "_{") + _LOWERED[sign])
            if text[index + 1 : index + 2] not in _LOWERED:
                parts.append("}")
        elif "\uff10" <= sign <= "\uff19":
            parts.append(unicodedata.normalize("NFKC", sign))
        else:
            parts.append(sign)
    return _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", "".join(parts).translate(_SIGNS))


# One number in that notation.

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
CURRENCY_SIGN = re.compile(rf"[+-]?\s*(?:{CURRENCY})")


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


# What may stand behind a number.

_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname|rm)\s*"
PERCENT = re.compile(rf"(?:\\?%|(?:{_TEXT}\{{)?\s*(?:percent(?:age points?)?|per cent|pct\.?|\\?%)\s*\}}?)\.?", re.I)
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![A-Za-z])")
_IN_TEXT = re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}")
_BASE = re.compile(
    rf"_\s*\{{?\s*(?:{_TEXT})?\{{?\s*(?:base\s*)?(\w+)\s*\}}*"
    rf"|(?:{_TEXT}\{{)?\s*\(?\s*(?:in )?base[ -]?(\w+)\s*\)?\s*\}}?",
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
_SCALE = re.compile(rf"(?:{_TEXT}\{{)?\s*({'|'.join(_SCALES)})s?\b\s*", re.I)
_UNIT = re.compile(
    rf"(?:(?:{_TEXT}\{{(?P<text>[^{{}}]*)\}}|(?P<words>[A-Za-z][A-Za-z.'’/ -]*))\s*"
    r"(?:\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?\s*(?:[./]|\\cdot|\\text\{[.]\})?\s*)+"
)
_NO_UNITS = frozenset(
    (  # noqa: SIM905
        "and or to between from plus minus times over mod pi sqrt sin cos tan cot sec csc log ln exp inf infinity abs "
        "not is are if then theta alpha beta gamma"
    ).split()
)
_SPELLINGS = {
    "dollar": "dollars usd bucks",
    "cent": "cents",
    "euro": "euros eur",
    "pound": "pounds lb lbs",
    "ounce": "ounces oz",
    "gram": "grams g",
    "kilogram": "kilograms kg kgs",
    "milligram": "milligrams mg",
    "inch": "inches in ins",
    "foot": "feet ft",
    "yard": "yards yd yds",
    "mile": "miles mi",
    "millimeter": "millimeters millimetre millimetres mm",
    "centimeter": "centimeters centimetre centimetres cm cms",
    "meter": "meters metre metres m",
    "kilometer": "kilometers kilometre kilometres km",
    "second": "seconds sec secs s",
    "minute": "minutes min mins",
    "hour": "hours hr hrs h",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "degree": "degrees deg",
    "radian": "radians rad rads",
    "liter": "liters litre litres l",
    "milliliter": "milliliters ml",
    "am": "a.m",
    "pm": "p.m",
}
_UNITS = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def _with_suffix(quantity: Quantity, suffix: str) -> Quantity | None:
    """The quantity with what its suffix says; `None` for a suffix that makes it something else."""
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
        named = _unit(rest) is not None if rest else True
        return Quantity(value=quantity.value, percent=True) if named else None
    if match := _DEGREE.match(suffix):
        rest = suffix[match.end() :].strip(" .")
        named = not rest or rest in ("C", "F") or _unit(rest) is not None
        return Quantity(value=quantity.value, unit="degree") if named else None
    if (match := _BASE.fullmatch(suffix)) and (base := _small_number(match[1] or match[2])):
        return Quantity(value=quantity.value, base=base)
    unit = _unit(suffix.removeprefix("/"))
    return None if unit is None else Quantity(value=quantity.value, unit=quantity.unit or unit)


def _small_number(text: str) -> int | None:
    if text.isdecimal():
        return int(text) if len(text) < 3 else None
    return _ONES.get(text.lower())


def _unit(suffix: str) -> str | None:
    """A unit's name, empty for one that is not known; `None` if the text is no unit."""
    match = _UNIT.fullmatch(suffix)
    if match is None:
        return None
    bare = match["text"] is None
    words = re.findall(r"[A-Za-z.'’]+", re.sub(r"\\[a-z]+\s*\{?", " ", suffix) if not bare else suffix)
    words = [word.strip(".'’").lower() for word in words if word.strip(".'’")]
    if not words or _NO_UNITS & {*words} or (re.search(r"\d", match["text"] or "")):
        return None
    if bare and len(words[0]) < 3 and (words[0] not in _UNITS or len(words[0]) < 2):
        return None  # letters like `2k` or `5ab` are variables
    if bare and len(words) == 1 and len(set(words[0])) < 2:
        return None
    power = next((_POWERS[word] for word in words if word in _POWERS), int(match["power"] or 1))
    named = [word for word in words if word not in _POWERS]
    known = _UNITS.get(named[0], "") if len(named) == 1 else ""
    return f"{known}^{power}" if known and power != 1 else known


_BEHIND = re.compile(
    rf"\s?(?:{PERCENT.pattern}(?![A-Za-z])|{_DEGREE.pattern}|(?:{'|'.join(_SCALES)})\b|_\{{?\w+\}}?"
    rf"|(?:{'|'.join(name for name in _UNITS if len(name) > 3)})\b)",
    re.I,
)


def number_end(text: str) -> int:
    """Where the number ends with which a text begins, with the percent sign, scale or known unit behind it; 0 without
    one."""
    match = NUMBER.match(text) or _IN_WORDS.match(text)
    if match is None:
        return 0
    behind = _BEHIND.match(text, match.end())
    return behind.end() if behind else match.end()


# Numbers in words.

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
