"""Who may know whom: the import contracts stand in pyproject.toml, and these tests hold the source against them."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mbd_core", "actors", "cluster", "jobs", "benchmarks", "research")
GPU_ONLY = {"flash_attn", "flashinfer", "triton", "vllm", "kernels"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([command, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=300)


def copy_of_the_source(root: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def test_the_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


CORE_AND_JOBS = "jobs over actors over the core and the cluster BROKEN"
ROOMS = "the rooms of mbd_core, by floor BROKEN"
# A file, its line, the contract that it breaks, and the sentence that says so.
BREACHES = [
    ("mbd_core/engine/x.py", "import ray.data", "mbd_core runs without Ray BROKEN", "mbd_core.engine.x -> ray"),
    ("mbd_core/models/x.py", "from cluster import local", CORE_AND_JOBS, "mbd_core.models.x -> cluster.local"),
    ("cluster/x.py", "from mbd_core import ops", CORE_AND_JOBS, "cluster.x -> mbd_core.ops"),
    ("mbd_core/decoding/x.py", "from ..models import decoder", ROOMS, "decoding.x -> mbd_core.models.decoder"),
    (
        "mbd_core/multitf/x.py",
        "from mbd_core.engine.step import decode",
        ROOMS,
        "multitf.x -> mbd_core.engine.step.decode",
    ),
    (
        "mbd_core/evaluation/sandbox/x.py",
        "from mbd_core.evaluation.tasks.kinds import mathematics",
        "evaluation: sandbox < tasks; measures < sweep < report BROKEN",
        "mbd_core.evaluation.sandbox.x -> mbd_core.evaluation.tasks.kinds.mathematics",
    ),
    ("jobs/x.py", "import benchmarks.tables", CORE_AND_JOBS, "jobs.x -> benchmarks"),
    ("mbd_core/attic/__init__.py", "", ROOMS, "not listed as layers:\n\n- mbd_core.attic\n"),
    (
        "mbd_core/ops/x.py",
        "from mbd_core.ops import y",
        "no circles inside a room BROKEN",
        "cycles are allowed in mbd_core.ops.",
    ),
]


@pytest.fixture(scope="module")
def found_breaches(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of a copy of the source that breaks the contracts by all of `BREACHES`."""
    root = tmp_path_factory.mktemp("breaches")
    copy_of_the_source(root)
    for module, line, *_ in [*BREACHES, ("mbd_core/ops/y.py", "import mbd_core.ops.x")]:
        (root / module).parent.mkdir(exist_ok=True)
        (root / module).write_text(line + "\n")
    done = lint_imports(root)
    assert done.returncode != 0
    return done.stdout


@pytest.mark.parametrize(("contract", "sentence"), [breach[2:] for breach in BREACHES], ids=[b[0] for b in BREACHES])
def test_a_breach_is_found(found_breaches: str, contract: str, sentence: str) -> None:
    assert contract in found_breaches and sentence in found_breaches


def test_packages_for_gpus_are_imported_by_kernels_alone_and_when_they_are_called() -> None:
    """So that every module can be imported where they are not installed."""
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in GPU_ONLY):
            continue
        tree = ast.parse(text)
        in_functions = {
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in GPU_ONLY for name in names):
                assert module_name(path).startswith("mbd_core.ops."), f"{path} imports {names}"
                assert node in in_functions, f"{path} imports {names} when it is imported"


def test_one_file_imports_what_ray_keeps_private() -> None:
    """Ray renames it without notice."""
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        if module_name(path) == "cluster.ray_private" or not re.search(r"\bray\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            private = [name for name in names if re.fullmatch(r"ray(\.\w+)*\._\w+(\.\w+)*", name)]
            assert not private, f"{path} uses {private}"


# A program's own process, and a module that lm-evaluation-harness alone imports: it needs that package.
FOR_OTHERS = ("evaluation/sandbox/child.py", "harness/model.py")


def test_the_core_loads_without_ray_or_a_web_framework() -> None:
    modules = [module_name(p) for p in sorted((ROOT / "mbd_core").rglob("*.py")) if not str(p).endswith(FOR_OTHERS)]
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        "print([m for m in ('ray', 'fastapi', 'flash_attn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("actors.evaluation.packed_parts", ("torch", "transformers")),  # these two: what a process that grades needs
        ("mbd_core.evaluation.sweep.grading.part_grading", ("torch", "transformers")),
        ("mbd_core.serving.api.openapi", ("torch", "transformers")),  # the schema, and what a client reads of it
        (
            "mbd_core.serving.tokens.load",
            ("torch.distributed.tensor", "sympy", "ray", "matplotlib"),
        ),  # one that serves
    ],
)
def test_a_process_imports_no_package_that_it_does_not_use(module: str, packages: tuple[str, ...]) -> None:
    """A sweep starts several that grade, and a service many that serve: each would take seconds longer to start."""
    code = f"import sys, {module}\nprint([m for m in {packages!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
