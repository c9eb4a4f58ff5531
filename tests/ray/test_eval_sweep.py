"""The sweep job: every sample comes back graded and counted, and what cannot be run is refused in one sentence."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_endpoint import ANSWER, ScriptedEndpoint
from sweep_rows import planned_samples

from actors.evaluation import sweep as evaluation
from actors.evaluation.sweep import DecodeActor, RayExecutor
from cluster import local
from cluster.topology import ClusterTooSmall
from jobs.eval_sweep import main
from jobs.report_sweep import main as report_main
from mbd_core.decoding.blocks.config import DecodingConfig, read_decoding
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.evaluation.sweep.folder import read_report, read_samples
from mbd_core.evaluation.sweep.grading.part_grading import Grading, grade_table
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.storage.folder import Folder

ROOT = Path(__file__).resolve().parents[2]


def decoder(folder: Path, *names: str, tensor_parallel: int = 1) -> DecodeActor:
    models = dict.fromkeys(names or (folder.name,), str(folder))
    return DecodeActor(models, EngineConfig(max_rows=4, num_pages=128), tensor_parallel=tensor_parallel)


def test_two_ranks_decode_as_one_and_hold_one_model_at_a_time(tiny_model_dir: Path) -> None:
    table = planned_samples(["a", "b"], prompts=["How many?", "Tom has 3 pens."], buffer_sizes=[1, 4])
    one = decoder(tiny_model_dir, "a", "b").decode(table).to_pylist()
    parallel = decoder(tiny_model_dir, "a", "b", tensor_parallel=2)
    two = parallel.decode(table).to_pylist()
    parallel.close()
    for alone, cut in zip(one, two, strict=True):
        assert cut["error"] is None
        assert (cut["text"], cut["num_forwards"]) == (alone["text"], alone["num_forwards"])


def test_graphs_are_captured_before_the_first_sample(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never later: on a GPU a step without a graph runs kernel by kernel."""
    prepared: list[bool] = []

    def prepare(engine: Engine, decoding: DecodingConfig) -> int:
        prepared.append(engine.has_work)
        return 0

    monkeypatch.setattr(Engine, "prepare", prepare)
    actor = decoder(tiny_model_dir)
    assert len(actor.decode(planned_samples([tiny_model_dir.name], prompts=["How many?"]))) == 1
    assert prepared == [False]
    actor.close()


def test_a_request_that_cannot_be_served_keeps_its_row(tiny_model_dir: Path) -> None:
    table = planned_samples([tiny_model_dir.name], prompts=["How many?", "word " * 600])
    short, overlong = grade_table(decoder(tiny_model_dir).decode(table)).to_pylist()
    assert short["error"] is None
    assert short["num_forwards"] > 0
    assert "exceed the model's 512 positions" in overlong["error"]
    assert (overlong["correct"], overlong["reason"], overlong["text"]) == (False, "undecoded", None)


