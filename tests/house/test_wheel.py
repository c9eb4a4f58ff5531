"""The wheel: what `pip install` brings to a place outside the repository."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("pyproject.toml", "build_backend.py", "README.md", "LICENSE", "mbd_core", "actors", "cluster", "jobs")


def test_a_wheel_holds_the_shipped_models_and_works_outside_the_repository(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    stale = source / "build" / "lib" / "mbd_core" / "removed.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    subprocess.run([*command, "-w", tmp_path, source], check=True, cwd=tmp_path, timeout=300)
    assert [path for path in (source / "build").rglob("*") if path.is_file()] == [stale]
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert not list(installed.rglob("*.pyc")) and not (installed / "mbd_core" / "removed.py").exists()
    for name in ("trace/replay.html", "evaluation/report/page.html"):
        assert (installed / "mbd_core" / name).read_bytes() == (ROOT / "mbd_core" / name).read_bytes()
    page = ROOT / "mbd_core/serving/playground"
    assert {p.name for p in (installed / page.relative_to(ROOT)).iterdir()} == {p.name for p in page.iterdir()}
    for path in (ROOT / "mbd_core/checkpoint/shipped").glob("*/*"):
        if path.suffix != ".pyc":
            assert (installed / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mbd_core\n"
        "from mbd_core.checkpoint.shipped import model_folder\n"
        "print(mbd_core.__file__, model_folder('tiny-mbd'), sep='\\n')\n"
        "from jobs.__main__ import main\n"
        "assert main(['--version']) == 0 and main(['bench']) == 2\n"
        "from mbd_core import LLM\n"
        "assert LLM('tiny-mbd').chat('Tom has 3 apples.', max_tokens=4).finish_reason\n"
        "for name in ('serve', 'train', 'sweep', 'report', 'demo'): assert main([name, '--help']) == 0"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, installed], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "bench: benchmarks is not in the installed package: run the command in the repository's folder"
    )
    here, folder, version, *helps = done.stdout.splitlines()
    assert here.startswith(str(installed)) and folder.startswith(str(installed))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version == project["version"] and "Usage: mbd demo" in "".join(helps)
    (scripts,) = installed.glob("*.dist-info/entry_points.txt")
    assert {f"{name} = {entry}" for name, entry in project["scripts"].items()} <= {*scripts.read_text().splitlines()}
