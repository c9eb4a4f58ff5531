"""Units after a number, by their names and abbreviations."""

import re

from mbd_core.evaluation.tasks.answers.notation import TEXT

_UNIT = re.compile(
    rf"(?:(?:{TEXT}\{{(?P<text>[^{{}}]*)\}}|(?P<words>[A-Za-z][A-Za-z.'’/ -]*))\s*"
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
UNITS = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def unit_of(suffix: str) -> str | None:
    """A unit's name, empty for an unknown unit; `None` if the text is no unit."""
    match = _UNIT.fullmatch(suffix)
    if match is None:
        return None
    bare = match["text"] is None
    words = re.findall(r"[A-Za-z.'’]+", re.sub(r"\\[a-z]+\s*\{?", " ", suffix) if not bare else suffix)
    words = [word.strip(".'’").lower() for word in words if word.strip(".'’")]
    if not words or _NO_UNITS & {*words} or (re.search(r"\d", match["text"] or "")):
        return None
    if bare and len(words[0]) < 3 and (words[0] not in UNITS or len(words[0]) < 2):
        return None  # letters like `2k` or `5ab` are variables
    if bare and len(words) == 1 and len(set(words[0])) < 2:
        return None
    power = next((_POWERS[word] for word in words if word in _POWERS), int(match["power"] or 1))
    named = [word for word in words if word not in _POWERS]
    known = UNITS.get(named[0], "") if len(named) == 1 else ""
    return f"{known}^{power}" if known and power != 1 else known
