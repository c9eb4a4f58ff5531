"""Samples made by hand, planned and graded, and report rows, for the tests of sweeps, rates, reports and plots."""

import json
from collections.abc import Sequence

import pyarrow as pa

from mbd_core.batch.rows import PLANNED_COLUMNS
from mbd_core.checkpoint.chat import question
from mbd_core.evaluation.measures.rates import GradedSample, SampleCounts
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow, build_rows


def graded_sample(*, tokens: int, forwards: int, correct: bool = True, problem: str = "p") -> GradedSample:
    counts = SampleCounts(
        num_prompt_tokens=5,
        num_tokens=tokens,
        num_forwards=forwards,
        num_store_forwards=1,
        num_prefill_forwards=1,
    )
    return GradedSample(problem=problem, correct=correct, counts=counts)


def report_samples() -> dict[ReportKey, list[GradedSample]]:
    """Two models, two tasks of four problems; the MBD model's configurations tie in accuracy on task a."""
    samples = {}
    for model, method, tau, correct, forwards in (
        ("bd", "SingleBD", 0.9, 4, 10),
        ("mbd", "MBD", 0.9, 3, 5),
        ("mbd", "MBD", 0.7, 3, 4),
    ):
        config = {"block_size": 8, "tau_m2t": tau}
        for task, right in (("a", correct), ("b", correct - 2 * (tau == 0.7))):
            key = ReportKey(model, method, task, json.dumps(config))
            samples[key] = [
                graded_sample(tokens=20, forwards=forwards, correct=i < right, problem=f"{task}/{i}") for i in range(4)
            ]
    return samples


def report_rows() -> list[ReportRow]:
    return build_rows(report_samples())


def planned_samples(models: Sequence[str], *, prompts: Sequence[str], buffer_sizes: Sequence[int] = (1,)) -> pa.Table:
    """Every prompt under every buffer size for every model, at a threshold that random weights reach."""
    rows = [
        {
            "model": model,
            "method": "m",
            "task": "gsm-mini",
            "problem_id": f"p{number}",
            "prompt": prompt,
            "reference": "4",
            "entry_point": "",
            "config": json.dumps({"block_size": 4, "buffer_size": size, "tau_m2t": 0.05}),
            "input": json.dumps(question(prompt)),
            "stop": "[]",
            "max_tokens": 12,
            "may_shorten": False,
            "seed": 0,
        }
        for model in models
        for number, prompt in enumerate(prompts)
        for size in buffer_sizes
    ]
    return pa.Table.from_pylist([{"sample": i, **row} for i, row in enumerate(rows)], schema=PLANNED_COLUMNS)
