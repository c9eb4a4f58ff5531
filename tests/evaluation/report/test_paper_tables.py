"""The papers' tables beside a sweep's numbers: only where model, decoding and benchmark are equal, judged fairly."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from sweep_rows import graded_sample
from written_sweeps import timed_table

from mbd_core.decoding.blocks.config import read_decoding
from mbd_core.decoding.blocks.methods import METHODS, TABLE_4
from mbd_core.evaluation.measures.speed import speeds
from mbd_core.evaluation.measures.statistics import Interval
from mbd_core.evaluation.measures.summary import AupMean, ReportKey, ReportRow, build_aup, build_rows
from mbd_core.evaluation.report.paper_figures import PAPER_TABLES
from mbd_core.evaluation.report.paper_tables import Own, beside_tables, has_fields, paper_content, paper_section
from mbd_core.tables import markdown

FOUR = ("gsm8k", "math500", "mbpp-plus", "humaneval-plus")


def config(fields: Mapping[str, Any], block_size: int = 32) -> str:
    return json.dumps(asdict(read_decoding({"block_size": block_size, **fields})))


def sweep(
    model: str, fields: Mapping[str, Any], *, right: int, of: int = 100, tasks: tuple[str, ...] = FOUR, **key: str
) -> list[ReportRow]:
    """A model's rows, a math task and a code task decoded alike, TPF 20 / 9."""
    method = key.get("method", "whatever")
    samples = [graded_sample(tokens=20, forwards=9, correct=number < right) for number in range(of)]
    return build_rows({ReportKey(model, method, task, config(fields)): samples for task in tasks})


def beside(rows: list[ReportRow], times: Any = ()) -> dict[str, Any]:
    own = Own.of(rows, build_aup(rows), times)
    return {f"{one['table']}: {one['row']}: {one['head']}": one for one in paper_content(beside_tables(own))}


SINGLE = TABLE_4["LLaDA2-Mini"]["math"]["single"]


def test_a_row_stands_beside_the_paper_s_whatever_its_method_is_called() -> None:
    found = beside(sweep("LLaDA2.0-mini", SINGLE, right=92))
    one = found["MBD-LMs, Table 1: SingleBD (Native): GSM8K Acc ↑"]
    assert (one["printed"], one["ours"], one["n"], one["model"]) == (91.89, 92.0, 100, "LLaDA2-Mini")
    assert one["low"] == pytest.approx(85.0, abs=0.1) and one["high"] == pytest.approx(95.9, abs=0.1)
    assert one["verdict"] == "inside" and one["difference"] == pytest.approx(0.11)
    assert found["MBD-LMs, Table 1: SingleBD (Native): MBPP+ Acc ↑"]["verdict"] == "outside"
    tpf = found["MBD-LMs, Table 1: SingleBD (Native): GSM8K TPF ↑"]
    assert [tpf[name] for name in ("low", "ours", "high")] == pytest.approx([20 / 9] * 3)
    assert tpf["verdict"] == "outside"
    aup = found["MBD-LMs, Table 1: SingleBD (Native): AUP ↑"]
    assert aup["verdict"] == "not judged" and aup["ours"] == pytest.approx(92 * 20 / 9) and aup["low"] is None
    assert not [name for name in found if "Table 3" in name and "TPF" not in name], "nothing was timed"


def test_an_aup_has_its_interval_and_is_not_judged_by_it() -> None:
    rows = sweep("LLaDA2.0-mini", SINGLE, right=80)
    areas = [(aup, aup.d3llm.value) for aup in build_aup(rows)]
    drawn = [replace(aup, d3llm=Interval(value=area, low=area - 20, high=area + 10)) for aup, area in areas]
    mean = AupMean(
        model="LLaDA2.0-mini",
        method="whatever",
        tasks=tuple(sorted(FOUR)),
        eq41=Interval(value=0.0),
        d3llm=Interval(value=areas[0][1], low=areas[0][1] + 1, high=areas[0][1] + 5),
    )
    for others in ([], [replace(mean, tasks=FOUR[:3])], [replace(mean, method="another")]):
        (table, *_) = beside_tables(Own.of(rows, drawn, [], others))
        (aup,) = (one for one in table.rows[0].ours if one is not None and one.quantity == "aup")
        assert aup.low is None and aup.high is None, "its own mean over just these tasks was not drawn"
    (table, *_) = beside_tables(Own.of(rows, drawn, [], [mean]))
    (aup,) = (one for one in table.rows[0].ours if one is not None and one.quantity == "aup")
    assert (aup.low, aup.high) == mean.d3llm.bounds, "the one of the first table, also above the value"
    assert aup.verdict == "not judged"
    text = markdown(paper_section([table], recipe="mbd-lms"))
    assert f"{aup.ours:.2f} [{aup.low:.2f}, {aup.high:.2f}]" in text


