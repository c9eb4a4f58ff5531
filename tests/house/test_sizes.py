"""The house's measures: what a reader can hold at once, and names that say what a file is."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mbd_core", "actors", "cluster", "jobs")
LONGEST_FUNCTION, LONGEST_CLASS = 60, 400
VAGUE = {"utils", "util", "helper", "helpers", "common", "misc", "final", "v2"}


def source_files() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def test_functions_and_classes_are_short() -> None:
    too_long = []
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                most = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > most:
                    too_long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines, at most {most}")
    assert not too_long, "\n".join(too_long)


def test_a_file_name_stands_once_and_says_something() -> None:
    places = defaultdict(list)
    for path in source_files():
        if path.name != "__init__.py":
            places[path.stem].append(str(path.relative_to(ROOT)))
    # a job is named after what it does, and so is what it runs
    twice = {n: p for n, p in places.items() if len([q for q in p if not q.startswith("jobs/")]) > 1}
    assert not twice
    assert not places.keys() & VAGUE


def test_every_file_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in source_files()
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent
