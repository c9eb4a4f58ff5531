"""Which step a batch needs: how many batch rows, how many logits, and which work. A CUDA graph serves one kind.

Static steps come in few kinds, so that few graphs are captured: a power of two of batch rows, and logits for a
quarter, a half, three quarters or all of the buffer's positions.
"""

from dataclasses import dataclass, fields

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import Request
from mbd_core.decoding.sampling import Sampling


@dataclass(frozen=True)
class Work:
    """Which optional parts of a step some batch row needs; a step that does more than a row needs does not change it.

    draws      tokens are drawn (temperature above 0)
    truncates  they are drawn from a part of the vocabulary (top_k or top_p), which takes a sort
    scores     the fallback ranks positions by something else than confidence
    softens    filled positions are embedded as a mixture (DMax)
    revises    filled positions may change (T2T, DMax)
    quotas     a forward has to fill more than one position
    """

    draws: bool = False
    truncates: bool = False
    scores: bool = False
    softens: bool = False
    revises: bool = False
    quotas: bool = False

    def covers(self, other: "Work") -> bool:
        """Whether every part that `other` has is done here too."""
        return all(getattr(self, f.name) >= getattr(other, f.name) for f in fields(Work))


WORK_NAMES = tuple(f.name for f in fields(Work))
ALL_WORK = Work(**dict.fromkeys(WORK_NAMES, True))


def work_of(decoding: DecodingConfig, sampling: Sampling) -> Work:
    """What a request asks of each of its steps."""
    return Work(
        draws=sampling.draws,
        truncates=sampling.truncates,
        scores=decoding.ranks_by_score,
        softens=decoding.soft is not None,
        revises=decoding.revises,
        quotas=decoding.tokens_per_step > 1,
    )


def work_of_request(request: Request) -> Work:
    return work_of(request.decoding, request.sampling)


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What a step depends on beside the values in its buffers. `num_asked`: positions with logits, `None`: all."""

    num_rows: int
    num_asked: int | None
    work: Work

    def covers(self, other: "StepKind") -> bool:
        """Whether a step of this kind can stand in for one of `other`."""
        enough = self.num_asked is None or (other.num_asked is not None and self.num_asked >= other.num_asked)
        return self.num_rows == other.num_rows and enough and self.work.covers(other.work)


@dataclass(frozen=True, kw_only=True)
class StepKinds:
    """The kinds of steps of one engine's Block Buffer."""

    max_rows: int
    num_slots: int
    block_size: int
    batch_invariant: bool

    def kind(self, *, num_rows: int, num_asked: int, work: Work) -> StepKind:
        """The least kind for a batch that uses `num_rows` rows and asks for at most `num_asked` positions."""
        rows = min(1 << (max(num_rows, 1) - 1).bit_length(), self.max_rows)
        quarters = max(1, -(-num_asked // self._quarter(rows)))
        everything = quarters > 3 or self.batch_invariant
        return StepKind(num_rows=rows, num_asked=None if everything else quarters * self._quarter(rows), work=work)

    def to_capture(self, decoding: DecodingConfig) -> list[StepKind]:
        """The kinds worth a graph: greedy requests with `decoding` in every size, and all work in the largest, which
        serves any other request too."""
        plain = work_of(decoding, Sampling())
        kinds: list[StepKind] = []
        for rows in sorted({self.kind(num_rows=n, num_asked=1, work=plain).num_rows for n in self._all_rows}):
            most = rows * decoding.buffer_size * self.block_size
            sizes = range(1, most + 1, self._quarter(rows))
            kinds += dict.fromkeys(self.kind(num_rows=rows, num_asked=n, work=plain) for n in (*sizes, most))
            kinds.append(StepKind(num_rows=rows, num_asked=None, work=ALL_WORK))
        return kinds

    @property
    def _all_rows(self) -> range:
        return range(1, self.max_rows + 1)

    def _quarter(self, num_rows: int) -> int:
        return -(-num_rows * self.num_slots * self.block_size // 4)
