"""The benchmarks: what is loaded, what is extracted, what counts as a pass, and what a sweep is made of."""

import gzip
import itertools
import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.evaluation.extraction import flexible_number, parse_number, same_number, strict_number
from mbd_core.evaluation.graders import grade
from mbd_core.evaluation.grid import Variant, parse_grid, parse_methods, plan_variants
from mbd_core.evaluation.problem_set import DEFAULT_LIMIT, load_problems
from mbd_core.evaluation.sandbox import Limits, run_tests
from mbd_core.evaluation.tasks import TASKS, Problem, find_task
from mbd_core.tasks import code_mini, gsm_mini

QUICK = Limits(wall_seconds=5.0, cpu_seconds=1)
TEST = "def check(candidate):\n    assert candidate(2) == 3\n"
GOOD_MATH = {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
GOOD_CODE = {"task_id": "x/0", "prompt": "def f(x):\n", "test": TEST, "entry_point": "f"}


def write_rows(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- loading --------------------------------------------------------------------------------------------------------


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
        ("gsm8k", b"[1]", "a list, not a JSON object"),
        ("gsm8k", b'{"question": "q"}', "no column 'answer'"),
        ("gsm8k", b'{"question": 1, "answer": "#### 2"}', "column 'question' must be text, not int"),
        ("gsm8k", b'{"question": "q", "answer": "two"}', "must end in '#### '"),
        ("gsm8k", b'{"question": "q", "answer": "#### 1.2.3"}', "must end in '#### '"),
        ("gsm8k", b'{"question": "\xff", "answer": "#### 1"}', "not UTF-8"),
        ("humaneval", json.dumps({**GOOD_CODE, "entry_point": "f()"}).encode(), "must be a function's name"),
        ("humaneval", json.dumps(GOOD_CODE).encode(), "'x/0' is already on line 1"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_reason(tmp_path: Path, task: str, bad: bytes, reason: str) -> None:
    good = GOOD_MATH if task == "gsm8k" else GOOD_CODE
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(good).encode() + b"\n\n" + bad + b"\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: ") as caught:
        load_problems(find_task(task), data=str(path), limit=1)
    assert reason in str(caught.value)


def test_files_that_hold_nothing_or_are_not_there(tmp_path: Path) -> None:
    task = find_task("gsm8k")
    empty, damaged = tmp_path / "empty.jsonl", tmp_path / "cut.jsonl.gz"
    empty.write_text("\n")
    damaged.write_bytes(gzip.compress(json.dumps(GOOD_MATH).encode() * 50)[:-12])
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no problems"):
        load_problems(task, data=str(empty))
    with pytest.raises(ValueError, match="damaged gzip data"):
        load_problems(task, data=str(damaged))
    with pytest.raises(ValueError, match=r"missing\.jsonl cannot be read"):
        load_problems(task, data=str(tmp_path / "missing.jsonl"))


def test_what_a_task_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="unknown task 'gsm'; known: gsm-mini, code-mini, gsm8k, humaneval"):
        find_task("gsm")
    with pytest.raises(ValueError, match="needs a JSON-lines file"):
        load_problems(find_task("gsm8k"))
    with pytest.raises(ValueError, match="takes no data file"):
        load_problems(find_task("gsm-mini"), data="x.jsonl")
    with pytest.raises(ValueError, match="limit=0"):
        load_problems(find_task("gsm-mini"), limit=0)


# -- extraction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7", "7"),
        ("#### $1,234.\nand then 5 more", "$1,234.", "5"),
        ("#### 1\n#### 2", "1", "2"),
        ("#### -3.50", "-3.50", "-3.50"),
        ("It costs $0.75, not a cent more.", None, "$0.75"),
        ("#### none", None, None),
        ("", None, None),
    ],
)
def test_one_number_by_each_rule(text: str, strict: str | None, flexible: str | None) -> None:
    assert strict_number(text) == strict
    assert flexible_number(text) == flexible


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_a_number_is_the_same_however_it_is_written(value: int, zeros: int) -> None:
    tail = "." + "0" * zeros
    for written in (str(value), f"{value:,}", f"{value:,}{tail}", f"{value}{tail}"):
        assert parse_number(written) == Fraction(value)
        assert strict_number(f"x\n#### {written}") == written
        assert same_number(written, f"{value}")
        assert not same_number(written, f"{value + 1}")
        assert not same_number(written, f"{value}.0000000000000000001")


