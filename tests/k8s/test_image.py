"""The Dockerfile's steps, run as a script in a fresh folder: they bring the lock, and a project that runs."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from manifests import ROOT, normal, pinned_versions
from packaging.requirements import Requirement

DOCKERFILE = ROOT / "k8s" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Steps that change the machine: the packages of the operating system, the user.
MACHINE = re.compile(r"apt-get |useradd ")
# For docker these are `--build-arg`s: here packages come from pip's own sources, and fast.
DIGEST = "python@sha256:" + "0" * 64
BUILD_ARGUMENTS = {"PYTHON_IMAGE": DIGEST, "UV_TORCH_BACKEND": None, "UV_NO_CACHE": "0", "UV_COMPILE_BYTECODE": "0"}


@dataclass(frozen=True)
class Stage:
    """A target: the image or stage that it begins with, and its steps (instruction, text)."""

    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", DOCKERFILE.read_text()).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, text = line.partition(" ")
        if instruction == "ARG" and not found:  # it is for FROM
            continue
        if instruction == "FROM":
            parent, _, name = text.partition(" AS ")
            found[name] = Stage(parent)
        else:
            [*found.values()][-1].steps.append((instruction, text.strip()))
    return found


def steps_of(target: str) -> list[tuple[str, str]]:
    """The steps of a target, those of the stages under it first."""
    known = stages()
    parent = known[target].parent
    return [*(steps_of(parent) if parent in known else ()), *known[target].steps]


def in_context() -> list[Path]:
    """The files that `COPY . .` takes, relative to the root."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    kept, dropped = [r[1:] for r in rest if r.startswith("!")], [r for r in rest if not r.startswith("!")]
    assert all(pattern.startswith("**/") for pattern in dropped)
    names = {pattern.removeprefix("**/") for pattern in dropped}
    files = [f for entry in kept for f in ((ROOT / entry).rglob("*") if (ROOT / entry).is_dir() else [ROOT / entry])]
    relative = [f.relative_to(ROOT) for f in files if f.is_file()]
    return [f for f in relative if not any(fnmatch.fnmatch(part, name) for part in f.parts for name in names)]


