"""How many replicas a load asks for; and what Serve's controller gets of it, which may not know the project."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from actors.serving.args import ServingArgs
from actors.serving.replica import engine_replicas
from actors.serving.routing import PrefixRouter
from actors.serving.scaling import KV_LOAD, REQUESTS, TokenPolicy, replicas_wanted


def context(*, running: int, reported: dict[str, list[float]], requests: float = 0, queued: float = 0) -> Any:
    """What Serve tells a policy of `running` replicas that aim at 4 requests each."""
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="tiny",
        app_name="mbd",
        current_num_replicas=running,
        target_num_replicas=running,
        running_replicas=[],
        total_num_requests=requests,
        total_queued_requests=queued,
        aggregated_metrics={name: dict(enumerate(values)) for name, values in reported.items()},
        raw_metrics={},
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(
            min_replicas=0, max_replicas=8, target_ongoing_requests=4, upscale_delay_s=0, downscale_delay_s=0
        ),
    )


def test_the_larger_of_both_needs_counts() -> None:
    assert replicas_wanted(num_requests=12, target_requests=4, kv_loads=[0.1], target_kv_load=0.5) == 3
    assert replicas_wanted(num_requests=2, target_requests=4, kv_loads=[0.9, 1.1], target_kv_load=0.5) == 4
    assert replicas_wanted(num_requests=2, target_requests=4, kv_loads=[9.0], target_kv_load=None) == 0.5
    assert replicas_wanted(num_requests=0, target_requests=4, kv_loads=[0.0, 0.0], target_kv_load=0.5) == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"running": 1, "reported": {REQUESTS: [10.0], KV_LOAD: [0.2]}, "queued": 6.0}, 4),
        ({"running": 2, "reported": {REQUESTS: [1.0, 1.0], KV_LOAD: [0.9, 1.5]}}, 3),
        ({"running": 2, "reported": {}, "requests": 20.0}, 5),
        ({"running": 0, "reported": {}, "requests": 1.0, "queued": 1.0}, 1),
        ({"running": 1, "reported": {REQUESTS: [0.0], KV_LOAD: [0.0]}}, 0),
    ],
    ids=["engines and gateways", "kv memory", "nothing reported yet", "from none", "to none"],
)
def test_serve_gets_its_number_of_replicas(given: dict[str, Any], wanted: int) -> None:
    policy = _apply_autoscaling_config(TokenPolicy(target_kv_load=0.8))
    assert policy(context(**given))[0] == wanted


def test_those_who_only_ask_for_health_do_not_keep_the_last_replica() -> None:
    """Serve counts their calls: 0.02 requests on average. Its own policy would keep one replica for them for ever."""
    asked = context(running=1, requests=0.02, reported={REQUESTS: [0.0], KV_LOAD: [0.0]})
    assert _apply_autoscaling_config(TokenPolicy())(asked)[0] == 0


def args(**model: Any) -> ServingArgs:
    return ServingArgs.read({"device": "cpu", "models": [{"model": "tiny-bd", **model}]})


def options(**model: Any) -> Any:
    """The configuration that Serve gets for a model's replicas."""
    given = args(**model)
    return engine_replicas(given, given.models[0])._bound_deployment._deployment_config


def test_the_settings_reach_serve() -> None:
    replicas = {"min": 0, "max": 3, "target_requests": 5, "target_kv_load": 0.7, "window_seconds": 20}
    scaling = options(replicas=replicas | {"up_seconds": 1, "down_seconds": 2}).autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (0, 3, 5)
    assert (scaling.look_back_period_s, scaling.upscale_delay_s, scaling.downscale_delay_s) == (20, 1, 2)
    assert scaling.policy.policy_kwargs == {"target_kv_load": 0.7}
    assert scaling.policy.get_policy().__name__ == "TokenPolicy"
    with pytest.raises(ValueError, match="min=4 exceeds max=3"):
        args(replicas={"min": 4, "max": 3})


def test_the_controller_needs_nothing_of_the_project(tmp_path: Path) -> None:
    """The policy is unpickled and called in a process that cannot import `actors`."""
    policy = options(replicas={"max": 3, "target_kv_load": 0.5}).autoscaling_config.policy
    (tmp_path / "policy").write_bytes(policy.get_serialized_policy_def())
    program = f"""
import sys
from types import SimpleNamespace

from ray import cloudpickle
assert not any("actors" == name.partition(".")[0] for name in sys.modules)
policy = cloudpickle.load(open({str(tmp_path / "policy")!r}, "rb"))(target_kv_load=0.5)
config = SimpleNamespace(get_target_ongoing_requests=lambda: 4)
seen = SimpleNamespace(config=config, total_num_requests=8, total_queued_requests=0, aggregated_metrics={{}})
print(policy(seen)[0])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert done.stdout == "2.0\n", done.stderr


def test_prefixes_route_where_there_is_a_choice_and_a_cache() -> None:
    router = options(replicas=2, engine={"max_rows": 6, "page_size": 32}).request_router_config
    assert router.get_request_router_class().__name__ == PrefixRouter.__name__
    assert router.request_router_kwargs == {"page_size": 32, "balance": 3}
    for others in ({}, {"replicas": 2, "routing": "load"}, {"replicas": 2, "engine": {"prefix_caching": False}}):
        assert options(**others).request_router_config.get_request_router_class().__name__ != PrefixRouter.__name__