def test_an_average_has_the_interval_of_an_average() -> None:
    found = beside(sweep("LLaDA2.0-mini", SINGLE, right=80))
    one, average = (found[f"MBD-LMs, Table 1: SingleBD (Native): {name} Acc ↑"] for name in ("GSM8K", "Average"))
    assert average["ours"] == 80.0 and average["n"] == 400
    assert average["high"] - 80 == pytest.approx((one["high"] - 80) / 2), "of four independent numbers, half as wide"
    assert average["verdict"] == "inside"
    three = beside(sweep("LLaDA2.0-mini", SINGLE, right=80, tasks=FOUR[:3]))
    assert "MBD-LMs, Table 1: SingleBD (Native): GSM8K Acc ↑" in three
    assert not [name for name in three if "Average" in name or "AUP" in name], "not all of its benchmarks are here"


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("LLaDA2.0-mini-preview", SINGLE),
        ("llada2.0-mini", SINGLE),
        ("tiny-bd", SINGLE),
        ("LLaDA2.0-mini", {**SINGLE, "tau_m2t": 0.9}),
        ("LLaDA2.0-mini", {**SINGLE, "t2t": {"tau": 0.5}}),
        ("LLaDA2.0-mini", {**SINGLE, "buffer_size": 3}),
        ("MBD-LLaDA2-Mini", SINGLE),
    ],
)
def test_nothing_is_guessed(model: str, fields: Mapping[str, Any]) -> None:
    rows = sweep(model, fields, right=90)
    own = Own.of(rows, build_aup(rows), [])
    assert beside_tables(own) == []
    lines = markdown(paper_section([], recipe="own")).splitlines()
    assert not any(line.startswith("|") for line in lines)
    assert sum(line.startswith("- ") for line in lines) == len(PAPER_TABLES)
    (table,) = [line for line in lines if line.startswith("- MBD-LMs, Table 1:")]
    assert "LLaDA2.0-mini" in table and "gsm8k, math500, mbpp-plus, humaneval-plus" in table


def test_methods_of_a_canvas_and_of_d2f_are_found_by_what_they_do() -> None:
    rows = sweep("LLaDA-8B-Instruct", METHODS["block-batch"], right=77, tasks=("gsm8k",))
    found = beside(rows)
    assert {name.partition(":")[0] for name in found} == {"BlockBatch, Table 1"}
    nfe = found["BlockBatch, Table 1: BlockBatch: LLaDA-Instruct-8B NFE ↓"]
    assert (nfe["printed"], nfe["ours"], nfe["verdict"]) == (63.2, 9.0, "outside")
    assert found["BlockBatch, Table 1: BlockBatch: LLaDA-Instruct-8B ACC (%) ↑"]["verdict"] == "inside"
    other = {"canvas": {"branches": {"block_lengths": [4, 8]}}}
    assert beside(sweep("LLaDA-8B-Instruct", other, right=77, tasks=("gsm8k",))) == {}
    dual = beside(sweep("LLaDA-8B-Instruct", METHODS["fast-dllm-dual"], right=77, tasks=("gsm8k",)))
    assert {name.rpartition(":")[0] for name in dual} == {
        "BlockBatch, Table 1: Fast-dLLM",
        "D2F, Table 1: Fast-dLLM (Dual-Cache)",
    }
    d2f = {**METHODS["d2f"], "tau_semi": 0.85, "tau_m2t": 0.85, "tau_add": 0.7}
    (score, *_) = beside(sweep("D2F-Dream", d2f, right=74, tasks=("gsm8k",))).values()
    assert (score["table"], score["printed"], score["row"]) == (
        *("D2F, Table 3", 74.2, "tau_act = tau_conf = 0.85, tau_add = 0.7"),
    )


