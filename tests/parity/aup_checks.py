"""AUP under its two definitions."""

from pathlib import Path
from typing import Any

import pytest

from mbd_core.evaluation.measures.aup import are_kept, aup_d3llm, aup_eq41, sorted_points


def check_aup(folder: Path, case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    points = list(zip(inputs["rho"], inputs["y"], strict=True))
    assert aup_eq41(points) == pytest.approx(expected["plain_trapezoid_eq_4_1"])
    found = aup_d3llm(points, y_max=inputs["y_max"], alpha=inputs["alpha"], y_min_offset=inputs["y_min_offset"])
    if isinstance(expected["aup_d3llm"], int | float):
        assert found == pytest.approx(expected["aup_d3llm"])
    first, curve = min(points)[1], sorted_points(points)
    dropped = curve[~are_kept(curve, y_min_offset=inputs["y_min_offset"])]
    assert set(dropped[:, 1].tolist()) == {y for _, y in points if y < first - inputs["y_min_offset"]}


CHECKS = {("aup", "aup"): check_aup}
