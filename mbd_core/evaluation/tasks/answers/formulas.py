"""The formulas of a text, and neighbouring statements that are one list."""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StatedPart:
    """An answer that stands in a text from `start` to `end`. It is clean if its sentence holds little else."""

    start: int
    end: int
    content: str
    is_clean: bool = True
    is_boxed: bool = False

    def holds(self, other: "StatedPart") -> bool:
        return self.start <= other.start < self.end or (other.start <= self.start < other.end)


FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>[^$]{1,2000}?)\$\$|\\\[(?P<b>.{1,2000}?)\\\]|\\\((?P<c>.{1,2000}?)\\\)"
    r"|(?<![\\$\d])\$(?!\s)(?P<d>(?:\\\$|[^$\n]){1,2000}?)(?<![\s\\])\$(?![\d$])"
    r"|(?<![\\$\d])\$\s(?P<e>[^$\n]{1,2000}?)\s\$(?![\d$])"
    r"|\\begin\{(?P<name>align|equation|gather|aligned)(?P<star>\*?)\}(?P<f>.{1,2000}?)\\end\{(?P=name)(?P=star)\}",
    re.DOTALL,
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
PERCENT_AFTER = re.compile(r"\s?(?:\\?%|percent\b|pct\b)", re.I)


def formulas(text: str) -> Iterator[StatedPart]:
    """The formulas of a text; an amount of money (`$5 and $6`) is none. A formula of several rows counts as its last
    row."""
    position = 0
    while match := FORMULA.search(text, position):
        content = next(match[name] for name in "abcdef" if match[name] is not None)
        if match["d"] and _PROSE.search(COMMANDS.sub("", content)):
            position = match.start() + 1
            continue
        position = match.end()
        if r"\begin{" not in content:
            content = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", content) if row.strip()][-1:]
            content = content[0].replace("&", "") if content else ""
        if percent := PERCENT_AFTER.match(text, position):
            content, position = content + r"\%", percent.end()
        yield StatedPart(start=match.start(), end=position, content=content.strip())


_CONNECTOR_TEXT = re.compile(r"\\text\{\s*,?\s*(and|or)\s*\}|\$|\\[()\[\]]|\\q?quad\b|\\[,;:! ]")
_CONNECTOR = re.compile(r"\s*(?:,?\s*(?:and|or)|[,;])\s*(?:\w\s*=\s*)?$")


def joined(text: str, parts: list[StatedPart]) -> list[StatedPart]:
    """The parts, with neighbours joined into one list if only `,`, `and` or `or` stands between them."""
    groups: list[StatedPart] = []
    for part in parts:
        if groups and _CONNECTOR.match(_CONNECTOR_TEXT.sub(r"\1", text[groups[-1].end : part.start])):
            last = groups.pop()
            content = f"{last.content} , {part.content}"
            part = StatedPart(start=last.start, end=part.end, content=content, is_boxed=part.is_boxed)
        groups.append(part)
    return groups
