"""Rows that a model answers: what is kept, what is left out, and a job that was killed and goes on."""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from base_folders import base_folder
from chat_rows import chat, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import prepare_data
from mbd_core.batch import model_answers
from mbd_core.batch.model_answers import SETTINGS, PartDecoder
from mbd_core.checkpoint.adaptation.block_diffusion import convert_to_block_diffusion
from mbd_core.checkpoint.chat import chat_prompt, decode_text
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.data.prepared import RECORD, SAMPLES, PreparedExamples
from mbd_core.serving.tokens.load import load_engine

QUESTION = "Tom has {} pens. Tom buys 3 bags with 4 pens each. How many pens does Tom have now?"
BASE = ["--model", "tiny-bd", "--answers-from", "tiny-bd", "--max-tokens", "64"]


def questions(count: int) -> list[dict]:
    """Rows of each kind: a prompt alone, a prompt with an answer that gives way, and a conversation."""
    asked = [QUESTION.format(number + 2) for number in range(count)]
    turns = [{"role": "user", "content": asked[1]}, {"role": "assistant", "content": "I do not know."}]
    return [{"messages": [{"role": "user", "content": asked[0]}]}, {"messages": turns}] + [
        {"messages": [*turns, {"role": "user", "content": text}]} for text in asked[2:]
    ]


class Killed(BaseException):
    """What no command catches."""


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_answers, "PART", 4)
    write_rows(Path("rows.jsonl"), questions(10))

    def run(*arguments: str, out: str = "data") -> int:
        return prepare_data.main(["rows.jsonl", *BASE, "--out", out, *arguments])

    return run


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a model was loaded."""
    found: list[int] = []
    load = load_engine

    def counted(*arguments, **settings):
        found.append(1)
        return load(*arguments, **settings)

    monkeypatch.setattr("mbd_core.serving.tokens.load.load_engine", counted)
    return found


def stand_in(monkeypatch: pytest.MonkeyPatch, text: Callable[[int, int], str]) -> list[int]:
    """Answers by a part's number and a row's place in it, without a model; the parts that were decoded."""
    decoded: list[int] = []

    def decode(self: PartDecoder, number: int, chats) -> list[dict]:
        decoded.append(number)
        return [{"text": text(number, place), "finish_reason": "stop"} for place in range(len(chats))]

    monkeypatch.setattr(PartDecoder, "decode", decode)
    return decoded


def answers(folder: str = "data.answers") -> list[dict]:
    return [json.loads(line) for part in sorted(Path(folder).glob("part_*")) for line in part.read_text().splitlines()]


def test_the_answers_are_the_engine_s(prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("--method", "single", "--decoding", '{"tau_m2t": 0.8}') == 0
    printed, lines = capsys.readouterr().out, answers()
    finished = [line for line in lines if line["finish_reason"] == "stop" and line["text"].strip()]
    left_out = sum(line["finish_reason"] != "stop" for line in lines)
    assert len(finished) > 0 and len(lines) == 10
    assert f"10 rows: {len(finished)} kept, 0 too long" in printed
    record = json.loads(Path("data", RECORD).read_text())
    assert record["samples"] == len(finished) and record["rows"]["unfinished"] == left_out
    said = record["answers"]
    assert (said["model"], said["max_tokens"], said["decoding"]["tau_m2t"]) == ("tiny-bd", 64, 0.8)
    with load_engine(model_folder("tiny-bd"), EngineConfig(max_rows=1)) as loaded:
        assert said["digest"] == model_digest(model_folder("tiny-bd"))
        prompt = chat_prompt(loaded.tokenizer, questions(10)[3]["messages"])
        decoding = loaded.decoding({"buffer_size": 1, "tau_m2t": 0.8})
        (output,) = loaded.engine.generate(
            [Request(request_id="x", prompt=tuple(prompt), max_tokens=64, decoding=decoding)]
        )
        assert lines[3]["text"] == decode_text(loaded.tokenizer, output.tokens)
        assert lines[3]["num_forwards"] == output.counts.num_forwards
        samples = PreparedExamples(Path("data"), block_size=4, max_length=2048)
        kept = {tuple(s.tokens[: s.prompt_length]) for s in (samples[i] for i in range(len(samples)))}
        assert (tuple(prompt) in kept) == (lines[3] in finished)


def test_an_autoregressive_model_answers_greedily_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base of an adapted model answers the prompts that the adapted one is to learn from."""
    monkeypatch.chdir(tmp_path)
    base_folder(Path("ar"), "Llama", "tiny-llama")
    convert_to_block_diffusion(Path("ar"), Path("bd"), block_size=4)
    write_rows(Path("rows.jsonl"), questions(3))
    options = ["--model", "bd", "--answers-from", "ar", "--max-tokens", "6", "--keep-unfinished"]
    assert prepare_data.main(["rows.jsonl", *options, "--out", "data"]) == 0
    record = json.loads(Path("data", RECORD).read_text())
    assert record["answers"]["decoding"]["causal"]["method"] == "ar"
    tokenizer = AutoTokenizer.from_pretrained("ar")
    plain = AutoModelForCausalLM.from_pretrained("ar")
    for line, row in zip(answers(), questions(3), strict=True):
        messages = row["messages"] if row["messages"][-1]["role"] == "user" else row["messages"][:-1]
        prompt = chat_prompt(tokenizer, messages)
        ids = torch.tensor([prompt])
        found = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert line["text"] == decode_text(tokenizer, found[0, len(prompt) :].tolist())


