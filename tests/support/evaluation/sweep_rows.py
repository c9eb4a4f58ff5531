"""Graded samples and report rows made by hand, for the tests of rates, reports and plots."""

import json

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
