"""The sentences of `third-person` come from one package of the standard library: to parse all of it takes seconds."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from research.real import data


@pytest.fixture(scope="module", autouse=True)
def sentences_of_a_package() -> Iterator[None]:
    folder = str(Path(sysconfig.get_path("stdlib")) / "email")
    data._imperatives.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: folder)
        data._imperatives()
    yield
    data._imperatives.cache_clear()
