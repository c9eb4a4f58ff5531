"""Clients of other people: what clients.toml says of each, its own installation, a run of its program."""

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

FOLDER = Path(__file__).resolve().parents[2] / "clients"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mbd-clients"
INSTALL_SECONDS, RUN_SECONDS = 1200, 300


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client, named as its program in tests/clients/programs.

    packages  of PyPI (NAME==VERSION) or of npm (NAME@VERSION); the first is the client
    kinds     what its program can be asked for
    borrows   its packages see those of this project, which are large
    missing   what it does not get here
    """

    name: str
    packages: tuple[str, ...]
    kinds: tuple[str, ...]
    borrows: bool = False
    missing: str = ""

    @property
    def is_npm(self) -> bool:
        return "==" not in self.packages[0]

    @property
    def program(self) -> Path:
        (path,) = (FOLDER / "programs").glob(f"{self.name}.*")
        return path

    @property
    def versions(self) -> str:
        """The packages that count, with their versions."""
        shown = [package.replace("==", " ") for package in self.packages]
        if self.is_npm:
            shown = [" ".join(package.rsplit("@", 1)) for package in self.packages]
        return ", ".join(text for text in shown if not text.startswith(("zod ", "transformers ")))


def _read() -> tuple[str, tuple[Client, ...]]:
    values = tomllib.loads((FOLDER / "clients.toml").read_text())
    node = values.pop("node")
    clients = [
        Client(name=name, **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
        for name, fields in values.items()
    ]
    return node, tuple(clients)


NODE, CLIENTS = _read()


class NoRegistry(Exception):
    """A registry of packages cannot be reached; the sentence says which."""


def _node_package() -> str:
    """Node.js as npm's own package of a binary."""
    system = {"linux": "linux", "darwin": "darwin"}[sys.platform]
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}[platform.machine().lower()]
    return f"node-{system}-{machine}"


def _check(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@functools.cache
def _check_registry(npm: bool) -> None:
    """Ask for one known package; raises `NoRegistry`."""
    name = "npm's registry" if npm else "a package index"
    command = ["npm", "view", f"node@{NODE}", "version"]
    if not npm:
        command = [sys.executable, "-m", "pip", "index", "versions", "openai"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoRegistry(f"{name} cannot be reached: {error}") from None


def installed(client: Client) -> Path:
    """The folder of the client's own installation, which is made if it is not there. Raises `NoRegistry`."""
    made_by = NODE if client.is_npm else [sys.version, sys.prefix if client.borrows else ""]
    pins = json.dumps([client.packages, made_by])
    folder = CACHE / f"{client.name}-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / ".installed").exists():
            _install(client, folder)
    return folder


def _install(client: Client, folder: Path) -> None:
    _check_registry(client.is_npm)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.is_npm:
        (folder / "package.json").write_text("{}")
        node = f"{_node_package()}@{NODE}"
        _check(["npm", "install", "--no-save", "--engine-strict=false", node, *client.packages], folder)
    else:
        _check([sys.executable, "-m", "venv", str(folder)], folder)
        if client.borrows:
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "project.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        _check([*pip, *client.packages], folder)
    (folder / ".installed").touch()


def run_program(
    client: Client, kind: str, folder: Path, *, url: str, model: str, model_dir: Path, work: Path
) -> subprocess.CompletedProcess[str]:
    """Run a client's program in `work`, by its installation in `folder`."""
    programs = folder / "programs"  # Node.js looks for packages beside the program
    shutil.copytree(FOLDER / "programs", programs, dirs_exist_ok=True)
    bins = [folder / "bin"]
    if client.is_npm:
        bins = [folder / "node_modules" / ".bin", folder / "node_modules" / _node_package() / "bin"]
    runner = {".py": "python", ".mjs": "node", ".sh": "bash"}[client.program.suffix]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]]),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it asks the network for prices
    }
    command = [shutil.which(runner, path=environment["PATH"]) or runner, str(programs / client.program.name)]
    return subprocess.run(
        [*command, kind, url, model, str(model_dir)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
