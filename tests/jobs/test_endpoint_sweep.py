"""A sweep that asks endpoints, by its command: a foreign one, and one of this project beside a model folder."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from gateway_in_process import running_gateway
from scripted_endpoint import Answer, ScriptedEndpoint, completion
from sweep_cluster import Cluster, put_in_place

from actors.serving.args import ModelArgs, ServingArgs
from cluster import local
from jobs.eval_sweep import main
from jobs.report_sweep import main as report_main
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.endpoints import endpoint as endpoint_room
from mbd_core.evaluation.sweep.folder import read_report, read_samples
from mbd_core.tasks import gsm_mini

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

KEY = "sk-secret-7"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(endpoint_room.client_of, "__kwdefaults__", {"retries": 0})
    return put_in_place(monkeypatch)


@pytest.fixture
def server() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(key=KEY) as server:
        yield server


def asked(out: Path, *more: str) -> list[str]:
    options = ["--tasks", "gsm-mini", "--limit", "10", "--max-tokens", "32", "--max-rows", "2", "--timed", "0"]
    return [*options, "--out", str(out), *more]


def foreign(server: ScriptedEndpoint) -> list[str]:
    return ["--endpoint", f"other={server.url}", "--endpoint-key", "other=OTHER_KEY"]


def test_a_sweep_of_an_endpoint_asks_only_what_is_missing_and_says_no_key(
    cluster: Cluster,
    server: ScriptedEndpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTHER_KEY", KEY)
    right = {row["question"]: row["answer"] for row in islice(gsm_mini.generate(split="test", seed=0), 10)}

    def script(body: dict[str, Any]) -> Answer:
        if len(server.bodies) > 5:
            return 403, {}, {"error": {"message": "the quota is used up"}}
        question = body["messages"][-1]["content"]
        return 200, {}, completion(right[question])

    server.script = script
    out = tmp_path / "out"
    assert main(asked(out, *foreign(server))) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "answers 403: the quota is used up; what was computed is kept" in error
    before = {row["sample"] for row in read_samples(out)}
    assert 0 < len(before) < 10
    server.script = lambda body: (200, {}, completion(right[body["messages"][-1]["content"]]))
    server.bodies.clear()
    assert main(asked(out, *foreign(server))) == 0
    assert len(server.bodies) == 10 - len(before)
    samples = list(read_samples(out))
    assert sorted(row["sample"] for row in samples) == list(range(10))
    assert all(row["correct"] and row["num_tokens"] == 3 and row["num_forwards"] is None for row in samples)
    report = read_report(out)
    (row,) = report["rows"]
    assert (row["model"], row["method"], row["accuracy"], row["tpf"], row["nfe"]) == (
        *("other", "endpoint-default", 100, None, None),
    )
    assert row["num_tokens"] == 30 and report["aup"] == [] and row["token_efficiency"] is None
    (seconds,) = report["endpoint_seconds"]
    assert seconds["n"] == 10 and seconds["p50"] > 0 and seconds["p99"] is None
    text = (out / "report.md").read_text()
    assert "| *other (an endpoint)* |" in text and "## Endpoints" in text
    assert server.url in text, "where it was asked"
    assert '"tpf":null' in (out / "report.html").read_text().replace(" ", "")
    for path in out.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()
    server.bodies.clear()
    assert main(asked(out, *foreign(server))) == 0 and not server.bodies
    assert report_main([str(out)]) == 0


def test_what_an_endpoint_cannot_do_is_one_sentence_before_a_cluster_starts(
    server: ScriptedEndpoint,
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "connect", lambda **_: pytest.fail("no cluster is needed for it"))
    monkeypatch.setenv("OTHER_KEY", KEY)
    model = ["--models", str(tiny_model_dir)]
    for more, sentence in (
        ([], "nothing is to be swept: give --models, or --endpoint"),
        (["--endpoint", f"other={server.url}"], "wants a key: --endpoint-key NAME=VARIABLE (401)"),
        ([*foreign(server), "--methods", "single"], "its only method is endpoint-default; leave out --methods"),
        ([*foreign(server), "--grid", "tau_m2t=0.5"], "its only method is endpoint-default"),
        ([*foreign(server), "--write-best", "accuracy"], "model 'other', whose folder is not on this machine"),
        ([*foreign(server), *foreign(server)[:2]], "--endpoint other: two models are named so"),
        ([*foreign(server), *model, "--methods", "endpoint-default"], "is an endpoint's; --models are decoded here"),
        ([*foreign(server)[2:], *model], "with a NAME of --endpoint"),
    ):
        assert main(asked(tmp_path / "out", *more)) == 2
        error = capsys.readouterr().err
        assert sentence in error and len(error.splitlines()) == 1 and KEY not in error
    assert not (tmp_path / "out").exists()


def test_our_own_endpoint_takes_methods_and_says_what_an_engine_counts(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EngineConfig(max_rows=2, num_pages=128, buffer_size=4)
    args = ServingArgs(device="cpu", models=[ModelArgs(model=str(tiny_model_dir), name="tiny", engine=engine)])
    grid = ["--methods", "single,multi", "--grid", "tau_m2t=0.2;buffer_size=2", "--limit", "3"]
    with running_gateway(args) as (url, _):
        ours = ["--endpoint", f"served={url}/v1", "--models", str(tiny_model_dir)]
        assert main(asked(tmp_path / "out", *ours, *grid)) == 0
        capsys.readouterr()
        more = ["--endpoint", f"served={url}/v1#tiny", "--grid", "buffer_size=8"]
        assert main(asked(tmp_path / "wide", *more, "--methods", "multi")) == 2
        assert "with buffer_size=8 exceeds the 4 slots of endpoint 'served'" in capsys.readouterr().err
        assert main(asked(tmp_path / "full", *more[:2], "--methods", "single,d2f", "--grid", "buffer_size=2")) == 2
        assert "endpoint 'served' refuses decoding" in capsys.readouterr().err
        assert main(asked(tmp_path / "long", *more[:2], "--max-tokens", "512")) == 2
        assert "holds 512 positions, prompt and answer together" in capsys.readouterr().err
        assert main(asked(tmp_path / "default", *more[:2], "--methods", "endpoint-default", "--limit", "1")) == 0
    by_model: dict[str, dict[Any, Any]] = {}
    for row in read_samples(tmp_path / "out"):
        key = (row["problem_id"], json.loads(row["config"])["buffer_size"])
        counts = {name: row[name] for name in ("num_tokens", "num_forwards", "finish_reason", "correct")}
        text = row["text"].rstrip("\ufffd")  # the endpoint gives no part of a character
        by_model.setdefault(row["model"], {})[key] = (text, counts)
    assert len(by_model["served"]) == 6 and by_model["served"] == by_model[tiny_model_dir.name]
    report = read_report(tmp_path / "out")
    assert {row["tpf"] is None for row in report["rows"]} == {False} and len(report["aup"]) == 4
    assert {one["model"] for one in report["endpoint_seconds"]} == {"served"}
    (alone,) = read_samples(tmp_path / "default")
    assert alone["method"] == "endpoint-default" and alone["num_forwards"] > 0 and alone["config"] == "{}"
    assert read_report(tmp_path / "default")["rows"][0]["tpf"] is not None
