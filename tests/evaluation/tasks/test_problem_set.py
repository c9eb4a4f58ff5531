"""Problems drawn from a generator or read from a file, and what a damaged file is refused with."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import DEFAULT_LIMIT, load_problems
from mbd_core.tasks import code_mini

TEST = "def check(candidate):\n    assert candidate(2) == 3\n"
GOOD_MATH = {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
GOOD_CODE = {"task_id": "x/0", "prompt": "def f(x):\n", "test": TEST, "entry_point": "f"}


def write_rows(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["gsm-mini", "code-mini"])
def test_generated_task_is_repeatable_and_its_splits_share_no_problem(name: str) -> None:
    task = find_task(name)
    test = load_problems(task, seed=3, limit=60)
    assert test == load_problems(task, seed=3, limit=60)
    assert test.sha256 != load_problems(task, seed=4, limit=60).sha256
    assert len({p.problem_id for p in test.problems}) == 60
    train = load_problems(task, split="train", seed=3, limit=200)
    assert not {p.prompt for p in test.problems} & {p.prompt for p in train.problems}
    assert len(load_problems(task).problems) == DEFAULT_LIMIT


def test_a_file_reads_the_same_plain_gzipped_and_by_url(tmp_path: Path) -> None:
    rows = [{**GOOD_CODE, "task_id": f"x/{i}", "extra": i} for i in range(3)]
    plain = write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    task = find_task("humaneval")
    problems = load_problems(task, data=plain).problems
    assert problems == load_problems(task, data=plain + ".gz").problems
    assert problems == load_problems(task, data=f"file://{plain}").problems
    assert [p.problem_id for p in problems] == ["x/0", "x/1", "x/2"]
    assert load_problems(task, data=plain, limit=2).problems == problems[:2]


def test_code_mini_rows_in_a_file_are_a_humaneval_file(tmp_path: Path) -> None:
    rows = list(itertools.islice(code_mini.generate(split="test", seed=0), 3))
    read = load_problems(find_task("humaneval"), data=write_rows(tmp_path / "c.jsonl", rows)).problems
    drawn = load_problems(find_task("code-mini"), limit=3).problems
    assert [(p.prompt, p.reference, p.entry_point) for p in read] == [
        (p.prompt, p.reference, p.entry_point) for p in drawn
    ]


@pytest.mark.parametrize(
    ("task", "bad", "reason"),
    [
        ("gsm8k", b"{not json", "not valid JSON"),
        ("gsm8k", b'{"question": "\\ud800"}', "half of a surrogate pair"),
        ("gsm8k", b'{"question": ' + b"7" * 6000 + b"}", "an integer of more than 4,300 digits"),
        ("gsm8k", b"[" * 100_000, "nested too deeply"),
        ("gsm8k", b"[1]", "a list, not a JSON object"),
        ("gsm8k", b'{"question": "q"}', "no column 'answer'"),
        ("gsm8k", b'{"question": 1, "answer": "#### 2"}', "column 'question' must be text, not int"),
        ("gsm8k", b'{"question": "q", "answer": "two"}', "must end in '#### '"),
        ("gsm8k", b'{"question": "q", "answer": "#### 1.2.3"}', "must end in '#### '"),
        ("gsm8k", b'{"question": "q", "answer": "#### 1/2"}', "a decimal number, not '1/2'"),
        ("gsm8k", b'{"question": "q", "answer": "#### 1 000"}', "a decimal number, not '1 000'"),
        ("gsm8k", b'{"question": "\xff", "answer": "#### 1"}', "not UTF-8"),
        ("humaneval", json.dumps({**GOOD_CODE, "entry_point": "f()"}).encode(), "must be a function's name"),
        ("humaneval", json.dumps(GOOD_CODE).encode(), "'x/0' is already on line 1"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_reason(tmp_path: Path, task: str, bad: bytes, reason: str) -> None:
    good = GOOD_MATH if task == "gsm8k" else GOOD_CODE
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(good).encode() + b"\n\n" + bad + b"\n")
    with pytest.raises(ValueError, match="line 3") as caught:
        load_problems(find_task(task), data=str(path), limit=1)
    assert reason in str(caught.value)


def test_a_solution_s_last_mark_has_its_number(tmp_path: Path) -> None:
    answers = ["#### 1. Add\n2 + 2 = 4\n#### 4", "#### $1,200.50 a week", "#### 110\nThe answer is: 110", "####7 \n"]
    data = write_rows(tmp_path / "rows.jsonl", [{"question": "q", "answer": answer} for answer in answers])
    found = [problem.reference for problem in load_problems(find_task("gsm8k"), data=data).problems]
    assert found == ["4", "$1,200.50", "110", "7"]


def test_files_that_hold_nothing_or_are_not_there(tmp_path: Path) -> None:
    task = find_task("gsm8k")
    empty, damaged = tmp_path / "empty.jsonl", tmp_path / "cut.jsonl.gz"
    empty.write_text("\n")
    damaged.write_bytes(gzip.compress(json.dumps(GOOD_MATH).encode() * 50)[:-12])
    with pytest.raises(ValueError):
        load_problems(task, data=str(empty))
    with pytest.raises(ValueError):
        load_problems(task, data=str(damaged))
    with pytest.raises(ValueError, match="missing"):
        load_problems(task, data=str(tmp_path / "missing.jsonl"))


def test_what_a_task_cannot_be_given() -> None:
    with pytest.raises(ValueError):
        load_problems(find_task("gsm8k"))
    with pytest.raises(ValueError):
        load_problems(find_task("gsm-mini"), data="x.jsonl")
    with pytest.raises(ValueError, match="limit=0"):
        load_problems(find_task("gsm-mini"), limit=0)
