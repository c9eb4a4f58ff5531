"""docs/tutorial.md, run as it stands: its commands in one shell, on a cluster of its own, for each family."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.local import LocalCluster, free_ports, local_cluster
from mbd_core.bench.random_folder import write_random_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shape_tokenizer import LEARNED
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.curve_file import LOSSES
from mbd_core.multitf.run_log import PLOT

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 900.0
FAMILIES = {
    "sdar": ("SDAR-8B-b32", "single,multi"),
    "llada2": ("LLaDA2-Mini", "single,multi"),
    "llada": ("D2F-LLaDA", "d2f"),
    "dream": ("D2F-Dream", "d2f"),
}
"""Of each family the recipe, and methods that both the random model and the trained one decode with."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster() as cluster:
        yield cluster


def random_base(family: str, folder: Path) -> Path:
    """A tiny model with random weights in the family's real layout, and a tokenizer with a chat template."""
    words = {"vocab_size": LEARNED, "mask_token_id": LEARNED - 2, "eos_token_ids": (LEARNED - 1,)}
    write_random_folder(replace(SHAPES[f"tiny-{family}"], **words), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tutorial_runs(family: str, cluster: LocalCluster, tmp_path: Path) -> None:
    recipe, methods = FAMILIES[family]
    commands = COMMANDS.findall((ROOT / "docs" / "tutorial.md").read_text())
    assert len(commands) == 5
    (port,) = free_ports(1)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=ROOT,
        env={
            **os.environ,
            **cluster.environment,
            "RAY_ADDRESS": cluster.dashboard_url,
            "W": str(tmp_path / "w"),
            "BASE": str(random_base(family, tmp_path / f"base-{family}")),
            "RECIPE": recipe,
            "METHODS": methods,
            "STEPS": "2",
            "PORT": str(port),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "200 rows: 200 kept, 0 too long" in done.stdout
    run = tmp_path / "w" / "runs" / "first"
    points = [json.loads(line) for line in (run / LOSSES).read_text().splitlines()]
    assert [point["step"] for point in points] == [0, 1] and all(point["loss"] > 0 for point in points)
    assert (run / PLOT).exists() and list((run / "tensorboard").iterdir())
    assert load_model(run / "model").config.architecture == SHAPES[f"tiny-{family}"].architecture
    answer = json.loads((tmp_path / "w" / "answer.json").read_text())
    assert answer["model"] == "first" and answer["usage"]["completion_tokens"] > 0
    rows = json.loads((tmp_path / "w" / "sweep" / "report.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {f"base-{family}", "model"}
