"""What needs no cluster runs on the base install: no Ray, and only packages that it brings."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOBS = (
    "benchmarks.__main__",
    "jobs.grade",
    "jobs.report_sweep",
    "jobs.trace_report",
    "research.alignment.study",
    "research.block_batch.study",
    "research.ledger.gate",
    "research.rl.study",
)
# Each is imported where it is used: openai for endpoints, datasets for a data set of the hub, lm_eval by its backend,
# peft where a recipe trains an adapter, bitsandbytes where its base has 4 bits, mlflow, tensorboard and wandb where a
# run is logged to them, pandas for a result's table, the others where a GPU is.
OPTIONAL = {
    "bitsandbytes",
    "datasets",
    "flash_attn",
    "flashinfer",
    "gguf",
    "kernels",
    "lm_eval",
    "mlflow",
    "openai",
    "pandas",
    "peft",
    "tensorboard",
    "triton",
    "vllm",
    "wandb",
}


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module))
    return {name.split(".")[0] for name in names}


def test_every_package_that_is_imported_is_a_base_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in project["dependencies"]}
    base |= {"yaml"} if "pyyaml" in base else set()  # a package that is imported by another name
    cores = [path for room in ("mbd_core", "jobs/api") for path in (ROOT / room).rglob("*.py")]
    files = [*cores, *(ROOT / f"{job.replace('.', '/')}.py" for job in JOBS)]
    known = base | OPTIONAL | set(sys.stdlib_module_names) | {"mbd_core", "jobs", "benchmarks", "research"}
    known |= {"actors", "cluster", "ray"}  # of jobs/api, on clusters; contracts keep mbd_core from them
    assert {
        name: sorted(missing) for f in files if (missing := imported_packages(f) - known) for name in [f.name]
    } == {}


def test_jobs_that_need_no_cluster_load_without_ray() -> None:
    code = (
        "import importlib, sys\n"
        "for name in ('ray', 'fastapi', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
        f"for job in {JOBS}:\n"
        "    assert importlib.import_module(job).main(['--help']) == 0, job\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(JOBS)


def test_a_command_that_needs_a_cluster_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from jobs.__main__ import main\n"
        "for line in ('serve --model tiny-mbd', f'demo --out {sys.argv[1]}'):\n"
        "    assert main(line.split()) == 2, line\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 2 and done.stderr.count("mbd-cluster[ray]") == 2
