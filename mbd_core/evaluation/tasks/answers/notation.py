"""One notation of mathematics: ASCII signs and LaTeX's commands, whatever signs people and models write."""

import re
import unicodedata

TEXT = r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mathrm|mathbf|mathit|mbox|operatorname|rm)\s*"
"""LaTeX's commands for text in a formula, before the brace."""
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
        "\u2205": r"\emptyset ",
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
_LONG_DASH = re.compile(r"(?<![\s({\[=:,$*])\s*\u2014\s*")  # after a word it divides a sentence
_ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_SPACE = re.compile(r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])|[~\s\u00a0\u2009\u202f\u2006\u2005]")
THOUSANDS = re.compile(
    r"(?<=\d)(?:['\u2019]|\\[,;:! ]|\s*\{\s*,\s*\}|~|,\\!\s*|[\u00a0\u2009\u202f]|,\s*(?=\\!))(?=\d{3}(?!\d))"
)
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")  # LaTeX's comma inside a number
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d+)")
_FRACTION_NAME = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_ROMAN_LETTER = re.compile(r"\\(?:mathrm|text|mathit|rm)\s*\{([ie])\}")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\d|\\pi|[A-Za-z]))"
_SHORT_FRACTION = re.compile(rf"\\frac{_ARGUMENT}{_ARGUMENT}")
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])\.?|\\(?:display|text)style(?![A-Za-z])")


def plain_notation(text: str) -> str:
    """The text in one notation: ASCII signs and LaTeX's commands, `\\frac{a}{b}`, one kind of space, without sizes of
    brackets, and without thousands separators other than ASCII commas."""
    text = _ROMAN_LETTER.sub(r" \1", _SIZES.sub("", ascii_notation(text)))
    text = _SHORT_FRACTION.sub(lambda part: rf"\frac{{{part[1] or part[2]}}}{{{part[3] or part[4]}}}", text)
    return re.sub(r" {2,}", " ", _SPACE.sub(" ", text)).strip()


def ascii_notation(text: str) -> str:
    """The text with ASCII signs and LaTeX's commands for other signs, one name for fractions and the empty set, braces
    under roots, a decimal point for LaTeX's decimal comma, and without typographic thousands separators."""
    text = _EMPTY_SET.sub(r"\\emptyset", _FRACTION_NAME.sub(r"\\frac", text if text.isascii() else _ascii(text)))
    return _DECIMAL_COMMA.sub(".", THOUSANDS.sub("", _BARE_ROOT.sub(r"\\sqrt{\1}", text)))


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
