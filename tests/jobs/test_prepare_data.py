"""`jobs/prepare_data.py` as a user runs it: own conversations in, a folder that a training takes out."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_rows import chat, write_rows
from ray.exceptions import WorkerCrashedError

from jobs import prepare_data
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.data import encoding
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
    (before,) = third.earlier
    assert decode_text(tokenizer, before.tokens[: before.prompt_length]) == "Be brief.3+1?"
    assert decode_text(tokenizer, before.tokens[before.prompt_length :]) == "4"
    assert third.tokens[-1] == 1 and len(third.tokens) + len(before.tokens) == examples.lengths[3]
    apart = PreparedExamples(Path("data"), block_size=4, max_length=400, apart=True)
    assert [apart[i] for i in range(60)] == [
        answer for i in range(40) for answer in (*examples[i].earlier, replace(examples[i], earlier=()))
    ]
    assert apart.lengths == [len(apart[i].tokens) for i in range(60)]
    assert prepare("chats.jsonl", "--max-length", "160", "--answers-trained", "last", out="last") == 0
    last = PreparedExamples(Path("last"), block_size=4, max_length=400)
    assert [last[i] for i in range(40)] == [replace(examples[i], earlier=()) for i in range(40)]
    room = max(examples.lengths) + 8
    filled = PreparedExamples(Path("data"), block_size=4, max_length=room + 2, trailing_fill=32)
    alone = [i for i in range(40) if not filled[i].earlier]
    assert [filled.lengths[i] for i in alone] == [len(filled[i].tokens) for i in alone]
    options = ["--recipe", "SDAR-8B-b4", "--base", str(tiny_model_dir), "--data", "data", "--steps", "1"]
    assert training.main([*options, "--precision", "float32", "--out", "model", "--set", "train.pack=99"]) == 0
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


def test_a_model_without_a_chat_template_is_refused_once(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), [chat(0), chat(1)])
    shutil.copytree(tiny_model_dir, "plain")
    Path("plain/chat_template.jinja").unlink()
    assert prepare_data.main(["rows.jsonl", "--model", "plain", "--out", "data"]) == 2
    error = capsys.readouterr().err
    assert "plain has no chat template" in error and len(error.splitlines()) == 1
    assert not Path("data").exists()


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

    monkeypatch.setattr("cluster.local.connect", lambda **_: True)  # ours: it ends what Ray started by itself
    monkeypatch.setattr("actors.training.encoding.encode_on_cluster", fails)
    write_rows(Path("rows.jsonl"), [chat(0)])
    assert prepare("rows.jsonl", "--workers", "2") == 1
    error = capsys.readouterr().err
    assert error.startswith("prepare_data: the work failed on the cluster: ") and len(error.splitlines()) == 1
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def test_samples_that_are_cut_are_refused_before_anything_is_trained(prepare: Callable[..., int]) -> None:
    write_rows(Path("chats.jsonl"), [chat(i) for i in range(20)])
    assert prepare("chats.jsonl") == 0
    assert named_data(Path("data")).digest
    whole = Path("data", SAMPLES).read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 7, 0):
        Path("data", SAMPLES).write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"samples.arrow") as refused:
            named_data(Path("data"))
        assert "\n" not in str(refused.value)


BAD = {
    2: ("{broken", "is not valid JSON"),
    5: (json.dumps(chat(1, answer=" ")), "its answer is empty"),
    7: (json.dumps({"messages": [{"role": "robot", "content": "x"}]}), "needs a role"),
    9: (json.dumps({"prompt": "a"}), "it has no 'messages'"),
}


@pytest.mark.parametrize("skip", [False, True])
def test_all_bad_rows_are_named_at_once_or_left_out(
    prepare: Callable[..., int], skip: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [BAD[n][0] if n in BAD else json.dumps(chat(n)) for n in range(1, 13)]
    Path("rows.jsonl").write_text("\n".join(lines))
    assert prepare("rows.jsonl", *["--skip-bad"] * skip) == (0 if skip else 2)
    printed = capsys.readouterr()
    named = Path("data/skipped.txt").read_text() if skip else printed.err
    for number, (_, reason) in BAD.items():
        assert any(f"rows.jsonl line {number}: " in line and reason in line for line in named.splitlines())
    if not skip:
        assert "4 rows are bad" in named and not Path("data").exists()
        return
    assert "12 rows: 8 kept" in printed.out and "4 bad" in printed.out and len(named.splitlines()) == 4
    good = [chat(n) for n in range(1, 13) if n not in BAD]
    write_rows(Path("good.jsonl"), good)
    assert prepare("good.jsonl", out="good") == 0
    assert Path("good", SAMPLES).read_bytes() == Path("data", SAMPLES).read_bytes()


def test_more_bad_rows_than_are_named_are_counted(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), [chat(1, answer="")] * 300)
    assert prepare("rows.jsonl") == 2
    error = capsys.readouterr().err
    assert "300 rows are bad" in error and "... and 280 more" in error and len(error.splitlines()) == 22


def test_rows_are_as_often_in_the_data_as_their_source_weighs(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("a.jsonl"), [{"prompt": f"a{n}", "response": "x"} for n in range(7)])
    write_rows(Path("b.jsonl"), [chat(n) for n in (0, 2, 4, 6)])
    assert prepare("a.jsonl", "b.jsonl", "--weight", "0.5", "--weight", "2.5") == 0
    assert "11 rows: 7 kept" in capsys.readouterr().out
    record = json.loads(Path("data", RECORD).read_text())
    assert record["samples"] == 3 + 10 and record["rows"]["left_by_weight"] == 4
    assert prepare("a.jsonl", "b.jsonl", "--weight", "0.5", out="other") == 2
    assert "give one for each" in capsys.readouterr().err
    assert prepare("a.jsonl", "--weight", "1e308", out="other") == 2
    assert "at most 2147483647" in capsys.readouterr().err


def test_data_of_before_conversations_had_several_answers_are_read(prepare: Callable[..., int]) -> None:
    write_rows(Path("chats.jsonl"), [chat(n) for n in range(0, 8, 2)])
    assert prepare("chats.jsonl") == 0
    examples = [*PreparedExamples(Path("data"), block_size=4, max_length=400)]
    table = pa.ipc.open_file(Path("data", SAMPLES)).read_all().drop_columns("earlier")
    with pa.OSFile("data/" + SAMPLES, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert [*PreparedExamples(Path("data"), block_size=4, max_length=400)] == examples


def test_a_row_far_too_long_is_not_tokenised(
    prepare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), [chat(0), chat(1, answer="<|mask|>" + "7" * 1_000_000)])
    seen = []
    read = encoding.token_ids
    monkeypatch.setattr(encoding, "token_ids", lambda t, texts: seen.extend(texts) or read(t, texts))
    assert prepare("rows.jsonl") == 0
    assert "1 kept, 1 too long" in capsys.readouterr().out and 0 < max(len(t.text) for t in seen) < 100


def test_what_was_understood_is_a_table(prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [chat(n) | {"id": n, "mood": None} for n in range(10)]
    rows[1]["messages"][1]["weight"] = 0
    write_rows(Path("rows.jsonl"), rows)
    assert prepare("rows.jsonl", "--ignore-columns", "unseen") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for cells in (
        "messages 10 the conversation",
        "messages.weight 1 not trained",
        "id 10 left out: says nothing of the conversation",
        "mood 10 empty",
        "unseen 0 no row has it",
        "turns user 15, assistant 15, system 4",
        "rows by turns 2: 3, 3: 2, 4: 3, 5: 2",
        "answers 14 trained of 15, in 10 samples",
    ):
        assert cells in printed
    record = json.loads(Path("data", RECORD).read_text())
    assert f"tokens {record['tokens'] + 10}, of which 30 are trained" in printed
    assert "10 rows: 10 kept" in printed


def test_rows_are_shown_as_the_model_sees_them(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path("rows.jsonl"), [chat(1), chat(2)])
    assert prepare("rows.jsonl", "--show", "1") == 0
    printed = capsys.readouterr().out
    shown = "<|user|>1+1?<|assistant|>[[2<|endoftext|>]]<|user|>1+2?<|assistant|>[[3<|endoftext|>]]"
    assert f"--- rows.jsonl line 1, sample 1: 16 tokens, 4 trained\n{shown}\n" in printed and "2+1?" not in printed
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert prepare("rows.jsonl", "--show", "2", out="other") == 0
    printed = capsys.readouterr().out
    assert "\033[32m2\033[0m\033[1;36m<|endoftext|>\033[0m\033[34m<|user|>\033[0m" in printed and "[[" not in printed


def test_a_column_that_is_not_read_ends_it_at_once(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), [chat(1), *(chat(2) | {"mood": "glad"} for _ in range(30))])
    assert prepare("rows.jsonl") == 2
    error = capsys.readouterr().err
    assert "rows.jsonl line 2: its column 'mood' is not read" in error and len(error.splitlines()) == 1
    assert prepare("rows.jsonl", "--skip-bad") == 0
    assert "31 rows: 1 kept" in capsys.readouterr().out
    assert prepare("rows.jsonl", "--ignore-columns", "mood", out="other") == 0


def test_parquet_arrow_and_json_lines_of_the_same_rows_give_the_same_bytes(prepare: Callable[..., int]) -> None:
    """Rows with tools and calls of their own, which a table pads with the other rows' fields."""
    schema = {"weather": {"city": {"type": "string"}}, "add": {"a": {"type": "number"}, "b": {"type": "number"}}}
    rows = []
    for name, arguments in (("weather", {"city": "Rome"}), ("add", {"a": 1, "b": 2})):
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": schema[name]}}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "2"}]
        rows.append({"messages": turns, "tools": [tool]})
    table = pa.Table.from_pylist(rows)
    assert "null" in json.dumps(table.to_pylist())
    write_rows(Path("a.jsonl"), rows)
    write_rows(Path("padded.jsonl"), table.to_pylist())
    pq.write_table(table, "a.parquet")
    with pa.OSFile("a.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    names = ("a.jsonl", "padded.jsonl", "a.parquet", "a.arrow")
    for name in names:
        assert prepare(name, out=f"of-{name}") == 0
    assert len({Path(f"of-{name}", SAMPLES).read_bytes() for name in names}) == 1


def test_rows_are_shown_before_anything_is_written(
    prepare: Callable[..., int], tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), [chat(n) for n in range(600)])
    command = ["rows.jsonl", "--model", str(tiny_model_dir)]
    assert prepare_data.main([*command, "--show", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- rows.jsonl line") == 2 and "the first 256 rows were read; nothing is written" in printed
    assert prepare_data.main(command) == 2
    assert "--out is missing" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]
