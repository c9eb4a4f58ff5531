"""The shard of a sweep: the parts that one of several jobs computes."""

from typing import Annotated

from mbd_core.fields import Ge, configuration


@configuration()
class SweepShard:
    """The part of a sweep that one of several jobs computes: every `count`-th part, from the `index`-th, from 1."""

    index: Annotated[int, Ge(1)] = 1
    count: Annotated[int, Ge(1)] = 1

    @classmethod
    def parse(cls, text: str) -> "SweepShard":
        """`i/n`; `ValueError` for anything else."""
        first, slash, second = text.partition("/")
        if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
            raise ValueError(f"--shard {text} must be i/n, the i-th of n shards, i from 1 to n")
        return cls(index=int(first), count=int(second))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, number: int) -> bool:
        """Whether the part with this number belongs to this shard."""
        return number % self.count == self.index - 1
