"""Calls that every rank of an engine makes, and agreements between ranks. An engine without a group has one rank.

A method of `Engine` that changes the state of all ranks is marked with `on_all_ranks` or `with_next_step`. Rank 0
sends each call of such a method to the other ranks (`parallel/leader.py`), which repeat it (`parallel/follow.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EngineCall:
    """A call of one of `Engine`'s methods, as it goes from rank 0 to the other ranks.

    waits  whether the call goes with the next step; rank 0 has then made the call already, and no rank can refuse it
    """

    method: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any]
    waits: bool

    def apply(self, engine: "Ordered") -> Any:
        """Make the call on this rank only."""
        method = getattr(type(engine), self.method)
        return getattr(method, "__wrapped__", method)(engine, *self.arguments, **self.named)

    def sent(self) -> Self:
        """The call for the other ranks, without tensors: they take rank 0's tensors one by one (`Ranks.each`)."""
        named = {name: () if _holds_tensors(value) else value for name, value in self.named.items()}
        return replace(self, arguments=tuple(() if _holds_tensors(a) else a for a in self.arguments), named=named)


class Ordered(Protocol):
    """`Engine`, or `ParallelEngine`."""

    def order(self, call: EngineCall) -> Any:
        """Makes a call on every rank."""


E = TypeVar("E", bound=Ordered)
Method = Callable[Concatenate[E, P], R]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def on_all_ranks(method: Method[E, P, R]) -> Method[E, P, R]:
    """Mark a method that all ranks call at once, between two steps.

    All ranks must refuse alike (`ValueError`, `NotEnoughMemory`): the refusal follows from common knowledge of all
    ranks, or from `Ranks.agree`.
    """
    return _ordered(method, waits=False)


def with_next_step(method: Method[E, P, R]) -> Method[E, P, R]:
    """Mark a method that rank 0 calls at once, and the other ranks before the next step."""
    return _ordered(method, waits=True)


def _ordered(method: Method[E, P, R], *, waits: bool) -> Method[E, P, R]:
    @wraps(method)
    def call(engine: E, *arguments: P.args, **named: P.kwargs) -> R:
        result: R = engine.order(EngineCall(method=method.__name__, arguments=arguments, named=named, waits=waits))
        return result

    return call


class Ranks(Protocol):
    """Agreements between the ranks of an engine: `Alone`, or a `parallel.group.Group`. All make the same calls."""

    def agree(self, prepare: Callable[[], T]) -> T:
        """This rank's result of `prepare`, if all ranks succeed; `ValueError` on all ranks if any rank fails."""

    def total(self, value: int) -> int:
        """The sum of the ranks' values."""

    def each(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's tensors by name, one after the other, on every rank; every rank takes them all."""

    def share(self, decide: Callable[[], list[T]]) -> list[T]:
        """The decisions of rank 0's host within a step, on every rank."""


class Alone:
    """The only rank."""

    def agree(self, prepare: Callable[[], T]) -> T:
        return prepare()

    def total(self, value: int) -> int:
        return value

    def each(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return iter(tensors)

    def share(self, decide: Callable[[], list[T]]) -> list[T]:
        return decide()