def test_a_sweep_accounts_for_every_sample(
    ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, trained_with in (("random-bd", "teacher_forcing"), ("random-mbd", "multitf")):
        shutil.copytree(tiny_model_dir, tmp_path / name)
        generation = tmp_path / name / "generation_config.json"
        generation.write_text(json.dumps({**json.loads(generation.read_text()), "trained_with": trained_with}))
    rows = [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "word " * 600, "answer": "#### 5"}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    command = ["--models", f"{tmp_path / 'random-bd'},{tmp_path / 'random-mbd'}", "--tasks", "gsm8k,code-mini"]
    command += ["--data", f"gsm8k={data}", "--limit", "2", "--max-tokens", "12", "--max-rows", "4", "--seed", "5"]
    command += ["--timed", "2", "--concurrency", "2"]
    command += ["--num-pages", "256", "--kv-memory-fraction", "0.5"]
    command += ["--methods", "single,multi,edit,dmax", "--method", 'edit={"t2t": {"max_edits": 2}, "buffer_size": 1}']
    command += ["--grid", "tau_m2t=0.0,0.9;buffer_size=2;t2t.tau=0.2", "--out", str(out)]

    assert main(command) == 0
    assert capsys.readouterr().err.count("random-bd: decoding.t2t was asked for") == 1

    samples = list(read_samples(out))
    keys = Counter((s["model"], s["method"], s["task"], s["problem_id"], s["config"]) for s in samples)
    assert set(keys.values()) == {1}
    assert len(keys) == 2 * 2 * 4 * 4
    assert {s["seed"] for s in samples} == {5}
    report = json.loads((out / "report.json").read_text())
    methods = {(row["model"], row["method"]) for row in report["rows"]}
    assert methods == {
        ("random-bd", "SingleBD"),
        ("random-bd", "MultiBD (training-free)"),
        ("random-mbd", "SingleBD"),
        ("random-mbd", "MBD"),
        *((model, method) for model in ("random-bd", "random-mbd") for method in ("edit", "dmax")),
    }
    assert len(report["rows"]) == 2 * 4 * 4
    parts = {(row["method"], str(row["config"]["t2t"]), str(row["config"]["soft"])) for row in report["rows"]}
    assert ("edit", "{'tau': 0.2, 'max_edits': 2}", "None") in parts
    assert ("dmax", "None", "{'stop_confidence': 0.9}") in parts
    for row in report["rows"]:
        of = [
            s
            for s in samples
            if (s["model"], s["method"], s["task"], json.loads(s["config"]))
            == (row["model"], row["method"], row["task"], row["config"])
        ]
        decoded = [s for s in of if s["error"] is None]
        assert row["n"] == len(of) == 2
        assert row["errors"] == 2 - len(decoded) == (row["task"] == "gsm8k")
        assert row["accuracy"] == 100 * sum(s["correct"] for s in of) / 2
        assert row["tpf_ratio_of_sums"] == pytest.approx(
            sum(s["num_tokens"] for s in decoded) / sum(s["num_forwards"] for s in decoded)
        )
        assert all(read_decoding(json.loads(s["config"])) == read_decoding(row["config"]) for s in of)
    timed = {(row["model"], row["method"], row["task"], str(row["config"])) for row in report["times"]}
    assert len(timed) == len(report["times"]) == 2 * 4 * 4
    assert {row["num_alone"] for row in report["times"] if row["task"] == "gsm8k"} == {1}, "the other cannot be served"
    assert {row["num_together"] for row in report["times"] if row["task"] != "gsm8k"} == {2}
    assert all(row["tps_batch_1"] > 0 and row["throughput"] > 0 for row in report["times"])
    assert len(report["aup"]) == 16
    assert all(len(aup["points"]) == 2 for aup in report["aup"])
    assert report["settings"]["tasks"]["gsm8k"]["n"] == 2
    engine = report["settings"]["engine"]
    assert (engine["max_rows"], engine["num_pages"], engine["kv_memory_fraction"]) == (4, 256, 0.5)
    text = (out / "report.md").read_text()
    assert "| MBD |" in text and "| random-bd | edit | GSM8K | tau_m2t=0.9 |" in text
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*.partial*"))


def sweep_command(folder: Path, out: Path | Folder) -> list[str]:
    command = ["--models", str(folder), "--tasks", "gsm-mini", "--methods", "single", "--max-tokens", "8"]
    return [*command, "--timed", "1", "--out", str(out)]


@pytest.mark.slow
def test_parts_and_shards_end_up_as_the_uninterrupted_sweep(
    ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep that lost a part and its report, and two shards that are joined."""
    out, size = tmp_path / "out", ["--limit", "6", "--max-rows", "3"]
    assert main([*sweep_command(tiny_model_dir, out), *size]) == 0
    whole = without_times(out)
    first, second = sorted((out / "samples").iterdir())
    kept = first.stat().st_ino
    second.unlink()
    assert main([*sweep_command(tiny_model_dir, out), *size]) == 0
    assert "1 of 2 parts are there" in capsys.readouterr().err
    assert first.stat().st_ino == kept
    assert without_times(out) == whole
    for index in (1, 2):
        assert main([*sweep_command(tiny_model_dir, tmp_path / str(index)), *size, "--shard", f"{index}/2"]) == 0
    joined = tmp_path / "joined"
    assert report_main([str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(joined)]) == 0
    assert without_times(joined) == whole


def without_times(folder: Path) -> dict[str, Any]:
    return {**read_report(folder), "times": []}


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_worker_and_no_half_row(tiny_model_dir: Path, tmp_path: Path) -> None:
    """SIGKILL once the first part is written; the same command then ends the sweep."""
    out = tmp_path / "out"
    command = [*sweep_command(tiny_model_dir, out), "--limit", "12", "--max-rows", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    script = [sys.executable, str(ROOT / "jobs" / "eval_sweep.py"), *command]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(script, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 240
        while not list((out / "samples").glob("part-*.parquet")) and driver.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
        children = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
        driver.kill()
        driver.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        written = {path.name: path.stat().st_ino for path in (out / "samples").glob("part-*.parquet")}
        again = subprocess.run(script, env=environment, stdout=log, stderr=log, check=False)
        assert again.returncode == 0, (tmp_path / "log").read_text()
    assert Counter(row["sample"] for row in read_samples(out)) == Counter(range(12))
    assert {name: (out / "samples" / name).stat().st_ino for name in written} == written


@pytest.mark.slow
def test_overwrite_replaces_a_sweep_and_no_file_of_the_user_s(
    ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = sweep_command(tiny_model_dir, out)
    assert main([*command, "--limit", "3"]) == 0
    assert main([*command, "--limit", "1"]) == 2
    assert "task 'gsm-mini' has 3 problems, not 1; give another folder, or --overwrite" in capsys.readouterr().err
    assert len(list(read_samples(out))) == 3
    assert main([*command, "--limit", "1", "--overwrite"]) == 0
    assert len(list(read_samples(out))) == 1

    (out / "samples" / "notes.txt").write_text("precious")
    assert main([*command, "--limit", "2", "--overwrite"]) == 2
    assert "samples/notes.txt in it was not written by this project" in capsys.readouterr().err
    assert (out / "samples" / "notes.txt").read_text() == "precious"
    assert len(list(read_samples(out))) == 1


def test_a_model_that_only_an_actor_can_refuse_is_one_sentence_and_exit_2(
    ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A KV memory below one page is known once the model is loaded."""
    command = ["--models", str(tiny_model_dir), "--tasks", "gsm-mini", "--limit", "1", "--out", str(tmp_path / "out")]
    assert main([*command, "--kv-memory-fraction", "1e-12"]) == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith("eval_sweep: model 'tiny-random': no KV page of")


@pytest.mark.slow
def test_a_sweep_that_fails_is_one_sentence_and_its_traceback_a_file(
    ray_cluster: Any,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grade_nothing(_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(evaluation, "process_part", grade_nothing)
    out = tmp_path / "out"
    command = [*sweep_command(tiny_model_dir, out), "--limit", "1", "--timed", "0"]
    assert main(command) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        f"eval_sweep: the sweep failed: OSError: no space left; what was computed lies in {out}, with the traceback "
        "in failure.txt; the same command computes the rest"
    )
    traceback = (out / "failure.txt").read_text()
    assert traceback.startswith("Traceback")
    assert "in grade_nothing" in traceback
    monkeypatch.undo()
    assert main(command) == 0
    assert not (out / "failure.txt").exists()


@pytest.mark.slow
def test_a_sweep_at_a_url_appears_part_by_part(
    ray_cluster: Any,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the storage does not take a file, the same command goes on with what it did take."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = Folder.at(f"memory://{tmp_path.name}/sweep")
    command = [*sweep_command(tiny_model_dir, out), "--limit", "8", "--max-rows", "4", "--timed", "0"]
    system, path = out.filesystem()
    put_file, put = system.put_file, list[str]()

    def fail_at_the_second_part(source: str, target: str) -> None:
        if "part-" in target and any("part-" in name for name in put):
            raise ConnectionError("the network is down")
        put.append(target)
        put_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(system, "put_file", fail_at_the_second_part)
        assert main(command) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        f"eval_sweep: {out} cannot be written: the network is down"
    )
    assert len(system.glob(f"{path}/samples/part-*")) == 1
    with pytest.raises(ValueError, match="was not written to its end"):
        out.fetch(tmp_path / "reports")

    assert main(command) == 0
    printed = capsys.readouterr()
    assert "1 of 2 parts are there" in printed.err and f"The report is in {out}" in printed.out
    fetched = out.fetch(tmp_path / "reports")
    assert Counter(row["sample"] for row in read_samples(fetched)) == Counter(range(8))
    assert main([*command, "--seed", "9"]) == 2
    assert "its seed is 0, not 9" in capsys.readouterr().err
    assert not list(tmp_path.glob("mbd-*"))


def test_a_target_that_cannot_be_written_is_told_before_a_cluster_starts(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "connect", lambda **_: pytest.fail("no cluster is needed for it"))
    command = ["--models", str(tiny_model_dir), "--tasks", "gsm-mini", "--limit", "1"]
    for out, sentence in (
        ("s4://bucket/sweep", "s4://bucket/sweep cannot be reached: unknown scheme 's4'; give a path, or a URL"),
        ("https://127.0.0.1:9/sweep", "https://127.0.0.1:9/sweep cannot be "),
    ):
        assert main([*command, "--out", out]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_endpoint_is_asked_by_the_job_and_graded_on_the_cluster(ray_cluster: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ScriptedEndpoint() as server:
        command = ["--endpoint", f"other={server.url}", "--tasks", "gsm-mini", "--limit", "40", "--max-tokens", "8"]
        assert main([*command, "--max-rows", "4", "--out", str(out)]) == 0
        assert len(server.bodies) == 40
    samples = list(read_samples(out))
    assert Counter(row["sample"] for row in samples) == Counter(range(40))
    assert {row["text"] for row in samples} == {ANSWER} and all(row["reason"] for row in samples)
    assert (read_report(out)["rows"][0]["tpf"], read_report(out)["times"]) == (None, [])


def test_engines_on_cpus_divide_the_memory_and_leave_a_cpu_for_grading(ray_cluster: Any, tiny_model_dir: Path) -> None:
    """The tests' cluster has 8 CPUs and no GPU."""
    options = SweepOptions(models=[str(tiny_model_dir)], tasks=["gsm-mini"], limit=1, tensor_parallel=2)
    sweep = plan_sweep(load_inputs(options))
    assert RayExecutor(sweep, Grading(), num_engines=1).engine == sweep.engine
    pool = RayExecutor(sweep, Grading(), num_engines=3)
    assert pool.engine.kv_memory_fraction == pytest.approx(sweep.engine.kv_memory_fraction / 3)
    assert (pool.topology.processes, pool.topology.bundle) == (3, {"CPU": 2, "GPU": 0})
    assert pool.cluster_cpus == 8
    sentence = (
        r"^4 x 2 tensor-parallel ranks need 2 CPUs .*, with 1 CPU to spare; the cluster's nodes have 8 CPUs; ask"
    )
    with pytest.raises(ClusterTooSmall, match=sentence):
        RayExecutor(sweep, Grading(), num_engines=4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--models": "none-such"}, "unknown model 'none-such'"),
        ({"--tasks": "gsm-mini,none-such"}, "unknown task 'none-such'; known: gsm-mini, code-mini"),
        ({"--methods": "double"}, "unknown method 'double'; known: single, multi"),
        ({"--grid": "tau=1"}, "there is no field tau"),
        ({"--grid": "t2t.tau=0.5"}, "grid field 't2t.tau' concerns none of the methods single, multi; define one"),
        (
            {"--methods": "single,d2f"},
            "method 'd2f' needs a model with full attention; 'tiny-random' has block_causal",
        ),
        ({"--method": 'c={"canvas": {}}'}, "method 'c' needs a model with full attention"),
        ({"--method": 'c={"t2t": {"tau": 2}}'}, "method 'c': t2t.tau=2 must be a number from 0 to 1"),
        ({"--method": "c={"}, "--method c: { is not valid JSON"),
        ({"--recipe": "none-such"}, "unknown recipe 'none-such'; known: own, bare, mbd-lms"),
        ({"--max-tokens": "512"}, "--max-tokens 512 cannot be honoured: model 'tiny-random' holds 512 positions"),
        ({"--tasks": "gsm8k"}, "task 'gsm8k' needs the file of its problems"),
        ({"--data": "gsm8k=rows.jsonl"}, "the task 'gsm8k' is not among --tasks"),
        ({"--data": "rows.jsonl"}, "takes no data file"),
        ({"--limit": "0"}, "--limit 0 must be a whole number of at least 1"),
        ({"--max-tokens": "0"}, "--max-tokens 0 must be a whole number of at least 1"),
        ({"--max-rows": "0"}, "--max-rows 0 must be a whole number of at least 1"),
        ({"--num-pages": "0"}, "--num-pages 0 must be a whole number of at least 2"),
        ({"--kv-memory-fraction": "1.5"}, "--kv-memory-fraction"),
        ({"--tasks": ","}, "--tasks names nothing"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_exit_2(
    change: dict[str, str], sentence: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--models": str(tiny_model_dir), "--tasks": "gsm-mini", "--out": str(tmp_path / "out"), **change}
    assert main([part for item in arguments.items() for part in item]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
