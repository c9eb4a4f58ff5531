"""Parts that Python calls share: options from keywords, refusals of unknown names, remarks, the cluster's name."""

import difflib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar

from mbd_core.fields import ENGINE, Flag, load
from mbd_core.storage.folder import Folder

T = TypeVar("T")
Say = Callable[[str], object]
"""A function that is called with each remark."""
IsolationOption = Annotated[
    Literal["any", "required"],
    Flag(
        "The isolation of graded programs; required: refuse to grade without bubblewrap or Landlock.",
        ENGINE,
        name="--isolation",
    ),
]
OF_VARIABLE = "RAY_ADDRESS"
"""As a cluster's name: the cluster that the variable names, or a new local cluster if the variable is not set."""


def silent(text: str) -> None:
    """Say nothing."""


def options_from(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of options from keywords. Raises `ValueError`, in the words of the commands, for a bad value."""
    return load(kind, {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in values.items()})


def unknown(noun: str, name: str, known: Collection[str]) -> ValueError:
    """The refusal of an unknown name, which suggests the nearest known name."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"is '{nearest[0]}' meant?" if nearest else f"known: {', '.join(sorted(known))}"
    return ValueError(f"unknown {noun} '{name}'; {hint}")


@contextmanager
def folder_of(out: str | os.PathLike[str] | None, *, prefix: str) -> Iterator[Folder]:
    """The folder that a call writes: `out`, or a folder in a new temporary one, which a refused call removes."""
    if out is not None:
        yield Folder.at(os.fspath(out))
        return
    place = tempfile.mkdtemp(prefix=prefix)
    try:
        yield Folder.at(os.path.join(place, "out"))
    except BaseException:
        with suppress(OSError):  # it holds work
            os.rmdir(place)
        raise


def plain_value(value: Any) -> Any:
    """The JSON form of another library's value. Raises `TypeError` if there is none."""
    if hasattr(value, "tolist"):  # of numpy and torch
        return value.tolist()
    if hasattr(value, "isoformat"):  # dates
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection) and not isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no form in JSON")


def ray_address(cluster: str) -> str | None:
    """The address that `cluster.local.connect` takes for a call's `cluster`, `None` for `OF_VARIABLE`.

    Raises `ValueError` if Ray is not installed or `cluster` is not a text.
    """
    if not isinstance(cluster, str) or not cluster:
        raise ValueError(f"cluster={cluster!r} must be an address as host:port, local, auto or {OF_VARIABLE}")
    if find_spec("ray") is None:
        raise ValueError(f"cluster={cluster} needs Ray, which is not installed: install mbd-cluster[ray]")
    return None if cluster == OF_VARIABLE else cluster
