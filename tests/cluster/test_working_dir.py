"""What `ray job submit --working-dir .` carries from a checkout in which the guides' commands were typed."""

import re
import shutil
import zipfile

import pytest
from ray._private.runtime_env.packaging import create_package

from cluster.local import ROOT
from mbd_core.checkpoint.shipped.adapted import adapter_names

CODE = ("actors", "cluster", "jobs", "mbd_core")
WRITTEN = (
    *("data/samples.arrow", "data/samples.bin", "data/data.json", "runs/tiny-mbd/step_000001/__0_0.distcp"),
    *("runs/tiny-mbd/losses.jsonl", "out/sweep/samples/part-0.parquet", "out/sdar/model.safetensors"),
    *("models/SDAR-8B-Chat-b32/config.json", "SDAR-8B-Chat-b32/model-00001-of-00004.safetensors"),
    *("path/to/base/pytorch_model.bin", "runs/rl/learner/00001.pt", ".venv/bin/python", ".git/objects/ab"),
)
TAKEN = ("my_rewards.py", "chats.jsonl", "mytasks/pens.yaml", "config.yaml")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The names and sizes of what Ray packs of a copy of this checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".rayignore", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in (*WRITTEN, *TAKEN):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(1000))
    package = folder.parent / "package.zip"
    create_package(str(folder), package, include_gitignore=False)  # as with RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 too
    with zipfile.ZipFile(package) as content:
        return {info.filename: info.file_size for info in content.infolist() if not info.is_dir()}


def test_the_code_goes_with_a_job_and_what_commands_wrote_does_not(packed: dict[str, int]) -> None:
    code = [str(path.relative_to(ROOT)) for name in CODE for path in (ROOT / name).rglob("*")]
    wanted = {name for name in code if (ROOT / name).is_file() and "__pycache__" not in name}
    assert packed.keys() - {".rayignore", ".gitignore"} == wanted | {*TAKEN}
    folders = tuple(f"mbd_core/checkpoint/shipped/{name}/" for name in adapter_names())
    adapters = {name for name in packed if name.startswith(folders)}
    assert sum(size for name, size in packed.items() if name not in adapters) < 25 * 2**20
    assert sum(packed[name] for name in adapters) <= 25e6  # a job takes shipped models by name


def test_what_the_guides_write_here_is_left_behind() -> None:
    """Folders that commands of the guides name as a target, relative to the checkout; URLs are none."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))])
    targets = set(re.findall(r"--(?:out|storage|checkpoints) ([A-Za-z][\w.-]*)(?![\w.:-])", text)) - {"DIR"}
    ignored = (ROOT / ".rayignore").read_text().splitlines()
    assert {"data", "out", "runs"} <= targets
    assert {f"/{target.partition('/')[0]}" for target in targets} - {*ignored} == {"/research"}  # reports, not runs
