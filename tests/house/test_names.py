"""A file says what it is: by its name and in its first line."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mbd_core", "actors", "cluster", "jobs", "benchmarks", "research")
VAGUE = {"utils", "util", "helper", "helpers", "common", "misc", "final", "v2"}


def source_files() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def test_a_file_name_is_no_drawer() -> None:
    assert not {str(path.relative_to(ROOT)) for path in source_files() if path.stem in VAGUE}


def test_every_file_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in source_files()
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent
