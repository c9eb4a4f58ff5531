"""What `kubectl apply -k` would send: every object against its schema, and the parts against each other."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from manifests import (
    BASE_SERVE_FILE,
    CRDS,
    OVERLAYS,
    ROOT,
    Object,
    environment,
    kubectl,
    node_groups,
    of_kind,
    overlay_names,
    pinned_versions,
    pod_specs,
    quantity,
    ray_cluster_spec,
    render,
    serve_file,
)
from resource_schemas import POD_MONITOR, core_errors, errors, ray_schemas

from actors.serving.proxy import CALLBACK, CALLBACK_VARIABLE
from actors.serving.replica import STOP_SECONDS
from actors.serving.serve import PROXY_CHECKS

DOCUMENT = ROOT / "k8s" / "README.md"
CORE = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")
PLACES = ("cpu-kind", "gpu", "gpu-object-storage")
SERVING = (*PLACES, "gpu-incremental")

each_overlay = pytest.mark.parametrize("overlay", overlay_names())


def ray_object(overlay: str) -> Object:
    (found,) = [o for o in render(overlay) if o["apiVersion"] == "ray.io/v1"]
    return found


def platform(overlay: str) -> list[Object]:
    """What lies under the clusters of an overlay's place."""
    return render(f"{re.split('-incremental|/', overlay)[0]}/platform")


def test_each_place_has_serving_jobs_and_a_cluster() -> None:
    folders = {f"{place}{part}" for place in PLACES for part in ("", "/platform", "/cluster", "/train", "/sweep")}
    assert {*overlay_names()} == folders | {"gpu-incremental"}


@each_overlay
def test_kinds_of_kubernetes_match_its_schemas(overlay: str) -> None:
    objects = render(overlay)
    known = [o for o in objects if o["apiVersion"] in CORE]
    assert {o["apiVersion"] for o in objects if o not in known} <= {"ray.io/v1", "monitoring.coreos.com/v1"}
    assert {o["metadata"]["name"]: found for o in known if (found := core_errors(o))} == {}
    for rendered in objects:
        for spec in pod_specs(rendered):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            assert core_errors(pod) == [], rendered["metadata"]["name"]


@each_overlay
def test_kinds_of_ray_match_the_definitions_of_the_operator(overlay: str) -> None:
    if not CRDS.is_dir():
        pytest.skip(f"the operator's definitions do not lie in {CRDS}")
    schemas = ray_schemas(CRDS)
    for rendered in render(overlay):
        if rendered["apiVersion"].startswith("ray.io/"):
            assert errors(schemas[rendered["apiVersion"], rendered["kind"]], rendered) == []


def test_an_unknown_field_of_a_ray_cluster_is_found() -> None:
    if not CRDS.is_dir():
        pytest.skip(f"the operator's definitions do not lie in {CRDS}")
    cluster = render("gpu/cluster")[0]
    pod = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    pod["tolerations"][0]["effekt"] = pod["tolerations"][0].pop("effect")
    cluster["spec"]["autoscalerOptions"]["version"] = "v3"
    found = errors(ray_schemas(CRDS)["ray.io/v1", "RayCluster"], cluster)
    assert len(found) == 2 and "v3" in found[0] and "effekt" in found[1]


def test_an_unknown_field_of_kubernetes_is_found() -> None:
    (budget,) = of_kind(render("gpu"), "PodDisruptionBudget")
    budget["spec"]["minAvailible"] = budget["spec"].pop("minAvailable")
    assert "minAvailible" in core_errors(budget)[0]


def test_prometheus_finds_every_metrics_port() -> None:
    (monitor,) = of_kind(render("gpu/platform"), "PodMonitor")
    assert errors(Draft202012Validator(POD_MONITOR), monitor) == []
    groups = [*node_groups(ray_object("gpu"))]
    ports = {port["name"] for group in groups for port in group.container["ports"]}
    watched = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert watched == {name for name in ports if name.endswith("metrics")}
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert all(wanted <= group.labels.items() for group in groups)


@each_overlay
def test_objects_lie_in_one_namespace_and_hold_no_secret(overlay: str) -> None:
    objects = render(overlay)
    assert {o["metadata"].get("namespace") for o in objects if o["kind"] != "Namespace"} == {"mbd"}
    assert not {o["kind"] for o in objects} & {"Secret", "ConfigMap"}
    for spec in (spec for rendered in objects for spec in pod_specs(rendered)):
        for variable in (v for container in spec["containers"] for v in container.get("env", [])):
            if re.search("PASSWORD|TOKEN|SECRET|KEY", variable["name"]):
                assert "value" not in variable, f"{variable['name']} stands in the manifest"


@each_overlay
def test_pods_run_as_a_user_and_keep_the_probes_of_the_operator(overlay: str) -> None:
    for rendered in render(overlay):
        for spec in pod_specs(rendered):
            assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
            for container in spec["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert {"requests", "limits"} <= container["resources"].keys()
        for group in node_groups(rendered):
            assert not group.container.keys() & {"livenessProbe", "readinessProbe", "startupProbe", "command"}


@each_overlay
def test_images_and_versions_are_those_of_the_lock(overlay: str) -> None:
    lock, project = pinned_versions(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    python = project["tool"]["mypy"]["python_version"].replace(".", "")
    device = "cpu" if overlay.startswith("cpu") else "gpu"
    version = project["project"]["version"]
    tag = f"{version}-ray{lock['ray']}-torch{lock['torch']}-py{python}-{device}"
    for rendered in render(overlay):
        if rendered["apiVersion"] == "ray.io/v1":
            images = {container["image"] for spec in pod_specs(rendered) for container in spec["containers"]}
            assert len(images) == 1 and images.pop().endswith(f"mbd-cluster:{tag}")
            assert re.findall(r"rayVersion': '([^']*)", str(rendered)) == [lock["ray"]]
    assert f"mbd-cluster:{tag}" in (ROOT / "k8s" / "Dockerfile").read_text()
    assert f"mbd-cluster:{tag}" in DOCUMENT.read_text()


@pytest.mark.parametrize("overlay", SERVING)
def test_the_service_serves_the_file_byte_for_byte(overlay: str) -> None:
    assert ray_object(overlay)["spec"]["serveConfigV2"].encode() == serve_file(overlay).read_bytes()


def test_each_place_serves_a_file_of_its_own() -> None:
    assert [serve_file(overlay).relative_to(ROOT / "k8s") for overlay in SERVING] == [
        Path("overlays/cpu-kind/serve.yaml"),
        Path("overlays/gpu/serve.yaml"),
        Path("overlays/gpu-object-storage/serve.yaml"),
        Path("overlays/gpu/serve.yaml"),
    ]


def test_serve_deploy_takes_what_the_pods_get_but_for_the_keys_of_their_secret() -> None:
    """The keys' file is in pods alone, and tests/k8s/test_serve_deploy.py deploys the base's config as it is."""
    pods, anywhere = (yaml.safe_load(path.read_text()) for path in (serve_file("cpu-kind"), BASE_SERVE_FILE))
    (application,) = pods["applications"]
    assert application["args"].pop("api_keys").startswith("/secrets/")
    assert pods == anywhere


@pytest.mark.parametrize("overlay", SERVING)
def test_a_pod_that_stops_lives_as_long_as_its_requests(overlay: str) -> None:
    config = yaml.safe_load(serve_file(overlay).read_text())
    (application,) = config["applications"]
    needed = application["args"]["drain_seconds"] + STOP_SECONDS
    for group in node_groups(ray_object(overlay)):
        drain = float(environment(group.container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert needed < drain < group.pod["terminationGracePeriodSeconds"] - 10
    assert config["http_options"]["request_timeout_s"] > application["args"]["request_seconds"]


@pytest.mark.parametrize("overlay", SERVING)
def test_every_proxy_has_our_middleware_and_health_checks(overlay: str) -> None:
    for group in node_groups(ray_object(overlay)):
        given = environment(group.container)
        assert given[CALLBACK_VARIABLE] == CALLBACK
        assert PROXY_CHECKS.items() <= given.items(), "a Ray of jobs/serve.py has the same"


@pytest.mark.parametrize("overlay", SERVING)
def test_what_is_referred_to_exists(overlay: str) -> None:
    below, service = platform(overlay), ray_object(overlay)
    claims = {c["metadata"]["name"] for c in of_kind(below, "PersistentVolumeClaim")}
    for group in node_groups(service):
        mounted = {mount["name"] for mount in group.container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group.pod["volumes"]}
        named = [v["persistentVolumeClaim"] for v in group.pod["volumes"] if not v.keys() & {"secret", "emptyDir"}]
        assert {volume["claimName"] for volume in named} <= claims
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] in {f"{s['metadata']['name']}:6379" for s in of_kind(below, "Service")}
    text, document = str([*below, service]), DOCUMENT.read_text()
    secrets = {
        *re.findall(r"'secretName': '([^']*)", text),
        *re.findall(r"'secretKeyRef': {[^}]*'name': '([^']*)", text),
    }
    secrets |= {*re.findall(r"'secretRef': {'name': '([^']*)", text)}
    assert secrets == {"mbd-ray-token", "mbd-redis", "mbd-storage", "mbd-api-keys"}
    assert {name for name in secrets if f"secret generic {name}" not in document} == set()
    assert f"--from-literal={options['redisPassword']['valueFrom']['secretKeyRef']['key']}=" in document


def test_without_a_shared_volume_all_that_is_kept_has_a_url() -> None:
    """And everything else is as on the cluster with one."""
    place, shared = "gpu-object-storage", "gpu"
    for part in ("", "/platform", "/cluster", "/train", "/sweep"):
        assert of_kind(render(place + part), "PersistentVolumeClaim") == []
        assert "persistentVolumeClaim" not in str(render(place + part))
    for part in ("train", "sweep"):
        command, other = (str(ray_object(f"{of}/{part}")["spec"]["entrypoint"]) for of in (place, shared))
        assert command.replace("s3://bucket/", "/data/") == other != command
    ours, theirs = (yaml.safe_load(serve_file(overlay).read_text()) for overlay in (place, shared))
    (model,) = ours["applications"][0]["args"]["models"]
    model["model"] = model["model"].replace("s3://bucket/", "/data/")
    assert ours == theirs
    for group in node_groups(ray_object(place)):
        assert {"name": "data", "emptyDir": {}} in group.pod["volumes"]
        assert environment(group.container)["XDG_CACHE_HOME"].startswith("/data/"), "copies of models lie on its disk"


def test_the_head_computes_nothing_and_gets_no_requests() -> None:
    service = ray_object("gpu")
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    head, *workers = node_groups(service)
    assert head.resources["CPU"] == 0 and all(worker.resources["CPU"] > 0 for worker in workers)
    assert not any(worker.pod["automountServiceAccountToken"] for worker in workers)


@pytest.mark.parametrize("overlay", ["gpu", "gpu/train", "gpu/cluster"])
def test_gpu_pods_get_what_they_ask_for(overlay: str) -> None:
    for group in node_groups(ray_object(overlay)):
        resources = group.container["resources"]
        assert resources["requests"] == resources["limits"]


@each_overlay
def test_requests_do_not_exceed_limits(overlay: str) -> None:
    for spec in (spec for rendered in render(overlay) for spec in pod_specs(rendered)):
        for resources in (container["resources"] for container in spec["containers"]):
            for kind, requested in resources["requests"].items():
                assert quantity(requested) <= quantity(resources["limits"][kind])


@pytest.mark.parametrize("place", PLACES)
def test_the_network_policy_is_about_every_pod_of_ray(place: str) -> None:
    (policy,) = [
        p for p in of_kind(render(f"{place}/platform"), "NetworkPolicy") if p["metadata"]["name"] == "mbd-ray"
    ]
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for overlay in (place, f"{place}/cluster", f"{place}/train", f"{place}/sweep"):
        rendered = ray_object(overlay)
        assert all(selected <= group.labels.items() for group in node_groups(rendered))
        if rendered["kind"] == "RayJob":  # the submitter reaches the dashboard as one of them
            assert selected <= rendered["spec"]["submitterPodTemplate"]["metadata"]["labels"].items()
    among, operator, clients, prometheus = policy["spec"]["ingress"]
    assert "ports" not in among and among["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    port = yaml.safe_load(serve_file(place).read_text())["http_options"]["port"]
    assert [p["port"] for p in clients["ports"]] == [port] and port in [p["port"] for p in operator["ports"]]
    groups = [*node_groups(ray_object(place))]
    metrics = {p["containerPort"] for g in groups for p in g.container["ports"] if p["name"].endswith("metrics")}
    assert {p["port"] for p in prometheus["ports"]} == metrics
    for rule in (operator, clients, prometheus):
        assert all("namespaceSelector" in source and "ipBlock" not in source for source in rule["from"])


def test_the_gateway_of_an_incremental_upgrade_reaches_the_endpoint_and_only_clients_reach_it() -> None:
    """The operator names it after the RayService, in its namespace; the gateway class labels its pods so."""
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(render("gpu-incremental"), "NetworkPolicy")}
    pods = {
        "matchLabels": {"gateway.networking.k8s.io/gateway-name": f"{ray_object('gpu')['metadata']['name']}-gateway"}
    }
    (_, workers) = node_groups(ray_object("gpu-incremental"))
    to_endpoint, to_gateway = policies["mbd-from-gateway"], policies["mbd-gateway"]
    given = workers.labels.items() | {("ray.io/node-type", "worker")}  # the operator's own label
    assert to_endpoint["podSelector"]["matchLabels"].items() <= given
    assert to_endpoint["ingress"] == [{"from": [{"podSelector": pods}], "ports": [{"protocol": "TCP", "port": 8000}]}]
    assert to_gateway["podSelector"] == pods
    assert to_gateway["ingress"][0]["from"] == [{"namespaceSelector": {"matchLabels": {"mbd-client": "true"}}}]


@pytest.mark.parametrize("overlay", ["gpu", "gpu-incremental"])
def test_on_gpus_no_single_pod_is_the_endpoint(overlay: str) -> None:
    (application,) = yaml.safe_load(ray_object(overlay)["spec"]["serveConfigV2"])["applications"]
    (_, workers) = node_groups(ray_object(overlay))
    fit = workers.resources["GPU"] // application["args"]["models"][0]["tensor_parallel"]
    assert application["args"]["models"][0]["replicas"]["min"] > fit, "they lie on several pods"
    assert workers.least >= 2 and application["args"]["gateways"] >= 2
    (spread,) = workers.pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= workers.labels.items()


@pytest.mark.parametrize("overlay", SERVING)
def test_the_endpoint_serves_nobody_without_a_key(overlay: str) -> None:
    """The file of keys is a secret's, in the pods that serve and in no others: a job's may run programs of models."""
    (application,) = yaml.safe_load(ray_object(overlay)["spec"]["serveConfigV2"])["applications"]
    file = Path(application["args"]["api_keys"])
    head, workers = node_groups(ray_object(overlay))
    (mount,) = [m for m in workers.container["volumeMounts"] if m["name"] == "api-keys"]
    assert mount["readOnly"] and Path(mount["mountPath"]) == file.parent
    assert {"name": "api-keys", "secret": {"secretName": "mbd-api-keys"}} in workers.pod["volumes"]
    assert f"--from-file={file.name}=" in DOCUMENT.read_text()
    place = overlay.removesuffix("-incremental")
    jobs = [group for part in ("train", "sweep", "cluster") for group in node_groups(ray_object(f"{place}/{part}"))]
    assert "mbd-api-keys" not in str([group.pod for group in (head, *jobs)])


@each_overlay
def test_no_manifest_opens_a_port_to_the_outside_and_ray_asks_for_its_token(overlay: str) -> None:
    """The dashboard and the job API run any code: only the cluster's own network leads there, with the token."""
    objects = render(overlay)
    assert not [o for o in objects if o["kind"] in ("Ingress", "HTTPRoute", "Gateway", "Route")]
    for service in of_kind(objects, "Service"):
        assert service["spec"].get("type", "ClusterIP") in ("ClusterIP", "ExternalName")
    for rendered in objects:
        if (spec := ray_cluster_spec(rendered)) is not None:
            assert spec["authOptions"] == {"mode": "token", "secretName": "mbd-ray-token"}
            assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
            assert "enableIngress" not in str(spec)
        for pod in pod_specs(rendered):
            assert not pod.get("hostNetwork")
            assert not any("hostPort" in port for c in pod["containers"] for port in c.get("ports", ()))


@pytest.mark.parametrize("overlay", SERVING)
def test_the_disruption_budget_is_about_pods_that_serve(overlay: str) -> None:
    (budget,) = of_kind(render(overlay), "PodDisruptionBudget")
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    given = {"ray.io/serve": "true", "ray.io/node-type": "worker"}.items()  # the operator's own labels
    (_, workers) = node_groups(ray_object(overlay))
    assert wanted <= workers.labels.items() | given


def test_alerts_and_dashboard_are_taken_as_the_page_says(tmp_path: Path) -> None:
    """The line of k8s/README.md in the platform of a copy: the rules and the dashboard come with it."""
    assert "- ../../../observability" in DOCUMENT.read_text()
    shutil.copytree(OVERLAYS.parent, tmp_path / "k8s")
    file = tmp_path / "k8s" / "overlays" / "gpu" / "platform" / "kustomization.yaml"
    text = file.read_text()
    file.write_text(text.replace("components:\n", "components:\n- ../../../observability\n"))
    assert file.read_text() != text
    done = subprocess.run([kubectl(), "kustomize", str(file.parent)], capture_output=True, text=True, check=True)
    kinds = {o["kind"]: o for o in yaml.safe_load_all(done.stdout)}
    (group,) = kinds["PrometheusRule"]["spec"]["groups"]
    assert {rule["alert"] for rule in group["rules"]} > {"MbdDown", "MbdNoReplica"}
    assert kinds["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert {o["metadata"].get("namespace") for kind, o in kinds.items() if kind != "Namespace"} == {"mbd"}


def test_no_folder_is_left_out() -> None:
    used = {f.parent for f in OVERLAYS.rglob("kustomization.yaml")}
    assert {f.parent for f in OVERLAYS.rglob("*.yaml")} <= used
