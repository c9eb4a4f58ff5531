"""`jobs/prepare_data.py` as a user runs it: own conversations in, a folder that a training takes out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_rows import chat, write_rows
from ray.exceptions import WorkerCrashedError

from jobs import prepare_data
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.data.prepared import RECORD, SAMPLES, PreparedExamples, named_data
from mbd_core.multitf.run import __main__ as training

PROBLEM = "A farmer has three red barns, two blue tractors and one very old green truck."


@pytest.fixture
def prepare(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, out: str = "data") -> int:
        return prepare_data.main([*arguments, "--model", str(tiny_model_dir), "--out", out])

    return run


def test_own_chats_become_samples_that_a_recipe_trains_on(
    prepare: Callable[..., int], tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = chat(1, answer="word " * 200)
    write_rows(Path("chats.jsonl"), [*(chat(i) for i in range(40)), long])
    assert prepare("chats.jsonl", "--max-length", "160") == 0
    assert "41 rows: 40 kept, 1 too long" in capsys.readouterr().out
    examples = PreparedExamples(Path("data"), block_size=4, max_length=400)
    tokenizer = load_tokenizer(tiny_model_dir, load_model(tiny_model_dir).config)
    third = examples[3]
    assert decode_text(tokenizer, third.tokens[: third.prompt_length]) == "Be brief.3+1?43+2?"
    assert decode_text(tokenizer, third.tokens[third.prompt_length :]) == "5"
    assert third.tokens[-1] == 1 and len(third.tokens) == examples.lengths[3]
    room = max(examples.lengths) + 8
    filled = PreparedExamples(Path("data"), block_size=4, max_length=room + 2, trailing_fill=32)
    assert filled.lengths == [len(filled[i].tokens) for i in range(40)] and max(filled.lengths) == room
    options = ["--recipe", "SDAR-8B-b4", "--base", str(tiny_model_dir), "--data", "data", "--steps", "1"]
    assert training.main([*options, "--precision", "float32", "--out", "model", "--pack", "99"]) == 0
    recorded = json.loads(Path("model/recipe.json").read_text())
    assert recorded["data"]["digest"] == json.loads(Path("data", RECORD).read_text())["digest"]
    line = capsys.readouterr().out
    assert "1 steps of 32 samples in float32, 1 worker, samples of " in line and "packed up to 99 tokens" in line


def test_the_same_rows_give_the_same_bytes(prepare: Callable[..., int]) -> None:
    write_rows(Path("chats.jsonl"), [chat(i) for i in range(300)])
    assert prepare("chats.jsonl") == 0 and prepare("chats.jsonl", out="again") == 0
    for name in (SAMPLES, RECORD):
        assert Path("data", name).read_bytes() == Path("again", name).read_bytes()
    assert prepare("chats.jsonl", "--limit", "299", out="fewer") == 0
    records = [json.loads(Path(out, RECORD).read_text()) for out in ("data", "fewer")]
    assert [r["samples"] for r in records] == [300, 299] and records[0]["digest"] != records[1]["digest"]


@pytest.mark.parametrize("options", [[], ["--drop-overlap"]])
def test_rows_that_repeat_a_benchmark_are_reported_or_left_out(
    prepare: Callable[..., int], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"Read this: {PROBLEM.upper()} What?", "response": "A farm."}, {"prompt": "x", "response": "y"}]
    write_rows(Path("rows.jsonl"), rows)
    problems = [f"Once. {PROBLEM} Why?", "Who are you, stranger, tell?"]
    write_rows(Path("bench.jsonl"), [{"question": problem} for problem in problems])
    assert prepare("rows.jsonl", "--against", "bench.jsonl", *options) == 0
    dropped = len(options)
    printed = capsys.readouterr().out
    assert f"2 rows: {2 - dropped} kept, 0 too long, {dropped} left out" in printed
    assert "bench.jsonl: 1 rows repeat 1 of its problems" in printed
    overlap = json.loads(Path("data", RECORD).read_text())["overlap"]
    assert overlap == {"bench.jsonl": {"rows": 1, "problems": 1, "first": ["rows.jsonl line 1"]}}


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ([chat(0), chat(1, answer=" ")], [], "rows.jsonl line 2: its answer is empty"),
        ([chat(0), {"messages": []}], [], "rows.jsonl line 2: its conversation does not end with"),
        ([{"text": "a"}], [], "rows.jsonl line 1: its columns 'text' are no conversation"),
        ([chat(0), {"prompt": "a"}], [], "rows.jsonl line 2: it has no 'messages'"),
        ([], [], "no row is left of 0 rows"),
        ([chat(0)], ["--max-length", "5"], "no row is left of 1 rows: 0 kept, 1 too long"),
        ([chat(0)], ["--prompt", "q"], "both the columns of prompt and response"),
        ([chat(0)], ["--drop-overlap"], "--drop-overlap needs the benchmarks' files"),
        ([chat(0)], ["--against", "rows.jsonl"], "a benchmark's row needs one of prompt, question"),
        ([chat(0)], ["nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_bad_rows_and_options_are_one_sentence_and_leave_nothing(
    prepare: Callable[..., int],
    rows: list[dict],
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows(Path("rows.jsonl"), rows)
    assert prepare("rows.jsonl", *options) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def test_a_folder_of_the_users_stays(prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [chat(0)])
    Path("data").mkdir()
    Path("data/mine.txt").write_text("mine")
    assert prepare("rows.jsonl", "--overwrite") == 2
    assert "was not written by this project" in capsys.readouterr().err
    assert prepare("rows.jsonl", out="other") == 0
    assert prepare("rows.jsonl", out="other") == 2
    assert "holds a training set; give another folder, or --overwrite" in capsys.readouterr().err
    assert prepare("rows.jsonl", "--overwrite", out="other") == 0


def test_a_cluster_that_fails_is_one_sentence(
    prepare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise WorkerCrashedError

    monkeypatch.setattr("cluster.local.connect", lambda **_: False)
    monkeypatch.setattr("actors.training.data.encode_on_cluster", fails)
    write_rows(Path("rows.jsonl"), [chat(0)])
    assert prepare("rows.jsonl", "--workers", "2") == 1
    error = capsys.readouterr().err
    assert error.startswith("prepare_data: it failed on the cluster: ") and len(error.splitlines()) == 1
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def test_samples_that_are_cut_are_refused_before_anything_is_trained(prepare: Callable[..., int]) -> None:
    write_rows(Path("chats.jsonl"), [chat(i) for i in range(20)])
    assert prepare("chats.jsonl") == 0
    assert named_data(Path("data")).digest
    whole = Path("data", SAMPLES).read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 7, 0):
        Path("data", SAMPLES).write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"^data/samples\.arrow is cut or damaged") as refused:
            named_data(Path("data"))
        assert "\n" not in str(refused.value)
