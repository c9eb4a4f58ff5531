"""Data prepared on a cluster, by tasks of Ray Data and engines in actors: the bytes of one process, its sentences."""

from pathlib import Path
from typing import Any

import pytest
from chat_rows import chat, write_rows
from chat_templates import with_strict_template

from actors.training import encoding as data_encoding
from jobs import prepare_data
from mbd_core.checkpoint.chat import question
from mbd_core.multitf.data import preparation as data_preparation
from mbd_core.multitf.data.prepared import RECORD, SAMPLES


def test_tasks_write_the_bytes_of_one_process(
    ray_cluster: Any,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Chunks and windows are small, so that there are many, the last of each in part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_preparation, "CHUNK", 8)
    monkeypatch.setattr(data_encoding, "WINDOW", 3)
    write_rows(Path("chats.jsonl"), [*(chat(i) for i in range(60)), chat(1, answer="word " * 200), chat(61)])
    command = ["chats.jsonl", "--model", str(tiny_model_dir), "--max-length", "160"]
    assert prepare_data.main([*command, "--out", "alone"]) == 0
    assert prepare_data.main([*command, "--out", "tasks", "--workers", "2"]) == 0
    assert capsys.readouterr().out.count("62 rows: 61 kept, 1 too long") == 2
    for name in (SAMPLES, RECORD):
        assert Path("alone", name).read_bytes() == Path("tasks", name).read_bytes()
    strict = with_strict_template(tiny_model_dir, tmp_path / "strict")
    odd = {"messages": [*question("a"), *question("b"), {"role": "assistant", "content": "c"}]}
    write_rows(Path("chats.jsonl"), [*(chat(i) for i in range(20)), odd])
    command[2] = str(strict)
    assert prepare_data.main([*command, "--out", "bad", "--workers", "2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "chats.jsonl line 21: the model's chat template refuses" in error and not Path("bad").exists()


@pytest.mark.slow
def test_actors_answer_as_one_engine_does(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine parts, the last of one row, in two rounds of four parts for each of two actors."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), [{"prompt": f"Tom has {n} pens. How many pens does Tom have?"} for n in range(513)])
    command = ["rows.jsonl", "--model", "tiny-bd", "--answers-from", "tiny-bd", "--max-tokens", "16"]
    command += ["--keep-unfinished", "--method", "single"]
    assert prepare_data.main([*command, "--out", "alone"]) == 0
    assert prepare_data.main([*command, "--out", "actors", "--actors", "2", "--workers", "1"]) == 0
    for name in (SAMPLES, RECORD):
        assert Path("alone", name).read_bytes() == Path("actors", name).read_bytes()
    parts = [sorted(Path(f"{out}.answers").glob("part_*")) for out in ("alone", "actors")]
    assert [len(found) for found in parts] == [9, 9]
    assert [p.read_bytes() for p in parts[0]] == [p.read_bytes() for p in parts[1]]