@pytest.mark.parametrize("written", [None, "", ".", "-", "1e3", "1/2", "1.2.3", "٣", "1_0"])
def test_what_is_no_number_equals_nothing(written: str | None) -> None:
    assert parse_number(written) is None
    assert not same_number(written, written or "")


# -- grading --------------------------------------------------------------------------------------------------------


def test_every_generated_answer_is_right_and_another_problem_s_is_not() -> None:
    for name, module, column in (("gsm-mini", gsm_mini, "answer"), ("code-mini", code_mini, "canonical_solution")):
        rows = itertools.islice(module.generate(split="test", seed=1), 6)
        drawn = load_problems(TASKS[name], seed=1, limit=6)
        for problem, row in zip(drawn.problems, rows, strict=True):
            assert grade(drawn.task, problem, row[column]).correct
            assert not grade(drawn.task, problem, "    return None\n").correct


def test_the_task_s_rule_decides_and_both_extractions_are_kept() -> None:
    problem = Problem(problem_id="p", prompt="?", reference="5")
    found = {name: grade(TASKS[name], problem, "first 4\n#### 4\nor 5") for name in ("gsm-mini", "gsm8k")}
    assert (found["gsm-mini"].correct, found["gsm8k"].correct) == (False, True)
    for result in found.values():
        assert (result.strict, result.flexible) == ("4", "5")
        assert (result.strict_correct, result.flexible_correct) == (False, True)


FORGERY = (
    "    import os\n    for fd in range(3, 40):\n        try:\n"
    '            os.write(fd, b\'{"marker": "", "reason": "passed", "detail": ""}\')\n'
    "        except OSError:\n            pass\n    os._exit(0)\n"
)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return x + 1\n", "passed"),
        ("    return x\n", "wrong"),
        ("    raise SystemExit(0)\n", "error"),
        ("    import sys; sys.exit()\n", "error"),
        ("    import os; os._exit(0)\n", "error"),
        ("    print('passed', flush=True); import os; os._exit(0)\n", "error"),
        (FORGERY, "error"),
        ("    import atexit, os; atexit.register(os._exit, 0); return x\n", "wrong"),
        ("    return (\n", "error"),
        ("    return undefined\n", "error"),
        ("    import os; os.kill(os.getpid(), 11)\n", "error"),
        ("    return bytearray(1 << 34)\n", "memory"),
        ("    while True: pass\n", "timeout"),
    ],
)
def test_how_a_candidate_ends_decides(body: str, reason: str) -> None:
    assert run_tests("def f(x):\n" + body, test=TEST, entry_point="f", limits=QUICK).reason == reason


def test_ending_the_process_before_the_tests_is_no_pass() -> None:
    program = "def f(x):\n    return x + 1\nraise SystemExit\n"
    assert run_tests(program, test=TEST, entry_point="f", limits=QUICK).reason == "error"
    assert run_tests("def g(x): return 3\n", test=TEST, entry_point="f", limits=QUICK).reason == "error"


def test_a_candidate_has_no_stdin_no_environment_and_a_folder_of_its_own() -> None:
    program = (
        "import os, sys\ndef f(x):\n    open('mine', 'w').write('x')\n"
        "    clean = sys.stdin.read() == '' and set(os.environ) <= {'PATH', 'LC_CTYPE'}\n"
        "    return 3 if clean and os.listdir() == ['mine'] else 0\n"
    )
    assert run_tests(program, test=TEST, entry_point="f", limits=QUICK).reason == "passed"
    assert not Path("mine").exists()


