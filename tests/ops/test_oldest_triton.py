"""The kernels compiled by the oldest release of Triton that is taken; the other tests have the newest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_kernels_fit_as_the_oldest_triton_compiles_them(capability: int, tmp_path: Path) -> None:
    """A process compiles for one chip, as it does in use: what Triton 3.6 makes depends on what it compiled before."""
    folder = next(Path(sys.prefix).glob("triton-*[0-9]"), None)
    if folder is None:
        pytest.skip(f"no other release of Triton in {sys.prefix}; make test installs it there")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    version = folder.name.removeprefix("triton-")
    checked = f"import sys, pytest, triton; assert triton.__version__ == {version!r}"
    chosen = ["tests/ops/test_triton_compiled.py", "-q", "-k", f"{capability}]", "-p", "no:cacheprovider"]
    chosen += ["--basetemp", str(tmp_path / "base")]
    done = subprocess.run(
        [sys.executable, "-c", f"{checked}; sys.exit(pytest.main(sys.argv[1:]))", *chosen],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path / "compiled")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-2000:] + done.stderr[-500:]
