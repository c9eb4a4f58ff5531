"""The project without Ray. Its front door is `from mbd_core import LLM, prepare, train, sweep, grade`.

These names are defined a floor above, in `jobs/api`, and are imported at their first use: `import mbd_core` takes no
time, and no room of `mbd_core` imports them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.api.grading import grade
    from jobs.api.llm import LLM
    from jobs.api.preparing import prepare
    from jobs.api.sweeping import sweep
    from jobs.api.training import train

__all__ = ["LLM", "grade", "prepare", "sweep", "train"]

PLACES = {
    "LLM": "jobs.api.llm",
    "grade": "jobs.api.grading",
    "prepare": "jobs.api.preparing",
    "sweep": "jobs.api.sweeping",
    "train": "jobs.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