def test_a_killed_job_goes_on_and_ends_with_the_same_bytes(
    prepare: Callable[..., int], loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare(out="whole") == 0 and len(loads) == 1
    decode, seen = PartDecoder.decode, []

    def counted(self: PartDecoder, number: int, chats) -> list[dict]:
        seen.append(number)
        return decode(self, number, chats)

    def dies(self: PartDecoder, number: int, chats) -> list[dict]:
        if number == 1:
            raise Killed
        return counted(self, number, chats)

    monkeypatch.setattr(PartDecoder, "decode", dies)
    with pytest.raises(Killed):
        prepare()
    assert not Path("data").exists() and len(answers()) == 4
    monkeypatch.setattr(PartDecoder, "decode", counted)
    assert prepare() == 0
    assert seen == [0, 1, 2]
    for name in (SAMPLES, RECORD):
        assert Path("data", name).read_bytes() == Path("whole", name).read_bytes()
    assert [p.read_bytes() for p in sorted(Path("data.answers").iterdir())] == [
        p.read_bytes() for p in sorted(Path("whole.answers").iterdir())
    ]
    loads.clear()
    assert prepare("--overwrite") == 0 and loads == []  # nothing is decoded twice, and no model loaded for it


def test_unfinished_answers_are_left_out_or_kept(
    prepare: Callable[..., int], loads: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("--max-tokens", "3") == 2
    assert "no row is left of 10 rows: 0 kept, 0 too long" in (error := capsys.readouterr().err)
    assert "10 whose answer did not end, 0 without an answer" in error and not Path("data").exists()
    assert prepare("--max-tokens", "3", "--keep-unfinished") == 0
    assert len(loads) == 1 and "10 rows: 10 kept" in capsys.readouterr().out


def test_a_prompt_that_the_model_does_not_hold_is_left_out(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), [{"prompt": "pens " * 3000}, {"prompt": QUESTION.format(7)}])
    assert prepare("--keep-unfinished") == 0
    assert "2 rows: 1 kept, 0 too long, 0 left out for repeating a benchmark, 0 whose" in (
        out := capsys.readouterr().out
    )
    assert "1 without an answer" in out


def test_drawn_answers_have_seeds_of_their_own(prepare: Callable[..., int]) -> None:
    drawn = ["--temperature", "4", "--method", "single"]
    write_rows(Path("rows.jsonl"), [{"prompt": QUESTION.format(7)}] * 3)
    for out, seed in (("a", "0"), ("b", "0"), ("c", "5")):
        assert prepare(*drawn, "--seed", seed, "--keep-unfinished", out=out) == 0
    texts = {out: [line["text"] for line in answers(f"{out}.answers")] for out in "abc"}
    assert texts["a"] == texts["b"] != texts["c"] and len(set(texts["a"])) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--answers-from", "nowhere"], "unknown model 'nowhere'"),
        (["--method", "faster"], "--method faster: known are single, multi"),
        (["--decoding", '{"tau": 1}'], "unknown decoding field 'tau'"),
        (["--out", "s3://bucket/data"], "give --answers a folder on this machine"),
        (["--answers", "mine"], "was not written by this project"),
    ],
)
def test_what_cannot_answer_is_one_sentence_before_anything_is_decoded(
    prepare: Callable[..., int],
    loads: list[int],
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare_data.Folder, "check_target", lambda *_, **__: None)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert prepare(*options) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert loads == [] and sorted(p.name for p in Path().iterdir()) == ["mine", "rows.jsonl"]