def copy(text: str, folder: Path) -> None:
    *sources, target = text.split()
    context = in_context()
    for source in sources:
        chosen = context if source == "." else [Path(source)]
        assert {*chosen} <= {*context}, f"{source} is not in the build's context"
        for path in chosen:
            to = folder / target / (path if source == "." else path.name)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, to)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (DIGEST, 0),
        ("registry.example.com/python@sha256:" + "a1" * 32, 0),
        ("python:3.11-slim-bookworm", 1),
        ("python@sha256:abc", 1),
        ("", 1),
    ],
)
def test_a_base_image_is_named_by_its_digest_or_refused(name: str, code: int) -> None:
    base = stages()["base"]
    assert base.parent == "${PYTHON_IMAGE}"
    assert [parent for parent in (s.parent for s in stages().values()) if parent not in stages()] == [base.parent]
    assert "ARG PYTHON_IMAGE=" not in DOCKERFILE.read_text(), "no tag by default"
    (declared, checked), *_ = [base.steps[:2]]
    assert declared == ("ARG", "PYTHON_IMAGE") and checked[0] == "RUN"
    done = subprocess.run(
        ["sh", "-ec", checked[1]], env={"PYTHON_IMAGE": name, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == code


@dataclass
class Image:
    """What the steps made: the folder where containers begin, their environment, the steps that were left out."""

    folder: Path
    environment: dict[str, str]
    left_out: list[str]

    def run(self, *command: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=folder or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def package_sources() -> dict[str, str]:
    """Where uv finds packages: where pip is set up to find them."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(line.split("=", 1) for line in done.stdout.splitlines())
    links = os.environ.get("PIP_FIND_LINKS") or settings.get("global.find-links", "").strip("'")
    index = os.environ.get("PIP_INDEX_URL") or settings.get("global.index-url", "").strip("'")
    certificates = os.environ.get("PIP_CERT") or settings.get("global.cert", "").strip("'")
    values = {"UV_FIND_LINKS": links, "UV_DEFAULT_INDEX": index, "SSL_CERT_FILE": certificates}
    return {name: value for name, value in values.items() if value}


def run_steps(target: str, root: Path) -> Image:
    subprocess.run([sys.executable, "-m", "venv", root / "python"], check=True, timeout=300)
    kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_", "HTTP", "http", "SSL", "NO_PROXY"))}
    path = f"{root / 'python' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    environment = {**kept, **package_sources(), "PATH": path, "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    image, folder = Image(root, environment, []), root
    for instruction, text in steps_of(target):
        if instruction == "WORKDIR":
            folder = image.folder = root / text.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            copy(text, folder)
        elif instruction in ("ENV", "ARG"):
            given: dict[str, str | None] = {}
            for word in text.split():
                name, _, value = word.partition("=")
                given[name] = BUILD_ARGUMENTS.get(name, value) if instruction == "ARG" else value
            environment |= {name: value for name, value in given.items() if value is not None}
        elif instruction == "RUN" and not MACHINE.search(text):
            image.run("sh", "-ec", text)
        else:
            assert instruction in ("RUN", "USER"), f"{instruction}: the test does not know this step"
            image.left_out.append(f"{instruction} {text}")
    return image


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The CPU target's; skips without a package index."""
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", tmp_path_factory.mktemp("probe")]
    uv = f"uv=={pinned_versions()['uv']}"
    done = subprocess.run([*probe, uv], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"no package index can be reached: pip downloads no {uv}")
    root = tmp_path_factory.mktemp("image")
    yield run_steps("cpu", root)
    shutil.rmtree(root)


@pytest.mark.slow
def test_the_steps_left_out_change_the_machine(image: Image) -> None:
    assert [re.split(r"[ &]+", step)[:2] for step in image.left_out] == [
        ["RUN", "apt-get"],
        ["RUN", "useradd"],
        ["USER", "1000:1000"],
    ]


@pytest.mark.slow
def test_the_image_holds_the_versions_of_the_lock(image: Image) -> None:
    lock = pinned_versions()
    held = {
        normal(p["name"]): p["version"].split("+")[0]
        for p in json.loads(image.run("uv", "pip", "list", "--python", "python", "--format", "json"))
    }
    own = {"pip", PROJECT["name"]}
    assert {name: version for name, version in held.items() if name not in own and lock.get(name) != version} == {}
    assert {"ray", "torch", "s3fs"} <= held.keys() and "pytest" not in held


@pytest.mark.slow
def test_jobs_and_the_application_run_in_the_image(image: Image) -> None:
    assert "Usage" in image.run("python", "jobs/train_multitf.py", "--help")
    code = (
        "import actors.serving.app, actors.serving.proxy\n"
        "actors.serving.app.build; actors.serving.proxy.middlewares()\n"
        "from mbd_core.checkpoint.shipped import model_folder\n"
        "print(actors.serving.app.__file__, model_folder('tiny-mbd'), sep='\\n')"
    )
    elsewhere = image.folder.parent
    assert all(
        line.startswith(str(image.folder)) for line in image.run("python", "-c", code, folder=elsewhere).split()
    )


def test_the_targets_differ_in_the_device_alone() -> None:
    cpu, gpu = (
        [step for step in steps_of(target) if step[0] in ("COPY", "RUN", "USER", "WORKDIR")]
        for target in ("cpu", "gpu")
    )
    assert [step for step in gpu if "gcc" not in step[1]] == cpu
    assert ("ARG", "UV_TORCH_BACKEND=cpu") in steps_of("cpu")
    assert not [text for _, text in steps_of("gpu") if "UV_TORCH_BACKEND" in text]


def test_the_image_begins_with_the_python_of_the_lock_and_ends_as_a_user() -> None:
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["python_version"]
    for text in (DOCKERFILE.read_text(), (ROOT / "k8s" / "README.md").read_text()):
        assert f"docker pull python:{python}-slim" in text, "what a build is told to take the digest of"
    assert steps_of("cpu")[-1] == steps_of("gpu")[-1] == ("USER", "1000:1000")


def test_the_context_holds_what_runs_and_nothing_else() -> None:
    tops = {path.parts[0] for path in in_context()}
    packages = {"actors", "cluster", "jobs", "mbd_core"}
    assert tops == {".ci", "LICENSE", "README.md", "pyproject.toml", *packages}
    assert not [path for path in in_context() if "__pycache__" in path.parts]
    assert Path("mbd_core/checkpoint/shipped/tiny-mbd/config.json") in in_context()


def needed(package: str, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """Everything that an installed package brings with these extras, on this machine."""
    seen = found.setdefault(normal(package), set())
    if {"", *extras} <= seen:
        return
    seen |= {"", *extras}
    for line in metadata.requires(package) or []:
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in seen):
            needed(requirement.name, frozenset(requirement.extras), found)


def test_the_lock_pins_everything_that_the_image_holds() -> None:
    found: dict[str, set[str]] = {}
    optional = PROJECT["optional-dependencies"]
    for requirement in map(
        Requirement, [*PROJECT["dependencies"], *(r for e in ("ray", "s3", "tracing", "train") for r in optional[e])]
    ):
        needed(requirement.name, frozenset(requirement.extras), found)
    assert sorted(found.keys() - pinned_versions().keys()) == []
