"""What the host keeps of each buffer row, in arrays: a step's own work is then the same for one row and for many.

Shape legend: R rows (sequences), K kinds of work.
"""

from collections.abc import Sequence as Seq

import numpy as np

from mbd_core.engine.report import Report
from mbd_core.engine.sequence import Sequence
from mbd_core.types import Request

WORK = ("draws", "scores", "softens", "revises", "quotas")


def work_of(request: Request) -> tuple[bool, ...]:
    """Which of `WORK` a request asks of a step."""
    decoding = request.decoding
    return (
        request.sampling.temperature > 0,
        decoding.fallback not in ("confidence", "leftmost"),
        decoding.soft is not None,
        decoding.revises,
        decoding.tokens_per_step > 1,
    )


class Ledger:
    """Counts of the sequences that decode in blocks, by row, and what they ask of a step.

    num_asked_R  positions whose logits a row's next forward may ask for, at most
    most_R       the positions of its whole buffer
    """

    def __init__(self, num_rows: int, *, block_size: int) -> None:
        self._block_size = block_size
        self._work_RK = np.zeros((num_rows, len(WORK)), dtype=bool)
        self.num_asked_R = np.zeros(num_rows, dtype=np.int64)
        self.most_R = np.zeros(num_rows, dtype=np.int64)
        self._num_forwards_R = np.zeros(num_rows, dtype=np.int64)
        self._num_store_forwards_R = np.zeros(num_rows, dtype=np.int64)
        self._seconds_R = np.zeros(num_rows)

    def seat(self, sequence: Sequence) -> None:
        """A sequence takes its row of the buffer."""
        row = sequence.row
        self._work_RK[row] = work_of(sequence.request)
        self.num_asked_R[row] = self.most_R[row] = sequence.window

    def count(self, rows: Seq[int], report: Report, seconds: float) -> None:
        """A step of `seconds` in which `rows` took part."""
        at = np.asarray(rows, dtype=np.int64)
        self._num_forwards_R[at] += 1
        self._num_store_forwards_R[at] += report.storing_only_R[at] > 0
        self._seconds_R[at] += seconds
        self.num_asked_R[at] = report.num_asked_R[at]

    def leave(self, sequence: Sequence) -> None:
        """A sequence leaves its row and takes its counts along."""
        row = sequence.row
        sequence.num_forwards += int(self._num_forwards_R[row])
        sequence.num_store_forwards += int(self._num_store_forwards_R[row])
        sequence.decode_seconds += float(self._seconds_R[row])
        for kept in (self._num_forwards_R, self._num_store_forwards_R, self._seconds_R):
            kept[row] = 0
        self._work_RK[row] = False
        self.num_asked_R[row] = self.most_R[row] = 0

    def work(self) -> dict[str, bool]:
        """Which of `WORK` some row asks for."""
        return {kind: bool(self._work_RK[:, column].any()) for column, kind in enumerate(WORK)}

    def asks_at_most(self, *, unread: int) -> int:
        """Positions whose logits the next forward of all rows may ask for, `unread` steps being under way: each of
        them may open one block more."""
        return int(np.minimum(self.num_asked_R + unread * self._block_size, self.most_R).sum())
