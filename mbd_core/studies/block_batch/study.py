"""The results of the BlockBatch study: each prompt's outputs, forwards, branches and, if watched, caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbd_core.canvas.branches import BranchStats
from mbd_core.decoding.request import FinishReason
from mbd_core.studies.block_batch.cache_record import CacheRecord
from mbd_core.studies.block_batch.output_measures import GradedRun, Oracle, per_sample_oracle


@dataclass(frozen=True, kw_only=True)
class DecodedPrompt:
    """One prompt decoded by one method. `accuracy` is `None` for a prompt without a grader."""

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
        """The output of each block length alone."""
        return {n: run.tokens for n, run in self.single.items()}


@dataclass(frozen=True, kw_only=True)
class BranchStudy:
    """The data of the report.

    graded    whether all prompts have accuracies
    rounding  relative rounding error of the caches' dtype
    """

    block_lengths: list[int]
    prompts: list[StudiedPrompt]
    graded: bool
    rounding: float


def oracle_of(prompts: Sequence[StudiedPrompt]) -> Oracle:
    """The per-sample oracle over the single runs. Ungraded runs count as equally accurate, so the cheapest wins."""
    return per_sample_oracle(
        [
            {
                n: GradedRun(accuracy=run.accuracy or 0.0, num_forwards=run.num_forwards)
                for n, run in prompt.single.items()
            }
            for prompt in prompts
        ]
    )
