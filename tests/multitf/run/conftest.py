"""Runs draw their pictures unrendered; `test_run_log.py` renders them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def runs_render_nothing(unrendered_pictures: object) -> None:
    """Of every file in this folder."""
