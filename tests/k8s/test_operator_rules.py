"""Every rendered object keeps the operator's rules, and each rule finds its breach."""

from collections.abc import Callable
from typing import Any

import pytest
from manifests import Object, overlay_names, render
from operator_rules import breaches


@pytest.mark.parametrize("overlay", overlay_names())
def test_the_operator_takes_every_object(overlay: str) -> None:
    assert {o["metadata"]["name"]: found for o in render(overlay) if (found := breaches(o))} == {}


def put(path: str, value: Any) -> Callable[[Object], None]:
    """Sets a field of an object; `value` None removes it."""

    def change(rendered: Object) -> None:
        *folders, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        for folder in folders:
            rendered = rendered[folder]
        if value is None:
            del rendered[last]
        else:
            rendered[last] = value

    return change


SERVICE, CLUSTER, TRAIN, UPGRADE = "gpu", "gpu/cluster", "gpu/train", "gpu-incremental"
CONFIG, WORKERS = "spec/rayClusterConfig", "spec/rayClusterConfig/workerGroupSpecs/0"
HEAD = f"{CONFIG}/headGroupSpec"
BROKEN = [
    (CLUSTER, put("metadata/name", "m" * 54), "53 characters"),
    (TRAIN, put("metadata/name", "m" * 48), "47 characters"),
    (SERVICE, put("metadata/name", "9-mbd"), "DNS label"),
    (SERVICE, put(f"{WORKERS}/minReplicas", 5), "between minReplicas"),
    (SERVICE, put(f"{WORKERS}/replicas", 9), "between minReplicas"),
    (SERVICE, put(f"{HEAD}/rayStartParams", {"num-cpus": 0}), "are strings"),
    (SERVICE, put(f"{HEAD}/resources", {"CPU": "1"}), "not in both"),
    (SERVICE, put(f"{HEAD}/rayStartParams", {"labels": "a=b"}), "labels"),
    (SERVICE, put(f"{CONFIG}/rayVersion", None), "needs rayVersion"),
    (SERVICE, put(f"{CONFIG}/rayVersion", "2.51.0"), "needs Ray 2.52"),
    (SERVICE, put(f"{CONFIG}/enableInTreeAutoscaling", False), "enableInTreeAutoscaling is not"),
    (SERVICE, put(f"{WORKERS}/template/spec/restartPolicy", "Always"), "restartPolicy"),
    (SERVICE, put(f"{WORKERS}/suspend", True), "suspended"),
    (SERVICE, put(f"{HEAD}/template/spec/containers/0/env", [{"name": "RAY_enable_autoscaler_v2"}]), "stands twice"),
    (SERVICE, put(f"{HEAD}/template/spec/containers/0/env", [{"name": "REDIS_PASSWORD"}]), "environment"),
    (SERVICE, put(f"{HEAD}/rayStartParams", {"redis-password": "x"}), "rayStartParams"),
    (SERVICE, put("metadata/annotations", {"ray.io/ft-enabled": "true"}), "annotation"),
    (SERVICE, put(f"{CONFIG}/gcsFaultToleranceOptions/externalStorageNamespace", "mbd"), "share one"),
    (TRAIN, put("spec/shutdownAfterJobFinishes", False), "ttlSecondsAfterFinished"),
    (TRAIN, put("spec/clusterSelector", {"ray.io/cluster": "mbd"}), "either"),
    (TRAIN, put("spec/submissionMode", "SidecarMode"), "SidecarMode"),
    (TRAIN, put("spec/activeDeadlineSeconds", 0), "is positive"),
    (TRAIN, put("spec/entrypoint", "python x.py --grid a=1;b=2"), "second time"),
    (SERVICE, put("metadata/annotations", {"ray.io/initializing-timeout": "soon"}), "no duration"),
    (SERVICE, put("spec/upgradeStrategy/type", "Rolling"), "unknown"),
    (UPGRADE, put("spec/upgradeStrategy/clusterUpgradeOptions/gatewayClassName", ""), "gatewayClassName"),
    (UPGRADE, put("spec/upgradeStrategy/clusterUpgradeOptions/stepSizePercent", 101), "between 0 and 100"),
    (UPGRADE, put("spec/upgradeStrategy/clusterUpgradeOptions/intervalSeconds", 0), "intervalSeconds"),
    (UPGRADE, put(f"{CONFIG}/enableInTreeAutoscaling", False), "needs the autoscaler"),
]


@pytest.mark.parametrize(("overlay", "change", "sentence"), BROKEN, ids=[sentence for *_, sentence in BROKEN])
def test_a_breach_is_found(overlay: str, change: Callable[[Object], None], sentence: str) -> None:
    (rendered,) = [o for o in render(overlay) if o["apiVersion"] == "ray.io/v1"]
    change(rendered)
    assert any(sentence in found for found in breaches(rendered)), breaches(rendered)
