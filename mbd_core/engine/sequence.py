"""One running request as the engine sees it: its lengths, its pages, its counts."""

from dataclasses import dataclass, field

from mbd_core.types import Counts, FinishReason, Output, Request


@dataclass
class Sequence:
    """Its lengths, in tokens, kept apart: `prefilled` (of the prompt, stored or being stored), `committed` (stored for
    good, prompt included) and `emitted` (the useful ones that have been given out). What is filled but not final yet
    stands in the Block Buffer; what is allocated is its pages.
    """

    request: Request
    block_size: int
    row: int
    pages: list[int]
    seated: bool = False
    prefilled: int = 0
    committed: int = 0
    emitted: list[int] = field(default_factory=list)
    num_forwards: int = 0
    num_store_forwards: int = 0
    num_prefill_forwards: int = 0
    decode_seconds: float = 0.0

    @property
    def prefix_length(self) -> int:
        """The prompt's whole blocks, which are stored without being decoded."""
        return len(self.request.prompt) // self.block_size * self.block_size

    @property
    def end(self) -> int:
        """One past the last position it may fill."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def prompt_stored(self) -> bool:
        """Its prompt's whole blocks are stored, or are being stored in this very step: it decodes."""
        return self.prefilled == self.prefix_length

    def counts(self) -> Counts:
        return Counts(
            num_prompt_tokens=len(self.request.prompt),
            num_tokens=len(self.emitted),
            num_forwards=self.num_forwards,
            num_store_forwards=self.num_store_forwards,
            num_prefill_forwards=self.num_prefill_forwards,
            decode_seconds=self.decode_seconds,
        )

    def output(self, reason: FinishReason) -> Output:
        return Output(
            request_id=self.request.request_id,
            tokens=tuple(self.emitted),
            finish_reason=reason,
            counts=self.counts(),
        )


def pages_needed(request: Request, *, block_size: int, page_size: int) -> int:
    """Pages that hold a request to its end, its last block whole."""
    blocks = -(-(len(request.prompt) + request.max_tokens) // block_size)
    return -(-blocks * block_size // page_size)
