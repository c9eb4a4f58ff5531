"""Running ahead: a static step is launched before the results of the step before it are read.

    host    plan 1, launch 1 | plan 2, launch 2 | read 1, emit 1 | plan 3, launch 3 | read 2, emit 2 | ...
    device                   [ step 1 ................][ step 2 ..................][ step 3 ....... ]

The host plans step 2 without knowing what step 1 commits. That is safe when no sequence waits to be seated and every
sequence has pages for whatever both steps can fill (`unread` in `Ledger`). A sequence that ends in step 1 takes part
in step 2 without effect, and its share of step 2 is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from mbd_core.engine.schedule.scheduler import PrefillChunk
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.report import HostCopy


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Who takes part in a step: sequences whose blocks are decoded, by batch row, and prompt chunks to be stored.

    max_blocks  the blocks that adaptive requests may grow to in this step
    """

    number: int
    decoding: Mapping[int, SequenceState]
    chunks: list[PrefillChunk]
    kind: StepKind
    max_blocks: int
    started_at: float


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step whose device part has been launched.

    report   of the sequences that decode in blocks
    planned  the planned rows' logits (A, V), or the results of the decoders that read them
    experts  of the sequences that record experts, as `experts_of` gives them
    """

    plan: StepPlan
    report: HostCopy | None
    planned: Tensor | list[Any] | None = None
    experts: list[tuple[SequenceState, int, np.ndarray]] = field(default_factory=list)


class StepAhead:
    """The step that was launched and is not read yet, if there is one.

    num_ahead  number of steps that were launched before the previous step was read
    """

    def __init__(self) -> None:
        self.step: LaunchedStep | None = None
        self.num_ahead = 0

    @property
    def unread(self) -> int:
        """Steps whose results the host does not know: 0 or 1."""
        return int(self.step is not None)

    def take(self) -> LaunchedStep | None:
        """Returns the step to be read now; afterwards no step is ahead."""
        step, self.step = self.step, None
        return step

    def put(self, step: LaunchedStep) -> LaunchedStep | None:
        """Lets `step` run ahead; returns the step that ran ahead so far, which is to be read now."""
        self.num_ahead += self.unread
        previous, self.step = self.step, step
        return previous