def test_answers_of_other_settings_or_rows_are_not_taken(
    prepare: Callable[..., int], loads: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("--limit", "4", "--keep-unfinished") == 0
    other = f"decoded with other settings ({SETTINGS}): "
    assert prepare("--limit", "4", "--seed", "1", "--overwrite") == 2
    assert f"{other}sampling.seed is 0 there, not 1; give" in capsys.readouterr().err
    assert prepare("--limit", "4", "--max-rows", "3", "--overwrite") == 2
    assert f"{other}max_rows is 16 there, not 3; give" in capsys.readouterr().err
    said = json.loads(Path("data.answers", SETTINGS).read_text())
    assert said["max_rows"] == 16 and said["versions"]["torch"] == version("torch")
    write_rows(Path("rows.jsonl"), [chat(0)])
    assert prepare("--overwrite") == 2
    assert "part_000000.jsonl holds answers to other rows" in capsys.readouterr().err
    assert len(loads) == 1


def test_decoding_options_need_somebody_who_answers(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["--max-tokens", "9"], ["--seed", "1"], ["--keep-unfinished"], ["--actors", "2"]):
        assert prepare_data.main(["rows.jsonl", "--model", "tiny-bd", "--out", "data", *option]) == 2
        assert f"{option[0]} has no meaning without --answers-from" in capsys.readouterr().err


def test_a_row_without_a_question_is_named(prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), [{"messages": [{"role": "system", "content": "Be brief."}]}])
    assert prepare() == 2
    assert "rows.jsonl line 1: its conversation does not end with a user's message" in capsys.readouterr().err


def test_kept_answers_serve_more_rows_fewer_rows_and_other_benchmarks(
    prepare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A last part that more rows fill is decoded again; the file ends as that of a job that had them all."""
    decoded = stand_in(monkeypatch, lambda number, place: f"It is {number * 4 + place}.")
    repeated = "Ann sells nine red apples to each of her seven friends on a sunny day in May."
    write_rows(Path("rows.jsonl"), [{"messages": [{"role": "user", "content": repeated}]}, *questions(9)])
    write_rows(Path("bench.jsonl"), [{"prompt": repeated}])
    assert prepare("--limit", "6") == 0 and decoded == [0, 1]
    assert prepare("--overwrite") == 0 and decoded == [0, 1, 1, 2]
    assert prepare("--limit", "5", "--overwrite") == 0 and len(answers()) == 10
    capsys.readouterr()
    assert prepare("--against", "bench.jsonl", "--drop-overlap", "--overwrite") == 0
    assert decoded == [0, 1, 1, 2] and "10 rows: 9 kept, 0 too long, 1 left out" in capsys.readouterr().out
    assert prepare(out="whole") == 0
    for part in Path("whole.answers").iterdir():
        assert part.read_bytes() == Path("data.answers", part.name).read_bytes()


def test_an_answer_that_cannot_be_encoded_is_none(
    prepare: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder("tiny-bd"), "model")
    template = Path("model/chat_template.jinja")
    refusal = "{% if messages[-1].content == 'STOP' %}{{ raise_exception('no STOP') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    stand_in(monkeypatch, lambda number, place: "STOP" if (number, place) == (1, 2) else "It is 7.")
    assert prepare("--model", "model") == 0
    out = capsys.readouterr().out
    assert (
        "10 rows: 9 kept" in out and "1 without an answer; an answer cannot be encoded: rows.jsonl line 7: the" in out
    )
    assert json.loads(Path("data", RECORD).read_text())["rows"]["unanswered"] == 1


def test_a_prompt_that_the_template_refuses_is_named_before_anything_is_decoded(
    prepare: Callable[..., int], loads: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder("tiny-bd"), "model")
    template = Path("model/chat_template.jinja")
    refusal = "{% if messages[-1].content == 'STOP' %}{{ raise_exception('no STOP') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    write_rows(Path("rows.jsonl"), [*questions(5), {"messages": [{"role": "user", "content": "STOP"}]}])
    assert prepare("--answers-from", "model") == 2
    error = capsys.readouterr().err
    assert "rows.jsonl line 6: the model's chat template refuses these messages: no STOP" in error
    assert loads == [] and answers() == []


def test_more_rows_at_once_than_a_part_has_are_refused(
    prepare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("--max-rows", "65") == 2
    assert "--max-rows 65 must be at most 4" in capsys.readouterr().err
    assert prepare("--max-rows", "2", "--keep-unfinished") == 0
    assert json.loads(Path("data.answers", SETTINGS).read_text())["max_rows"] == 2