def test_a_time_out_ends_the_candidate_s_children_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, time\ndef f(x):\n    pid = os.fork()\n"
        f"    if pid: open({str(note)!r}, 'w').write(str(pid))\n    time.sleep(60)\n"
    )
    started = time.perf_counter()
    limits = Limits(wall_seconds=1.5)
    assert run_tests(program, test=TEST, entry_point="f", limits=limits).reason == "timeout"
    assert time.perf_counter() - started < 20
    assert _has_ended(int(note.read_text()))


def _has_ended(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


# -- the sweep's configurations -------------------------------------------------------------------------------------

DEFAULTS = {"tau_m2t": 0.9, "buffer_size": 1, "trained_with": "teacher_forcing", "eos_token_id": [1]}


def variants(text: str, *methods: str, **defaults: object) -> list[Variant]:
    return plan_variants(parse_grid(text), methods, defaults={**DEFAULTS, **defaults}, block_size=8)


def test_the_grid_is_a_product_of_which_single_takes_its_own_fields() -> None:
    planned = variants("tau_m2t=0.7,0.8;buffer_size=2,4;tau_add=0.1,0.2", "single", "multi")
    settings = [(v.method, v.decoding.buffer_size, v.decoding.tau_m2t, v.decoding.tau_add) for v in planned]
    multi = {("MultiBD (training-free)", n, m, a) for n in (2, 4) for m in (0.7, 0.8) for a in (0.1, 0.2)}
    assert set(settings) == {("SingleBD", 1, 0.7, 0.1), ("SingleBD", 1, 0.8, 0.1)} | multi
    assert len(settings) == len(set(settings)) == 10


def test_the_label_says_how_the_model_was_trained() -> None:
    assert variants("buffer_size=2", "multi", trained_with="multitf")[0].method == "MBD"
    assert variants("buffer_size=2", "multi", trained_with=None)[0].method == "MultiBD"
    with pytest.raises(ValueError, match="unknown trained_with='other'"):
        variants("buffer_size=2", "multi", trained_with="other")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tau=0.7", "unknown grid field 'tau'; known: block_size, buffer_size"),
        ("tau_m2t", "has no values"),
        ("tau_m2t=high", "tau_m2t=high is not a number"),
        ("buffer_size=2.5", "buffer_size=2.5 is not a whole number"),
        ("tau_m2t=0.7;tau_m2t=0.8", "given twice"),
        ("tau_m2t=1.5;buffer_size=2", "tau_m2t=1.5 must be a number from 0 to 1"),
        ("buffer_size=1", "needs buffer_size of at least 2"),
        ("t2t=0.5", "'t2t' is a part; vary one of its fields, t2t.NAME"),
        ("t2t.tau=0.5", "grid field 't2t.tau' concerns none of the methods multi; define one: --method NAME="),
        ("t2t.theta=0.5", "unknown grid field 't2t.theta'; known: tau, max_edits"),
        ("tau_m2t.tau=0.5", "unknown grid field 'tau_m2t.tau'; parts here: t2t, soft, canvas"),
        ("t2t.max_edits=2.5", "t2t.max_edits=2.5 is not a whole number"),
        ("prefix_cache=1", "prefix_cache=1 must be true or false"),
        ("canvas.branches.block_lengths=4,8", "is a list; give it with --method"),
        ("block_size=4;buffer_size=2", "the model has 8"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        variants(text, "multi")


def test_an_unknown_method_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown method 'double'; known: single, multi"):
        variants("buffer_size=2", "double")


def planned(grid: str, *given: str, defaults: dict[str, object] | None = None) -> list[Variant]:
    """What is run of methods given as NAME=JSON, or by name alone."""
    methods = parse_methods([g for g in given if "=" in g])
    names = [g.partition("=")[0] for g in given]
    return plan_variants(
        parse_grid(grid), names, methods=methods, defaults={**DEFAULTS, **(defaults or {})}, block_size=8
    )


def test_a_grid_reaches_into_the_parts_of_the_methods_that_have_them() -> None:
    found = planned(
        "t2t.tau=0.3,0.5;tau_m2t=0.6,0.7;buffer_size=2",
        "single",
        "multi",
        'edit={"t2t": {"max_edits": 3}, "buffer_size": 1}',
        "multi-bd-t2t",
    )
    by_method = {v.method: [w.decoding for w in found if w.method == v.method] for v in found}
    assert {name: len(of) for name, of in by_method.items()} == {
        "SingleBD": 2,
        "MultiBD (training-free)": 2,
        "edit": 4,
        "multi-bd-t2t": 4,
    }
    edit = {(d.t2t.tau, d.t2t.max_edits, d.tau_m2t, d.buffer_size) for d in by_method["edit"] if d.t2t is not None}
    assert edit == {(tau, 3, m2t, 1) for tau in (0.3, 0.5) for m2t in (0.6, 0.7)}
    assert {d.buffer_size for d in by_method["multi-bd-t2t"]} == {2}
    assert all(d.t2t is None for name in ("SingleBD", "MultiBD (training-free)") for d in by_method[name])


def test_a_canvas_is_varied_in_its_own_fields_only() -> None:
    (single, *leaps) = planned(
        "canvas.leap.radius=2,4;canvas.tau=0.8;tau_m2t=0.9", "single", "local-leap", 'fast={"canvas": {}}'
    )
    assert single.decoding.canvas is None
    assert [(v.method, v.decoding.canvas and v.decoding.canvas.tau) for v in leaps] == [
        ("local-leap", 0.8),
        ("local-leap", 0.8),
        ("fast", 0.8),
    ]
    radii = [v.decoding.canvas.leap.radius for v in leaps if v.decoding.canvas and v.decoding.canvas.leap]
    assert radii == [2, 4]


def test_the_model_s_own_editing_can_be_varied_and_switched_off() -> None:
    defaults: dict[str, object] = {"t2t": {"tau": 0.4, "max_edits": 5}, "buffer_size": 2}
    (multi,) = planned("t2t.tau=0.7", "multi", defaults=defaults)
    assert multi.decoding.t2t is not None
    assert (multi.decoding.t2t.tau, multi.decoding.t2t.max_edits, multi.decoding.buffer_size) == (0.7, 5, 2)
    (off,) = planned("", 'off={"t2t": null}', defaults=defaults)
    assert (off.method, off.decoding.t2t) == ("off", None)


def test_multi_has_several_slots_also_where_the_model_recommends_one() -> None:
    assert [v.decoding.buffer_size for v in variants("", "multi")] == [4]
    assert [v.decoding.buffer_size for v in variants("", "multi", buffer_size=2)] == [2]
    assert [v.decoding.tau_stable for v in planned("tau_stable=none,0.5", "dmax")] == [None, 0.5]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("edit", "must be NAME=JSON"),
        ("={}", "must be NAME=JSON"),
        ("a,b={}", "without a comma"),
        ("single={}", "this name is taken"),
        ("MBD={}", "this name is taken"),
        ("edit={t2t}", "is not valid JSON"),
        ("edit=[1]", "must be a JSON object"),
    ],
)
def test_a_method_that_cannot_be_read_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_methods([given])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('edit={"t2t": {"tau": "x"}}', "method 'edit': t2t.tau='x' must be a number"),
        ('edit={"tau": 1}', "method 'edit': unknown decoding field 'tau'"),
        ('both={"t2t": {}, "soft": {}}', "method 'both': t2t and soft are two ways"),
    ],
)
def test_a_method_that_cannot_be_run_is_refused_by_name(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        planned("", given)
