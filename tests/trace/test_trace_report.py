"""The report on traces: read or recorded; bad input is one sentence, and an existing target is kept."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulated_trace import simulate

from jobs import trace_report
from mbd_core.checkpoint.folder import read_folder
from mbd_core.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

PROMPTS = (11, 8, 20, 3, 17)


@pytest.mark.usefixtures("rendered_pictures")
def test_report_of_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(1, prompts=PROMPTS).write(tmp_path / "one.parquet")
    simulate(4, prompts=PROMPTS).write(tmp_path / "two.parquet")
    out = tmp_path / "out"
    arguments = [f"SingleBD={tmp_path / 'one.parquet'}", str(tmp_path / "two.parquet"), "--out", str(out)]
    assert trace_report.main([*arguments, "--request", "r3"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert [run["name"] for run in report["runs"]] == ["SingleBD", "two"]
    assert report["runs"][0]["tpf"] < report["runs"][1]["tpf"]
    for name in (*report["plots"], "report.md", "replay.html"):
        assert (out / name).stat().st_size > 1000
    assert "| store-only forwards |" in capsys.readouterr().out
    other = [*arguments[:-1], str(tmp_path / "other"), "--request", "r9"]
    assert trace_report.main(other) == 2
    assert "has no request 'r9'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_model_is_loaded_once(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffer size that the model recommends is read from its configuration, and both methods share the weights."""
    num_models, build = 0, Decoder.__init__

    def counted(self: Decoder, *args: Any, **kwargs: Any) -> None:
        nonlocal num_models
        num_models += 1
        build(self, *args, **kwargs)

    read_folder(tiny_model_dir)  # from now on the shapes of its tensors are known without a model
    monkeypatch.setattr(Decoder, "__init__", counted)
    argv = ["--model", str(tiny_model_dir), "--prompt", "2 + 3?", "--max-tokens", "8", "--out", str(tmp_path / "out")]
    assert trace_report.main(argv) == 0
    assert num_models == 1


