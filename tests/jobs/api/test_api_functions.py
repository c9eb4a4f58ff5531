"""`prepare`, `train`, `sweep` and `grade` as plain functions: values come back, and no Ray is needed."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import prepare_data
from jobs.api.preparing import AnswerOptions, PrepareOptions
from jobs.api.rows import rows_of, table_of
from mbd_core import grade, prepare, sweep, train

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"Tom has {i} pens. How many pens does Tom have?", "response": f"#### {i}"} for i in range(40)]


class Frame:
    """What pandas has, whose missing values are no JSON."""

    columns = ("doc_id", "text")

    def to_json(self, **_: Any) -> str:
        return '[{"doc_id": 0, "text": "#### 1"}, {"doc_id": 1, "text": null}]'


def test_rows_of_every_library_are_dictionaries() -> None:
    rows = [{"a": 1}, {"a": None}]
    assert rows_of(rows, "rows") == rows_of(iter(rows), "rows") == rows_of(pa.Table.from_pylist(rows), "rows") == rows
    assert rows_of(Frame(), "rows")[1] == {"doc_id": 1, "text": None}
    table = table_of(rows)
    assert (table if isinstance(table, list) else table.to_dict("records"))[0]["a"] == 1


def test_the_same_rows_give_the_bytes_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert prepare_data.main(["rows.jsonl", "--model", "tiny-mbd", "--out", "by-command"]) == 0
    done = prepare(ROWS, "tiny-mbd", out="by-rows", show=1)
    from_file, from_table = prepare("rows.jsonl", "tiny-mbd"), prepare(pa.Table.from_pylist(ROWS), "tiny-mbd")
    expected = Path("by-command", "samples.arrow").read_bytes()
    for folder in (done.folder, from_file.folder, from_table.folder):
        assert Path(folder, "samples.arrow").read_bytes() == expected
    assert done.counts.num_kept == 40 and "| prompt | 40 | the prompt |" in str(done)
    assert "[[#### 0<|endoftext|>]]" in done.shown()[0]


def test_data_trains_a_model_that_is_swept(tmp_path: Path) -> None:
    data = prepare(ROWS, "tiny-mbd", out=tmp_path / "data")
    trained = train(
        "tiny-mbd", base="tiny-bd", data=data, out=tmp_path / "model", steps=2, batch_size=4, train={"lr": 1e-5}
    )
    assert Path(trained.model) == tmp_path / "model" and "train.steps: 2, not 800" in trained.changes
    assert trained.recipe.train.lr == 1e-5 and len(trained.table) == 2
    place = tmp_path / "sweep"
    grid = {"tau_m2t": [0.7, 0.9], "buffer_size": [2]}
    result = sweep([trained.model], "gsm-mini", grid, methods="multi", limit=2, timed=0, max_tokens=16, out=place)
    assert result.folder == str(place) and (place / "report.md").is_file() and "model" in result.headlines
    rows = rows_of(result.table, "rows")
    assert [row["tau_m2t"] for row in rows] == [0.7, 0.9] and {"accuracy", "tpf", "nfe"} <= rows[0].keys()
    again = sweep([trained.model], ["gsm-mini"], grid, methods=["multi"], limit=2, timed=0, max_tokens=16, out=place)
    assert again.report == result.report


def test_samples_are_graded(tmp_path: Path) -> None:
    samples = [{"doc_id": 0, "text": "#### 1"}, {"doc_id": 1, "text": "none"}]
    grades = grade("gsm-mini", samples, limit=3)
    assert (
        grades.report["samples"] == 2 and grades.accuracy == 0.0 and len(grades.table) == 2 and grades.folder is None
    )
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    written = grade("gsm-mini", path, limit=3, out=tmp_path / "grades")
    assert written.report == json.loads((tmp_path / "grades" / "report.json").read_text()) | {
        "wilson_interval": grades.report["wilson_interval"]
    }
    assert "0 of 2 samples right" in written.text and "1 of 3 problems have no sample" in written.text


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: prepare([], "tiny-mbd"), "rows have no row"),
        (lambda: prepare([3], "tiny-mbd"), "rows, row 1: a int, not a dictionary"),
        (lambda: prepare({"train": ROWS}, "tiny-mbd"), "one object with train; give a list of rows, or one split"),
        (
            lambda: prepare(pa.Table.from_arrays([pa.array(["a"])] * 2, ["x", "x"]), "tiny-mbd"),
            "have the name 'x' twi",
        ),
        (lambda: prepare([{"x": object()}], "tiny-mbd"), "rows, row 1: .* has no form in JSON"),
        (lambda: prepare([{"prompt": "a"}], "tiny-mbd"), "rows.jsonl line 1: its columns 'prompt'"),
        (lambda: prepare("nowhere.jsonl", "tiny-mbd"), "nowhere.jsonl does not exist"),
        (lambda: prepare(ROWS, "nobodys"), "unknown model 'nobodys'"),
        (lambda: prepare(ROWS, "tiny-mbd", max_lenght=3), "'max_lenght'; is 'max_length' meant?"),
        (lambda: prepare(ROWS, "tiny-mbd", max_length=0), "max_length=0 must be a whole number of at least 2"),
        (lambda: prepare(ROWS, "tiny-mbd", workers=2), "workers and actors need a cluster"),
        (lambda: prepare(ROWS, "tiny-mbd", cluster="local"), "cluster=local has no work"),
        (lambda: prepare(ROWS, "tiny-mbd", temperature=1.0), "--temperature has no meaning without --answers-from"),
        (lambda: prepare(ROWS, "tiny-mbd", answers_from="tiny-mbd"), "name a folder with out="),
        (lambda: train("nobodys"), "unknown recipe 'nobodys'"),
        (lambda: train("tiny-mbd", lr=1e-3, train={"lr": 1e-4}), "^lr and train.lr are both given: leave one out"),
        (lambda: train("tiny-mbd", stepz=3), "unknown keyword 'stepz'; is 'steps' meant?"),
        (lambda: train("tiny-mbd", steps=0), "train.steps=0 must be a whole number of at least 1"),
        (lambda: train("tiny-mbd", train={"lrr": 1}), "unknown recipe field 'train.lrr'"),
        (lambda: train("tiny-mbd", write="all"), 'write="all" must be one of'),
        (lambda: train("tiny-mbd", storage="x"), "storage belongs to a run on a cluster"),
        (lambda: train("tiny-mbd", cluster="local", every=3), "every belongs to a run without a cluster"),
        (lambda: train("tiny-mbd", cluster=""), "cluster='' must be an address"),
        (lambda: train("tiny-mbd", data="nowhere"), "nowhere"),
        (lambda: sweep("nobodys", "gsm-mini"), "unknown model 'nobodys'"),
        (lambda: sweep(3, "gsm-mini"), "models must be a list of names"),  # type: ignore[arg-type]
        (lambda: sweep("tiny-mbd", "nothing"), "unknown task 'nothing'"),
        (lambda: sweep("tiny-mbd", "gsm-mini", {"tau": [1]}), "there is no field tau"),
        (lambda: sweep("tiny-mbd", "gsm-mini", limt=2), "'limt'.*is 'limit' meant?"),  # type: ignore[call-arg]
        (lambda: sweep("tiny-mbd", "gsm-mini", limit=0), "limit=0 must be a whole number of at least 1"),
        (lambda: sweep("tiny-mbd", "gsm-mini", actors=2), "actors=2 engines need a cluster"),
        (lambda: grade("nothing", []), "unknown task 'nothing'"),
        (lambda: grade("gsm-mini", [{"doc_id": 9, "text": "a"}], limit=5), "samples, row 1: doc_id 9 is no problem"),
        (lambda: grade("gsm-mini", [{"doc_id": 0}], limit=5), "samples, row 1: no column 'text'"),
        (lambda: grade("gsm-mini", [{"doc_id": 0, "text": "a"}], workers=0), "workers=0 must be a whole number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(
    call: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_the_two_groups_of_options_of_prepare_share_no_name() -> None:
    assert not AnswerOptions.__dataclass_fields__.keys() & PrepareOptions.__dataclass_fields__.keys()


@pytest.mark.slow
def test_no_function_needs_ray(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from mbd_core import LLM, grade, prepare, sweep, train\n"
        "rows = [{'prompt': 'a', 'response': 'b'}] * 8\n"
        "data = prepare(rows, 'tiny-mbd', out='data')\n"
        "train('tiny-mbd', base='tiny-bd', data=data, out='model', steps=1, batch_size=2)\n"
        "sweep('model', 'gsm-mini', 'buffer_size=2', methods='multi', limit=1, timed=0, max_tokens=4, out='sweep')\n"
        "print(grade('gsm-mini', [{'doc_id': 0, 'text': 'a'}], limit=1).accuracy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.endswith("0.0\n"), done.stderr
