"""The alerts fire when they should, and not before: `promtool test rules` on series made up for each."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from observed_service import RULES, rule_file

MODEL = '{model="tiny"}'
REPLICA = '{model="tiny",replica="r1"}'
HOURS_26 = 26 * 60
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no `promtool` program here")

# alert: its series, a minute a value, while all is well and when it is not; the minute at which it fires
CASES: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
    "MbdNoReplica": (
        {
            f"ray_mbd_least_replicas{MODEL}": "1x30",
            f"ray_mbd_num_requests_running{MODEL}": "0x30",
            'ray_mbd_least_replicas{model="rests"}': "0x30",  # `min: 0`, and nothing is asked of it
            'ray_mbd_request_lost_replicas_total{model="rests"}': "0x30",
            'ray_mbd_request_lost_replicas_total{model="adapter"}': "0x30",  # its engine is its model's
        },
        {f"ray_mbd_least_replicas{MODEL}": "1x30", f"ray_mbd_num_requests_running{MODEL}": "0x4 stale"},
        12,
    ),
    "MbdDown": (
        {f"ray_mbd_request_lost_replicas_total{MODEL}": "0x30"},
        {f"ray_mbd_request_lost_replicas_total{MODEL}": "0x4 stale"},
        12,
    ),
    "MbdQueueGrowing": (
        {f"ray_mbd_num_requests_waiting{MODEL}": "20x30"},
        {f"ray_mbd_num_requests_waiting{MODEL}": "1 1 1 1 1 1 2 4 6 9 13 18 24 31 39 48 58 69 81 94 108"},
        18,
    ),
    "MbdKvCacheNearlyFull": (
        {f"ray_mbd_kv_cache_usage_perc{REPLICA}": "0.99x30", f"ray_mbd_num_preemptions_total{REPLICA}": "7x30"},
        {f"ray_mbd_kv_cache_usage_perc{REPLICA}": "0.99x30", f"ray_mbd_num_preemptions_total{REPLICA}": "0+3x30"},
        15,
    ),
    "MbdErrors": (
        {
            'ray_mbd_request_errors_total{model="tiny",status="500"}': "0+1x30",
            'ray_mbd_request_errors_total{model="tiny",status="429"}': "0+90x30",
            f"ray_mbd_request_success_total{MODEL}": "0+60x30",
        },
        {
            'ray_mbd_request_errors_total{model="tiny",status="500"}': "0+10x30",
            f"ray_mbd_request_success_total{MODEL}": "0+60x30",
        },
        15,
    ),
    "MbdTokensPerForwardDrop": (
        {
            f"ray_mbd_committed_tokens_total{MODEL}": f"0+400x{HOURS_26}",
            f"ray_mbd_sequence_forwards_total{MODEL}": f"0+100x{HOURS_26}",
        },
        {
            f"ray_mbd_committed_tokens_total{MODEL}": f"0+400x{HOURS_26 - 60} {400 * (HOURS_26 - 60)}+200x60",
            f"ray_mbd_sequence_forwards_total{MODEL}": f"0+100x{HOURS_26}",
        },
        HOURS_26,
    ),
    "MbdReplicasLost": (
        {f"ray_mbd_request_lost_replicas_total{MODEL}": "5x30"},
        {f"ray_mbd_request_lost_replicas_total{MODEL}": "0x5 3x20"},
        7,
    ),
}


def rules() -> dict[str, Any]:
    (group,) = yaml.safe_load((RULES / "alerts.yaml").read_text())["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_every_alert_has_its_case() -> None:
    assert set(CASES) == set(rules())


@needs_promtool
@pytest.mark.parametrize("manifest", ["alerts.yaml", "vllm-names/recordings.yaml"])
def test_prometheus_accepts_the_rules(manifest: str, tmp_path: Path) -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", str(rule_file(RULES / manifest, tmp_path))], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stdout


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
@pytest.mark.parametrize("fires", [False, True])
def test_an_alert_fires_when_it_should(alert: str, fires: bool, tmp_path: Path) -> None:
    well, ill, minute = CASES[alert]
    series = [{"series": name, "values": values} for name, values in (ill if fires else well).items()]
    # without labels and annotations, which are not what is tested here
    rule = {key: rules()[alert][key] for key in ("alert", "expr", "for") if key in rules()[alert]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    labels = {"MbdDown": {}, "MbdKvCacheNearlyFull": {"model": "tiny", "replica": "r1"}}.get(alert, {"model": "tiny"})
    case = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    {
                        "eval_time": f"{minute}m",
                        "alertname": alert,
                        "exp_alerts": [{"exp_labels": labels}] if fires else [],
                    }
                ],
            }
        ],
    }
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case))
    tested = subprocess.run(
        ["promtool", "test", "rules", "case.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
