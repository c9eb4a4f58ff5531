"""A file says what it is, by its name and in its first line; a type name means one thing."""

import ast
from collections import defaultdict
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


def type_names(path: Path) -> list[str]:
    """Classes of a module, and its names for types: `Rows = list[Row]`."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
            names += [
                t.id for t in node.targets if isinstance(t, ast.Name) and t.id[0].isupper() and not t.id.isupper()
            ]
    return names


def test_a_type_name_means_one_thing_in_the_repository() -> None:
    places = defaultdict(list)
    for path in source_files():
        for name in type_names(path):
            places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