def test_speeds_stand_beside_the_paper_s_and_are_not_judged() -> None:
    rows = sweep("LLaDA2.0-mini", SINGLE, right=92, tasks=("gsm8k",))
    times = speeds(timed_table({**vars(rows[0].key), "problem_id": "p"}).to_pylist())
    one = beside(rows, times)["MBD-LMs, Table 3: LLaDA2-Mini: GSM8K TPS ↑"]
    assert (one["printed"], one["ours"], one["verdict"]) == (344.05, times[0].decode_tps_batch_1, "not judged")


def test_the_markdown_has_each_printed_figure_above_ours_and_the_difference() -> None:
    rows = sweep("LLaDA2.0-mini", SINGLE, right=92)
    tables = beside_tables(Own.of(rows, build_aup(rows), []))
    section = paper_section(tables, recipe="mbd-lms (MBD-LMs)")
    table = next(table for table in section if table.columns)
    assert table.columns[:3] == ("Row", "Of", "GSM8K Acc ↑") and {len(row) for row in table.rows} == {1, 13}
    assert table.rows[0] == ["LLaDA2-Mini (bufsz=2, blksz=32)"]
    assert [row[:3] for row in table.rows[1:]] == [
        ["SingleBD (Native)", "the paper", "91.89"],
        ["SingleBD (Native)", "ours", "92.00 [85.00, 95.89]"],
        ["SingleBD (Native)", "difference", "+0.11, inside"],
    ]
    text = markdown(section)
    assert "Asked here: mbd-lms (MBD-LMs)" in text and "Asked there as by --recipe mbd-lms or mbd-lms-sdar" in text
    assert "\n### MBD-LMs, Table 1\n" in text
    assert "1 of 10 printed figures are inside our 95 % intervals" in text
    assert "- MBD-LMs, Table 2a:" in text and "- MBD-LMs, Table 1:" not in text


def test_fields_are_compared_with_their_parts() -> None:
    assert has_fields({"a": 1, "b": {"c": (1, 2)}}, {"b": {"c": [1, 2]}})
    assert has_fields({"soft": {"stop": 0.9}}, {"soft": {}}) and not has_fields({"soft": None}, {"soft": {}})
    assert not has_fields({"t2t": {"tau": 0.5}}, {"t2t": None}) and has_fields({}, {"t2t": None})


D2F = METHODS["d2f"]
LLADA = METHODS["llada"]["canvas"]


@pytest.mark.parametrize(
    ("model", "fields", "row"),
    [
        ("D2F-Dream", D2F, "D2F, Table 4: tau_act = 0.95, D2F"),
        ("D2F-Dream", {**D2F, "tau_m2t": 0.3}, ""),
        ("D2F-Dream", {**D2F, "tau_add": 0.7}, ""),
        ("D2F-Dream", {**D2F, "buffer_size": 1}, ""),
        ("LLaDA-8B-Instruct", {"canvas": LLADA}, "BlockBatch, Table 1: Vanilla"),
        ("LLaDA-8B-Instruct", {"canvas": {**LLADA, "score": "random"}}, ""),
        ("LLaDA-8B-Instruct", {"canvas": {**LLADA, "steps": 64}}, ""),
        ("LLaDA-8B-Instruct", {"canvas": {**LLADA, "cfg_scale": 1.5}}, ""),
        ("LLaDA-8B-Instruct", {"canvas": {**LLADA, "score_temperature": 0.5}}, ""),
        ("Dream-v0-Base-7B", {"canvas": {**METHODS["dream-entropy"]["canvas"], "steps": 64}}, ""),
    ],
)
def test_what_the_paper_says_of_a_row_elsewhere_counts_too(model: str, fields: Mapping[str, Any], row: str) -> None:
    found = beside(sweep(model, fields, right=50, tasks=("gsm8k" if row or "D2F" not in model else "mbpp",)))
    assert {name.rpartition(":")[0] for name in found if "Table 3" not in name} == ({row} if row else set())
