"""The shipped notebook runs as Jupyter runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "docs" / "guide" / "python.ipynb"


def test_the_notebook_is_shipped_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_jupyter_executes_the_notebook(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    executed = tmp_path / "python.ipynb"
    executed.write_text(NOTEBOOK.read_text())
    command = [Path(sys.executable).with_name("jupyter-execute"), "--inplace", str(executed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("#### 19" in "".join(output.get("text", "")) for output in outputs)
    pages = ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    assert pages[0].startswith("<iframe") and len(pages) == 4
