"""The demo refuses to replace what it did not write, before it starts a cluster, and speaks to a newcomer."""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import demo


@pytest.mark.parametrize("name", ["trained", "sweep"])
def test_a_folder_of_the_user_s_is_refused_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.local.local_cluster", lambda: pytest.fail("a cluster was started"))
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    assert demo.main(["--out", str(tmp_path)]) == 2
    assert f"{tmp_path / name} exists already and was not written by this project" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name / "notes.txt"]
    assert (tmp_path / name / "notes.txt").read_text() == "precious"


def report_rows() -> list[dict[str, Any]]:
    accuracy = {("ledger-bd", 1): 80.0, ("ledger-bd", 4): 28.0, ("ledger-mbd", 1): 78.0, ("ledger-mbd", 4): 54.0}
    return [
        {"model": model, "config": {"buffer_size": slots, "tau_m2t": tau}, "accuracy": value - tau, "tpf": 2.0 * slots}
        for (model, slots), value in accuracy.items()
        for tau in demo.THRESHOLDS
    ]


def test_a_table_of_four_rows_three_sentences_and_the_paths_are_what_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster: the sweep's job writes its report, whose rows of one threshold are shown."""

    def submit(_jobs: demo.Jobs, _bar: object, _count: object, *words: str) -> None:
        if words[0] == "sweep":
            (tmp_path / "sweep").mkdir()
            (tmp_path / "sweep" / "report.json").write_text(json.dumps({"rows": report_rows()}))

    monkeypatch.setattr("cluster.local.local_cluster", lambda: nullcontext(SimpleNamespace(dashboard_url="http://x")))
    monkeypatch.setattr(demo.Jobs, "submit", submit)
    monkeypatch.setattr(demo, "endpoint", lambda *_: nullcontext("http://x"))
    answers = [demo.DemoAnswer("How many?", "One.\n#### 1", True, 8.0), demo.DemoAnswer("And?", "#### 2", False, 6.0)]
    monkeypatch.setattr(demo, "ask", lambda *_: answers)
    assert demo.main(["--out", str(tmp_path)]) == 0
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    (head,) = (at for at, line in enumerate(lines) if line.startswith("model "))
    cells = [line.split()[-4:] for line in lines[head + 1 : head + 5]]
    assert [(row[0], row[1], row[3]) for row in cells] == [
        ("1", "79", "2.0"),
        ("4", "27", "8.0"),
        ("1", "77", "2.0"),
        ("4", "53", "8.0"),
    ]
    assert lines[head + 5].startswith("Both are shipped models") and not lines[head + 6]
    assert "1 of 2 questions" in printed.out and "#### 1" in printed.out
    for path in ("sweep/plot.png", "sweep/report.html", "demo.log"):
        assert str(tmp_path / path) in printed.out
    assert len(lines) < 40
    assert {line[:3] for line in printed.err.splitlines() if "|" in line} == {"1/4", "2/4"}


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> demo.Jobs:
    """Jobs whose every child says why it fails, and fails."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho the reason\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    cluster: Any = SimpleNamespace(environment={})
    return demo.Jobs(cluster, tmp_path / "demo.log")


def test_a_failed_part_names_the_log_which_has_what_it_printed(
    failing: demo.Jobs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with demo.bar("1/4 train", 30, "updates") as bar, pytest.raises(RuntimeError) as raised:
        failing.submit(bar, lambda: 7, "train")
    assert "train ended" in str(raised.value) and str(failing.log) in str(raised.value)
    assert failing.log.read_text() == "the reason\n" and "the reason" not in capfd.readouterr().out

    with failing.start_job("serve") as child, demo.bar("3/4 serve", 2, "processes") as bar:
        child.wait(timeout=60)
        with pytest.raises(RuntimeError) as raised:
            demo.wait_until_ready(child, "http://x", bar, log=failing.log, deadline=time.monotonic() + 60)
    assert "exit code 3" in str(raised.value) and str(failing.log) in str(raised.value)


def test_a_bar_follows_the_job_and_what_was_started_ends_with_the_block(tmp_path: Path) -> None:
    cluster: Any = SimpleNamespace(environment={})
    jobs = demo.Jobs(cluster, tmp_path / "demo.log")
    with jobs.start_job("-c", "import time; time.sleep(600)") as child:
        assert child.poll() is None
    assert child.poll() is not None
    with demo.bar("2/4 sweep", 10, "answers") as bar:
        demo.show(bar, 4)
        assert bar.n == 4
        demo.show(bar, 40)
        assert bar.n == 10
