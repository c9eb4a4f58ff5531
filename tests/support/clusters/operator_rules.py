"""What the operator for Ray refuses beyond its schemas, rule by rule: an object's breaches as sentences."""

import re
from collections.abc import Iterator
from typing import Any

from manifests import Object, node_groups, ray_cluster_spec

LONGEST_NAME = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
TOKENS_SINCE = (2, 52)
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035
DURATION = re.compile(r"\d+|(\d+(\.\d+)?(h|m|s|ms))+")


def breaches(manifest: Object) -> list[str]:
    """Nothing for an object that the operator takes."""
    if manifest["kind"] not in LONGEST_NAME:
        return []
    sentences = [*_names(manifest), *_nodes(manifest)]
    spec = ray_cluster_spec(manifest)
    if spec is not None:
        sentences += [*_authentication(spec), *_autoscaling(spec), *_fault_tolerance(manifest, spec)]
    sentences += {"RayJob": _job, "RayService": _service}.get(manifest["kind"], lambda _: [])(manifest)
    return sentences


def _names(manifest: Object) -> Iterator[str]:
    name, kind = manifest["metadata"]["name"], manifest["kind"]
    if len(name) > LONGEST_NAME[kind] or not LABEL.fullmatch(name):
        yield f"the name {name} of a {kind} is no DNS label of at most {LONGEST_NAME[kind]} characters"


def _nodes(manifest: Object) -> Iterator[str]:
    for group in node_groups(manifest):
        parameters = group.group.get("rayStartParams", {})
        if any(not isinstance(value, str) for value in parameters.values()):
            yield f"{group.name}: rayStartParams are strings"
        if group.group.get("resources") and parameters.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
            yield f"{group.name}: resources stand in rayStartParams or in resources, not in both"
        if "labels" in parameters:
            yield f"{group.name}: labels do not stand in rayStartParams"
        if not group.least <= group.group.get("replicas", group.least) <= group.most:
            yield f"{group.name}: replicas do not lie between minReplicas and maxReplicas"


def _authentication(spec: Object) -> Iterator[str]:
    if spec.get("authOptions", {}).get("mode") == "token":
        version = spec.get("rayVersion", "")
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            yield "authOptions.mode token needs rayVersion"
        elif tuple(map(int, version.split(".")[:2])) < TOKENS_SINCE:
            yield "authOptions.mode token needs Ray 2.52"


def _autoscaling(spec: Object) -> Iterator[str]:
    head = spec["headGroupSpec"]["template"]["spec"]
    environment = {e["name"] for e in head["containers"][0].get("env", [])}
    version = spec.get("autoscalerOptions", {}).get("version")
    if not spec.get("enableInTreeAutoscaling"):
        if version or "RAY_enable_autoscaler_v2" in environment:
            yield "the autoscaler's version is set, and enableInTreeAutoscaling is not"
        return
    if version and "RAY_enable_autoscaler_v2" in environment:
        yield "the autoscaler's version stands twice"
    pods = [head, *(group["template"]["spec"] for group in spec["workerGroupSpecs"])]
    if version == "v2" and any(pod.get("restartPolicy", "Never") != "Never" for pod in pods):
        yield "autoscaler v2 needs restartPolicy Never, or none"
    if any(group.get("suspend") for group in spec["workerGroupSpecs"]):
        yield "a group of workers is suspended under the autoscaler"


def _fault_tolerance(manifest: Object, spec: Object) -> Iterator[str]:
    options = spec.get("gcsFaultToleranceOptions")
    head = spec["headGroupSpec"]
    environment = {e["name"] for e in head["template"]["spec"]["containers"][0].get("env", [])}
    if environment & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}:
        yield "Redis stands in the head's environment, not in gcsFaultToleranceOptions"
    if head.get("rayStartParams", {}).keys() & {"redis-password", "redis-username"}:
        yield "Redis stands in rayStartParams, not in gcsFaultToleranceOptions"
    annotations = manifest["metadata"].get("annotations", {})
    if options and annotations.keys() & {"ray.io/ft-enabled", "ray.io/external-storage-namespace"}:
        yield "fault tolerance stands in an annotation and in gcsFaultToleranceOptions"
    if options and manifest["kind"] == "RayService" and "externalStorageNamespace" in options:
        yield "the two clusters of an upgrade would share one externalStorageNamespace"


def _job(manifest: Object) -> Iterator[str]:
    spec: dict[str, Any] = manifest["spec"]
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "suspend needs shutdownAfterJobFinishes"
    if bool(spec.get("clusterSelector")) == bool(spec.get("rayClusterSpec")):
        yield "a RayJob has either rayClusterSpec or clusterSelector"
    if spec.get("submissionMode") == "SidecarMode" and "submitterPodTemplate" in spec:
        yield "SidecarMode takes no submitterPodTemplate"
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(field, 1) <= 0:
            yield f"{field} is positive"
    # `ray job submit` joins the words again, and a shell reads them
    if re.search(r"""[;&|<>$`'"()]""", spec["entrypoint"]):
        yield "the entrypoint has characters that a shell reads a second time"


def _service(manifest: Object) -> Iterator[str]:
    spec = manifest["spec"]
    timeout = manifest["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", "1")
    if not DURATION.fullmatch(timeout):
        yield f"ray.io/initializing-timeout {timeout} is no duration"
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type") not in (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield f"upgradeStrategy.type {strategy['type']} is unknown"
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        options = strategy.get("clusterUpgradeOptions", {})
        if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
            yield "an incremental upgrade needs the autoscaler"
        if not options.get("gatewayClassName"):
            yield "an incremental upgrade needs a gatewayClassName"
        if not (0 <= options.get("stepSizePercent", -1) <= 100 and 0 <= options.get("maxSurgePercent", 100) <= 100):
            yield "stepSizePercent and maxSurgePercent lie between 0 and 100"
        if options.get("intervalSeconds", 0) <= 0:
            yield "intervalSeconds is positive"
