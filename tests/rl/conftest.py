"""Runs draw their pictures unrendered; `test_progress_picture.py` renders them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def runs_render_nothing(unrendered_pictures: object) -> None:
    """Of every file in this folder."""
