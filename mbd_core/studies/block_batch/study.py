"""What the BlockBatch study knows of its prompts: outputs, forwards, branches, and the caches of the watched ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbd_core.canvas.branches import BranchStats
from mbd_core.decoding.request import FinishReason
from mbd_core.studies.block_batch.cache_record import CacheRecord
from mbd_core.studies.block_batch.output_measures import GradedRun, Oracle, per_sample_oracle


@dataclass(frozen=True, kw_only=True)
class DecodedPrompt:
    """One prompt under one method. `accuracy` is `None` where nothing says what is right."""

    tokens: list[int]
    num_forwards: int
    finish_reason: FinishReason
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class StudiedPrompt:
    """One prompt: decoded with every block length alone, and with all of them by BlockBatch."""

    name: str
    prompt_length: int
    single: Mapping[int, DecodedPrompt]
    block_batch: DecodedPrompt
    winner: int
    branches: list[BranchStats]
    caches: CacheRecord | None = None

    @property
    def outputs(self) -> dict[int, list[int]]:
        """What each block length alone generated."""
        return {n: run.tokens for n, run in self.single.items()}


@dataclass(frozen=True, kw_only=True)
class BranchStudy:
    """Everything that the report shows.

    graded    whether accuracies are known
    rounding  relative rounding error of the caches' dtype
    """

    block_lengths: list[int]
    prompts: list[StudiedPrompt]
    graded: bool
    rounding: float


def oracle_of(prompts: Sequence[StudiedPrompt]) -> Oracle:
    """The per-sample oracle over the single runs; ungraded ones count as equally accurate: the cheapest."""
    return per_sample_oracle(
        [
            {
                n: GradedRun(accuracy=run.accuracy or 0.0, num_forwards=run.num_forwards)
                for n, run in prompt.single.items()
            }
            for prompt in prompts
        ]
    )