def test_a_report_is_replaced_on_request_alone_and_a_users_folder_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(2, prompts=PROMPTS).write(tmp_path / "trace.parquet")
    out, users = tmp_path / "out", tmp_path / "users"
    users.mkdir()
    (users / "report.md").write_text("a user's")
    asked = [str(tmp_path / "trace.parquet"), "--out"]
    assert trace_report.main([*asked, str(out)]) == 0
    assert trace_report.main([*asked, str(out), "--overwrite"]) == 0
    monkeypatch.setattr("mbd_core.trace.traced_run.read_run", lambda *_, **__: pytest.fail("a trace was read"))
    for argv, sentence in (
        ([*asked, str(out)], "--overwrite"),
        ([*asked, str(users)], "was not written by this project"),
        ([*asked, str(users), "--overwrite"], "was not written by this project"),
        ([str(out / "report.json"), "--out", str(out), "--overwrite"], "which would be replaced"),
    ):
        assert trace_report.main(argv) == 2
        assert sentence in capsys.readouterr().err
    assert (out / "report.md").is_file()
    assert [p.name for p in users.iterdir()] == ["report.md"] and (users / "report.md").read_text() == "a user's"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "give traces to read, or --model"),
        (["a.parquet", "--model", "tiny-mbd"], "and not both"),
        (["a.parquet", "--prompt", "2 + 3?"], "--prompt has no meaning without --model"),
        (["a.parquet", "--draft-model", "tiny-bd"], "--draft-model has no meaning without --model"),
        (["--model", "tiny-mbd", "--draft-model", "smollm2"], "unknown model"),
        (["--model", "tiny-mbd", "--request", "r1"], "--request has no meaning with --model"),
        (["x=a.parquet", "x=b.parquet"], "two traces have the same name"),
        (["--model", "tiny-mbd", "--buffer-size", "1"], "is SingleBD itself"),
        (["--model", "tiny-mbd", "--decoding", "{"], "is not valid JSON"),
        (["--model", "tiny-mbd", "--decoding", '{"buffer_size": 2}'], "give --buffer-size instead"),
    ],
)
def test_a_bad_command_line_is_one_sentence(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace_report.main([*argv, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trace_report: ") and sentence in line
    assert not (tmp_path / "out").exists()


def test_report_of_a_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_model_dir), "--prompt", "2 + 3?", "--max-tokens", "20", "--out", str(tmp_path)]
    assert trace_report.main(arguments) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    single, multi = report["runs"]
    assert single["num_slots"] == 1 and multi["num_slots"] == 4 and single["block_size"] == multi["block_size"] == 4
    for name, run in (("SingleBD", single), ("MultiBD", multi)):
        assert run["num_forwards"] == report["settings"][f"{name} forwards"]
    assert (tmp_path / "replay.html").stat().st_size > 10_000


def test_report_of_two_models(large_model_dir: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The numbers and the page show drafts, what the large model confirmed and refused of them, and who drafted."""
    asked = ["--model", str(large_model_dir), "--draft-model", str(tiny_model_dir), "--prompt", "2 + 3?"]
    assert trace_report.main([*asked, "--max-tokens", "20", "--out", str(tmp_path / "two")]) == 0
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    names = [f"SingleBD, drafts of {tiny_model_dir.name}", f"MultiBD (buffer of 4), drafts of {tiny_model_dir.name}"]
    assert [run["name"] for run in report["runs"]] == names
    assert report["settings"]["draft model"] == tiny_model_dir.name
    assert all(run["block_size"] == 4 and run["num_judged"] > run["num_confirmed"] for run in report["runs"])
    page = (tmp_path / "two" / "replay.html").read_text()
    data = page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    for side, run, name in zip(json.loads(data)["sides"], report["runs"], names, strict=True):
        assert side["name"] == name and side["frames"][-1]["num_tokens"] == 20
        verdicts = [slot["verdict"] for frame in side["frames"] for slot in frame["slots"]]
        assert sum(verdict["judged"] for verdict in verdicts) == run["num_judged"]
        assert sum(len(verdict["confirmed"]) for verdict in verdicts) == run["num_confirmed"]
        assert any(verdict["refused"] for verdict in verdicts)
    mine = ["--methods", "verified-two-sizes", "--decoding", '{"buffer_size": 2}', "--max-tokens", "8"]
    assert trace_report.main([*asked, *mine, "--out", str(tmp_path / "mine")]) == 0
    (run,) = json.loads((tmp_path / "mine" / "report.json").read_text())["runs"]
    assert run["name"] == f"verified-two-sizes (buffer of 2), drafts of {tiny_model_dir.name}"


@pytest.mark.parametrize(
    "case", ["missing", "empty", "text", "columns", "type", "no rows", "folder", "slots", "state"]
)
def test_what_is_no_trace_is_one_sentence(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "t.parquet", simulate(2).table()
    state = table.column_names.index("state")
    tables = {
        "columns": table.drop_columns(["accepted"]),
        "type": table.set_column(state, "state", pa.array([1] * len(table))),
        "no rows": table.slice(0, 0),
        "slots": table.slice(1),
        "state": table.set_column(state, "state", pa.array(["ASLEEP"] * len(table))),
    }
    if case in tables:
        pq.write_table(tables[case], path)
    elif case == "folder":
        path.mkdir()
    elif case != "missing":
        path.write_text("no trace" if case == "text" else "")
    assert trace_report.main([str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trace_report: {path}: ") and len(error.splitlines()) == 1
    expected = {
        "missing": "there is no such",
        "empty": "not a Parquet file",
        "text": "not a Parquet file",
        "columns": "column 'accepted' is missing",
        "type": "column 'state' is int64",
        "no rows": "the trace is empty",
        "folder": "holds no trace parts",
        "slots": "request 'r0' lacks slots",
        "state": "state 'ASLEEP' is none of",
    }
    assert expected[case] in error
    assert not (tmp_path / "out").exists()
