"""Who may know whom: the import contracts of docs/architecture.md, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mbd_core", "actors", "cluster", "jobs")
GPU_ONLY = {"flash_attn", "flashinfer", "triton", "vllm", "kernels"}

# What the modules under a prefix must never import.
FORBIDDEN = {
    "mbd_core": {"ray", "fastapi", "starlette", "uvicorn", "cluster", "actors", "jobs"},
    "cluster": {"actors", "mbd_core", "jobs"},
    "actors": {"jobs"},
    "mbd_core.decoding": {"mbd_core.models", "mbd_core.engine"},
    "mbd_core.models": {"mbd_core.decoding", "mbd_core.engine", "mbd_core.multitf"},
    "mbd_core.ops": {"mbd_core.decoding", "mbd_core.engine", "mbd_core.multitf"},
    "mbd_core.multitf": {"mbd_core.engine", "mbd_core.decoding"},
    "mbd_core.trace": {"mbd_core.engine", "mbd_core.models", "mbd_core.multitf"},
}
GPU_ROOMS = ("mbd_core.ops", "mbd_core.models.moe")


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, root: Path) -> set[str]:
    """Every module the file imports, anywhere in it; `from a import b` counts as `a.b`."""
    package = module_name(path, root).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def breaches(root: Path) -> list[str]:
    found = []
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        module = module_name(path, root)
        for name in sorted(imported(path, root)):
            bad = any(
                under(module, room) and any(under(name, b) for b in banned) for room, banned in FORBIDDEN.items()
            )
            gpu = name.split(".")[0] in GPU_ONLY and not any(under(module, room) for room in GPU_ROOMS)
            if bad or gpu:
                found.append(f"{module} imports {name}")
    return found


def test_the_contracts_hold():
    assert breaches(ROOT) == []


@pytest.mark.parametrize(
    ("module", "line", "breach"),
    [
        ("mbd_core/engine/x.py", "import ray.data", "mbd_core.engine.x imports ray.data"),
        ("mbd_core/x.py", "def f():\n    from cluster import local", "mbd_core.x imports cluster.local"),
        (
            "cluster/x.py",
            "from mbd_core.decoding.request import Request",
            "cluster.x imports mbd_core.decoding.request.Request",
        ),
        (
            "mbd_core/decoding/x.py",
            "from ..models import decoder",
            "mbd_core.decoding.x imports mbd_core.models.decoder",
        ),
        ("mbd_core/engine/x.py", "import flash_attn", "mbd_core.engine.x imports flash_attn"),
    ],
)
def test_a_breach_is_found(tmp_path, module, line, breach):
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert breaches(tmp_path) == [breach]


def test_the_core_loads_without_ray_or_a_web_framework():
    modules = [module_name(p, ROOT) for p in sorted((ROOT / "mbd_core").rglob("*.py")) if p.name != "sandbox_child.py"]
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        "print([m for m in ('ray', 'fastapi', 'flash_attn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
