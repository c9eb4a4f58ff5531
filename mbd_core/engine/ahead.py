"""Running ahead: a static step is launched before the results of the one before are read.

    host    plan 1, launch 1 | plan 2, launch 2 | read 1, emit 1 | plan 3, launch 3 | read 2, emit 2 | ...
    device                   [ step 1 ................][ step 2 ..................][ step 3 ....... ]

The host plans step 2 without knowing what step 1 commits. That is safe when nobody is to be seated and every sequence
has pages for whatever both steps can fill (`unread` in `Ledger`). What ends in step 1 takes part in step 2 without
effect, and its share of step 2 is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mbd_core.engine.scheduler import PrefillChunk
from mbd_core.engine.sequence import SequenceState
from mbd_core.engine.step_kind import StepKind
from mbd_core.engine.step_report import HostCopy


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Who takes part in a step: sequences whose blocks are decoded, by batch row, and prompt chunks to be stored.

    max_blocks  the blocks that adaptive requests may grow to in it
    """

    number: int
    decoding: Mapping[int, SequenceState]
    chunks: list[PrefillChunk]
    kind: StepKind
    max_blocks: int
    started: float


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step whose device part has been launched: a report on those who decode in blocks, the canvases' logits."""

    plan: StepPlan
    report: HostCopy | None
    canvas_logits_AV: Tensor | None = None


class StepAhead:
    """The step that was launched and is not read yet, if there is one.

    num_ahead  steps launched before the one before was read
    """

    def __init__(self) -> None:
        self.step: LaunchedStep | None = None
        self.num_ahead = 0

    @property
    def unread(self) -> int:
        """Steps whose results the host does not know: 0 or 1."""
        return int(self.step is not None)

    def take(self) -> LaunchedStep | None:
        """The step to be read now; nothing is ahead then."""
        step, self.step = self.step, None
        return step

    def put(self, step: LaunchedStep) -> LaunchedStep | None:
        """`step` runs ahead from now on; the one that did is to be read now."""
        self.num_ahead += self.unread
        previous, self.step = self.step, step
        return previous
