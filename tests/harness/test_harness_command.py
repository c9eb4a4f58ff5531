"""How lm-evaluation-harness finds the model `mbd`: by the entry point of this package, or by its command."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from mbd_core.harness import command as harness_command

ROOT = Path(__file__).resolve().parents[2]


def test_the_entry_points_name_what_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"] == {harness_command.MODEL: harness_command.CLASS}
    assert project["scripts"]["mbd-lm-eval"] == f"{harness_command.__name__}:main"
    module, _, name = harness_command.CLASS.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_without_the_harness_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.__main__", raising=False)
    with pytest.raises(SystemExit, match="lm_eval is not installed"):
        harness_command.main()


def test_the_harness_loads_the_model_when_it_is_asked_for_it() -> None:
    """As its registry does with an entry point: later releases put one there by themselves."""
    pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")
    from importlib.metadata import EntryPoint

    from lm_eval.api.registry import get_model, model_registry

    from mbd_core.harness.model import HarnessModel

    harness_command.register()
    harness_command.register()
    assert get_model("mbd") is HarnessModel
    point = EntryPoint("mbd-by-entry-point", harness_command.CLASS, "lm_eval.models")
    model_registry.register(point.name, target=point)
    assert get_model(point.name) is HarnessModel
