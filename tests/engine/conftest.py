"""How tests of tensor parallelism start the other ranks."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from warm_python import WarmPython

from mbd_core.engine.parallel import followers


@pytest.fixture(scope="module")
def warm_followers() -> Iterator[None]:
    """Ranks that have torch imported when they start; how they start otherwise is tested in `parallel`."""
    names = {"Popen": WarmPython, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(followers, "subprocess", SimpleNamespace(**names))
        yield
