"""The project without Ray. Its front door is `from mbd_core import LLM, prepare, train, sweep, grade`.

These names live a floor above, in `mbd_api`, and are imported when they are asked for: `import mbd_core` takes no
time, and no room of `mbd_core` knows them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mbd_api.grading import grade
    from mbd_api.llm import LLM
    from mbd_api.preparing import prepare
    from mbd_api.sweeping import sweep
    from mbd_api.training import train

__all__ = ["LLM", "grade", "prepare", "sweep", "train"]

PLACES = {
    "LLM": "mbd_api.llm",
    "grade": "mbd_api.grading",
    "prepare": "mbd_api.preparing",
    "sweep": "mbd_api.sweeping",
    "train": "mbd_api.training",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
