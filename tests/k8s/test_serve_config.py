"""The serve configs as Ray Serve and the application read them, and the room that the nodes have for them."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from manifests import BASE_SERVE_FILE, ROOT, NodeGroup, node_groups, overlay_names, render, serve_file
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from actors.serving.app import GATEWAY_CPUS
from actors.serving.args import ServingArgs
from cluster.topology import ClusterTooSmall, Topology, check_room

SERVING = ("cpu-kind", "gpu", "gpu-object-storage", "gpu-incremental")
FILES = sorted({BASE_SERVE_FILE, *(serve_file(overlay) for overlay in SERVING)})
JOBS = [name for name in overlay_names() if name.endswith(("/train", "/sweep"))]

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)


def unknown_keys(given: Any, model: Any) -> Iterator[str]:
    """Keys that Serve's schema would drop in silence; what a model takes as a plain value may hold anything."""
    if isinstance(model, BaseModel) and isinstance(given, dict):
        for key, value in given.items():
            if key not in type(model).model_fields:
                yield f"{type(model).__name__}.{key}"
            else:
                yield from unknown_keys(value, getattr(model, key))
    elif isinstance(model, list) and isinstance(given, list):
        for value, item in zip(given, model, strict=True):
            yield from unknown_keys(value, item)


def arguments(config: dict[str, Any]) -> ServingArgs:
    (application,) = config["applications"]
    return ServingArgs.read(application["args"])


@each_file
def test_serve_takes_the_file_and_knows_each_key(path: Any) -> None:
    config = yaml.safe_load(path.read_text())
    assert [*unknown_keys(config, ServeDeploySchema.model_validate(config))] == []


def test_a_key_that_serve_would_drop_is_found() -> None:
    config = yaml.safe_load(FILES[0].read_text())
    config["http_options"]["prot"] = 8000
    config["applications"][0]["routeprefix"] = "/"
    found = [*unknown_keys(config, ServeDeploySchema.model_validate(config))]
    assert len(found) == 2 and found[0].endswith(".prot") and found[1].endswith(".routeprefix")


@each_file
def test_the_application_takes_the_arguments(path: Any) -> None:
    config = yaml.safe_load(path.read_text())
    module, _, function = config["applications"][0]["import_path"].partition(":")
    assert (module, function) == ("actors.serving.app", "build")
    assert arguments(config).models
    broken = copy.deepcopy(config)
    broken["applications"][0]["args"]["models"][0]["engine"]["max_row"] = 4
    with pytest.raises(ValueError, match=r"'models\.0\.engine\.max_row'"):
        arguments(broken)


def nodes(groups: list[NodeGroup], *, least: bool) -> list[dict[str, float]]:
    """The resources of every pod of Ray, at the fewest or the most pods of each group."""
    return [group.resources for group in groups for _ in range(group.least if least else group.most)]


def check_serving(overlay: str, args: ServingArgs) -> None:
    (service,) = [o for o in render(overlay) if o["kind"] == "RayService"]
    gateways = -(-args.gateways * GATEWAY_CPUS // 1)
    topologies = [args.topology(model) for model in args.models]
    check_room(topologies, nodes([*node_groups(service)], least=False), spare_cpus=int(gateways))


@pytest.mark.parametrize("overlay", SERVING)
def test_every_replica_finds_room_on_the_nodes(overlay: str) -> None:
    args = arguments(yaml.safe_load(serve_file(overlay).read_text()))
    check_serving(overlay, args)
    model = args.models[0]
    more = replace(args, models=[replace(model, replicas=9)])
    with pytest.raises(ClusterTooSmall):
        check_serving(overlay, more)


@pytest.mark.parametrize("overlay", JOBS)
def test_a_job_finds_room_on_the_nodes_that_it_begins_with(overlay: str) -> None:
    (job,) = [o for o in render(overlay) if o["kind"] == "RayJob"]
    words = job["spec"]["entrypoint"].split()
    workers = int(words[words.index("--workers") + 1]) if "--workers" in words else 1
    topology = Topology(processes=workers, gpus_per_rank=int(overlay.startswith("gpu")), noun="workers")
    topology.check(nodes([*node_groups(job)], least=True), spare_cpus=1)


@pytest.mark.parametrize("overlay", JOBS)
def test_only_a_job_that_goes_on_where_it_was_starts_again(overlay: str) -> None:
    (job,) = [o for o in render(overlay) if o["kind"] == "RayJob"]
    assert (job["spec"]["backoffLimit"] > 0) is overlay.endswith("/sweep")
    assert "--overwrite" not in job["spec"]["entrypoint"], "it would begin anew"


@pytest.mark.parametrize("overlay", [name for name in JOBS if name.startswith("gpu")])  # one base for all
def test_a_job_runs_a_command_that_there_is(overlay: str) -> None:
    (job,) = [o for o in render(overlay) if o["kind"] == "RayJob"]
    python, script, *words = job["spec"]["entrypoint"].split()
    assert python == "python"
    done = subprocess.run(
        [sys.executable, ROOT / script, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"COLUMNS": "200", "PATH": "", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    assert {word for word in words if word.startswith("--")} <= {*done.stdout.split()}
    written = [word for word in words if word.startswith(("/", "s3://"))]
    mounts = [m["mountPath"] for group in node_groups(job) for m in group.container["volumeMounts"]]
    places = ["s3://bucket"] if overlay.startswith("gpu-object-storage") else mounts
    assert written and all(any(word.startswith(f"{place}/") for place in places) for word in written)
