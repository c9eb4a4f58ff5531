"""The manifests of k8s/ as `kubectl kustomize` renders them, and the parts of them that tests ask for."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = ROOT / "k8s" / "overlays"
BASE_CLUSTER_FILE = ROOT / "k8s" / "base" / "nodes" / "ray-cluster.yaml"
BASE_SERVE_FILE = ROOT / "k8s" / "base" / "serve.yaml"
CRDS = ROOT.parent / "shared" / "kuberay-crds"
REPLACEMENTS_SINCE = (4, 2)  # of kustomize

Object = dict[str, Any]


@dataclass(frozen=True)
class NodeGroup:
    """The head or a group of workers in a rendered object: how many pods there may be, and what each is."""

    name: str
    group: Object
    least: int
    most: int

    @property
    def pod(self) -> Object:
        return self.group["template"]["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.group["template"]["metadata"]["labels"]

    @property
    def container(self) -> Object:
        return self.pod["containers"][0]

    @property
    def resources(self) -> dict[str, float]:
        """What one pod has by Ray's names; the operator passes the limits on, rounded up."""
        limits = self.container["resources"]["limits"]
        parameters = self.group.get("rayStartParams", {}).get("num-cpus")
        return {
            "CPU": float(parameters) if parameters is not None else float(-(-quantity(limits["cpu"]) // 1)),
            "GPU": float(limits.get("nvidia.com/gpu", 0)),
        }


def environment(container: Object) -> dict[str, str]:
    """The variables that a container is given by value."""
    return {variable["name"]: variable["value"] for variable in container["env"]}


def quantity(text: str) -> float:
    """Kubernetes' quantity as a number: cores, or bytes."""
    number, unit = re.fullmatch(r"([\d.]+)(m|[KMGT]i)?", text).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def overlay_names() -> list[str]:
    """Every folder of k8s/overlays that is applied by itself, not as a component of another."""
    files = sorted(OVERLAYS.rglob("kustomization.yaml"))
    return [str(f.parent.relative_to(OVERLAYS)) for f in files if yaml.safe_load(f.read_text())["kind"] != "Component"]


@cache
def kubectl() -> str:
    """The command; skips the test without one, or with one whose kustomize knows no replacements."""
    path = shutil.which("kubectl")
    if path is None:
        pytest.skip("kubectl is not installed")
    result = subprocess.run([path, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True)
    version = json.loads(result.stdout).get("kustomizeVersion", "v0.0")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < REPLACEMENTS_SINCE:
        pytest.skip(f"this kubectl's kustomize is {version}, which knows no replacements (since v4.2)")
    return path


@cache
def _kustomize(folder: Path) -> str:
    result = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(folder: str | Path) -> list[Object]:
    """The objects of a folder, by default of k8s/overlays; new ones at each call."""
    return list(yaml.load_all(_kustomize(OVERLAYS / folder), Loader=yaml.CSafeLoader))


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def ray_cluster_spec(rendered: Object) -> Object | None:
    """The cluster that an object describes, if it is one of Ray's kinds."""
    spec = rendered.get("spec", {})
    field = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}.get(rendered["kind"])
    return spec if rendered["kind"] == "RayCluster" else spec.get(field)


def node_groups(rendered: Object) -> Iterator[NodeGroup]:
    """The head and the workers of one of Ray's kinds; nothing of any other kind."""
    spec = ray_cluster_spec(rendered)
    if spec:
        yield NodeGroup("head", spec["headGroupSpec"], 1, 1)
        for group in spec["workerGroupSpecs"]:
            yield NodeGroup(group["groupName"], group, group["minReplicas"], group["maxReplicas"])


def pod_specs(rendered: Object) -> Iterator[Object]:
    """Every pod that an object describes."""
    yield from (group.pod for group in node_groups(rendered))
    spec = rendered.get("spec", {})
    for field in ("submitterPodTemplate", "template"):
        if field in spec:
            yield spec[field]["spec"]


def serve_file(overlay: str) -> Path:
    """The config that an overlay serves: its own, or that of an overlay it begins with, or the base's."""
    overlay_file = OVERLAYS / overlay / "serve.yaml"
    if overlay_file.exists():
        return overlay_file
    for resource in yaml.safe_load((OVERLAYS / overlay / "kustomization.yaml").read_text())["resources"]:
        folder = (OVERLAYS / overlay / resource).resolve()
        if folder.is_relative_to(OVERLAYS) and folder.is_dir():
            return serve_file(str(folder.relative_to(OVERLAYS)))
    return BASE_SERVE_FILE


def pinned_versions() -> dict[str, str]:
    """The lock: package, in normal form, to version."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
