"""The sweep job: every sample comes back graded and counted, and what cannot be run is refused in one sentence."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.evaluation import ASKED, COUNTS, Decode, grade_table
from jobs.eval_sweep import main
from mbd_core.decoding.decoding_config import DecodingConfig, from_fields
from mbd_core.decoding.request import Output, Request
from mbd_core.engine.engine import Engine, EngineConfig


def asked(folder: Path, *, prompts: list[str], buffer_sizes: list[int]) -> pa.Table:
    """A table of every prompt under every buffer size, for the model in `folder`."""
    rows = [
        {
            "model": folder.name,
            "method": "m",
            "task": "gsm-mini",
            "problem_id": f"p{number}",
            "prompt": prompt,
            "reference": "4",
            "entry_point": "",
            "config": json.dumps({"block_size": 4, "buffer_size": size, "tau_m2t": 0.05}),
            "max_tokens": 12,
            "seed": 0,
        }
        for number, prompt in enumerate(prompts)
        for size in buffer_sizes
    ]
    return pa.Table.from_pylist([{"sample": i, **row} for i, row in enumerate(rows)], schema=ASKED)


def decoder(folder: Path) -> Decode:
    return Decode({folder.name: str(folder)}, EngineConfig(max_rows=4, buffer_size=4))


def test_configurations_mixed_in_a_batch_decode_as_each_alone(tiny_model_dir: Path) -> None:
    table = asked(tiny_model_dir, prompts=["How many?", "Tom has 3 pens."], buffer_sizes=[1, 2, 4])
    together = decoder(tiny_model_dir)(table).to_pylist()
    one_at_a_time = decoder(tiny_model_dir)
    for number, row in enumerate(together):
        (alone,) = one_at_a_time(table.slice(number, 1)).to_pylist()
        assert alone["text"] == row["text"]
        assert [alone[name] for name in COUNTS] == [row[name] for name in COUNTS]
    assert len({row["num_forwards"] for row in together}) > 1, "the configurations should differ in forwards"


def test_two_ranks_decode_as_one_and_hold_one_model_at_a_time(tiny_model_dir: Path) -> None:
    table = asked(tiny_model_dir, prompts=["How many?", "Tom has 3 pens."], buffer_sizes=[1, 4])
    names = pa.array(["a", "b"] * 2)
    table = table.set_column(table.schema.get_field_index("model"), "model", names)
    models = dict.fromkeys(("a", "b"), str(tiny_model_dir))
    one = Decode(models, EngineConfig(max_rows=4))(table).to_pylist()
    parallel = Decode(models, EngineConfig(max_rows=4), tensor_parallel=2)
    two = parallel(table).to_pylist()
    parallel.close()
    for alone, cut in zip(one, two, strict=True):
        assert cut["error"] is None
        assert (cut["text"], cut["num_forwards"]) == (alone["text"], alone["num_forwards"])


def test_a_request_that_cannot_be_served_keeps_its_row(tiny_model_dir: Path) -> None:
    table = asked(tiny_model_dir, prompts=["How many?", "word " * 600], buffer_sizes=[1])
    short, overlong = grade_table(decoder(tiny_model_dir)(table)).to_pylist()
    assert short["error"] is None
    assert short["num_forwards"] > 0
    assert "exceed the model's 512 positions" in overlong["error"]
    assert (overlong["correct"], overlong["reason"], overlong["text"]) == (False, "undecoded", None)


def test_an_engine_s_failure_is_the_row_s_that_caused_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    def failing(self: Engine, requests: list[Request]) -> list[Output]:
        if any(request.request_id == "1" for request in requests):
            raise RuntimeError("broken on purpose")
        return generate(self, requests)

    table = asked(tiny_model_dir, prompts=["a", "b", "c"], buffer_sizes=[2])
    undisturbed = [row["text"] for row in decoder(tiny_model_dir)(table).to_pylist()]
    monkeypatch.setattr(Engine, "generate", failing)
    rows = decoder(tiny_model_dir)(table).to_pylist()
    assert [row["error"] for row in rows] == [None, "RuntimeError: broken on purpose", None]
    assert [rows[0]["text"], rows[2]["text"]] == [undisturbed[0], undisturbed[2]]


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
    command += ["--data", f"gsm8k={data}", "--limit", "2", "--max-tokens", "12", "--batch", "4", "--seed", "5"]
    command += ["--methods", "single,multi,edit,dmax", "--method", 'edit={"t2t": {"max_edits": 2}, "buffer_size": 1}']
    command += ["--grid", "tau_m2t=0.0,0.9;buffer_size=2;t2t.tau=0.2", "--out", str(out)]

    assert main(command) == 0
    assert capsys.readouterr().err.count("random-bd: decoding.t2t was asked for") == 1

    samples = pq.read_table(out / "samples").to_pylist()
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
        assert all(
            from_fields(DecodingConfig, json.loads(s["config"])) == from_fields(DecodingConfig, row["config"])
            for s in of
        )
    assert len(report["aup"]) == 16
    assert all(len(aup["points"]) == 2 for aup in report["aup"])
    assert report["settings"]["tasks"]["gsm8k"]["n"] == 2
    text = (out / "report.md").read_text()
    assert "| MBD |" in text and "| random-bd | edit | GSM8K | tau_m2t=0.9 |" in text
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*.part"))

    assert main(command) == 2, "a finished report is not overwritten"
    assert json.loads((out / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--models": "none-such"}, "unknown model 'none-such'"),
        ({"--tasks": "gsm-mini,none-such"}, "unknown task 'none-such'; known: gsm-mini, code-mini"),
        ({"--methods": "double"}, "unknown method 'double'; known: single, multi"),
        ({"--grid": "tau=1"}, "unknown grid field 'tau'; known: block_size"),
        ({"--grid": "t2t.tau=0.5"}, "grid field 't2t.tau' concerns none of the methods single, multi; define one"),
        ({"--methods": "single,d2f"}, "method 'd2f' needs a full-attention model; 'tiny-random' attends in blocks"),
        ({"--method": 'c={"canvas": {}}'}, "method 'c' needs a full-attention model"),
        ({"--method": 'c={"t2t": {"tau": 2}}'}, "method 'c': t2t.tau=2 must be a number from 0 to 1"),
        ({"--method": "c={"}, "--method c: { is not valid JSON"),
        ({"--tasks": "gsm8k"}, "task 'gsm8k' needs a JSON-lines file"),
        ({"--data": "gsm8k=rows.jsonl"}, "the task 'gsm8k' is not among --tasks"),
        ({"--data": "rows.jsonl"}, "takes no data file"),
        ({"--limit": "0"}, "limit=0"),
        ({"--max-tokens": "0"}, "--max-tokens 0"),
        ({"--batch": "0"}, "max_rows=0"),
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
