"""The Block Buffer engine: continuous batching of requests over one model (paper Section 3.3).

Shape legend: R rows (sequences), N slots, B block size, K block rows of a batch, V vocabulary.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.accept import predict
from mbd_core.decoding.buffer import BlockBuffer, Commit, SlotState
from mbd_core.engine.runner import Batch, EagerRunner, build_batch
from mbd_core.engine.scheduler import PrefillChunk, Scheduler
from mbd_core.engine.sequence import Sequence, pages_needed
from mbd_core.kvcache.cache import PagedKVCache
from mbd_core.kvcache.pool import PagePool
from mbd_core.models.decoder import Decoder
from mbd_core.trace import TraceRecorder
from mbd_core.types import FinishReason, Output, Request, StepOutput, StepTrace


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's sizes.

    max_rows            sequences decoded at once
    buffer_size         physical slots a row; a request may ask for fewer
    page_size           tokens a page, a multiple of the block size (default: the least such of at least 16)
    num_pages           pages of KV memory
    max_prefill_tokens  prompt tokens stored a step, at most
    static_shapes       send every slot of every row through the model, used or not, so that a decode step always
                        has max_rows * buffer_size blocks (Alg. 5); otherwise only resident slots (Alg. 4)
    """

    max_rows: int = 16
    buffer_size: int = 4
    page_size: int | None = None
    num_pages: int = 512
    max_prefill_tokens: int = 2048
    static_shapes: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "buffer_size", "num_pages", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def resolve_page_size(self, block_size: int) -> int:
        page_size = -(-16 // block_size) * block_size if self.page_size is None else self.page_size
        if page_size < 1 or page_size % block_size:
            raise ValueError(f"page_size={page_size} is not a multiple of the model's block_size={block_size}")
        return page_size


@dataclass(frozen=True)
class Plan:
    """One step's work: the batch, where its logits belong, and which sequences decode."""

    batch: Batch
    open_RNB: Tensor
    storing_only_R: Tensor
    decoding: list[Sequence]
    prefilling: list[Sequence]
    snapshot: tuple[list[list[int]], list[list[float]]] | None
    started: float


class Engine:
    """Requests in, committed tokens out; `step()` is one forward."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        trace: TraceRecorder | None = None,
        vocab_limit: int | None = None,
    ) -> None:
        """`vocab_limit` is the tokenizer's size: ids from there on are padding and never predicted."""
        weights = next(model.parameters())
        c = model.config
        self.model, self.config = model, config
        self.page_size = config.resolve_page_size(c.block_size)
        if config.max_prefill_tokens < c.block_size:
            raise ValueError(f"max_prefill_tokens={config.max_prefill_tokens} is less than a block ({c.block_size})")
        self.scheduler = Scheduler(
            max_rows=config.max_rows,
            block_size=c.block_size,
            page_size=self.page_size,
            pool=PagePool(config.num_pages),
            max_prefill_tokens=config.max_prefill_tokens,
        )
        self.buffer = BlockBuffer(
            num_rows=config.max_rows,
            num_slots=config.buffer_size,
            block_size=c.block_size,
            mask_token_id=c.mask_token_id,
            eos_token_ids=c.eos_token_ids,
            device=weights.device,
        )
        cache = PagedKVCache(
            c, num_pages=config.num_pages, page_size=self.page_size, dtype=weights.dtype, device=weights.device
        )
        self.runner = EagerRunner(model.eval(), cache)
        self._forbidden_V = torch.zeros(c.vocab_size, dtype=torch.bool, device=weights.device)
        self._forbidden_V[c.mask_token_id] = True
        self._forbidden_V[vocab_limit or c.vocab_size :] = True
        self._trace = trace
        self._num_steps = 0
        self._known: set[str] = set()

    # -- requests -----------------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Raise `ValueError` for a request this engine can never serve, saying which value and what to do."""
        c, length = self.model.config, len(request.prompt)
        if not length:
            raise ValueError("the prompt is empty: it must hold at least one token")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens={request.max_tokens} must be at least 1")
        if length + request.max_tokens > c.max_positions:
            raise ValueError(
                f"the prompt's {length} tokens and max_tokens={request.max_tokens} exceed the model's "
                f"{c.max_positions} positions; shorten the prompt or lower max_tokens"
            )
        wrong = next((t for t in request.prompt if not 0 <= t < c.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"prompt token {wrong} lies outside the vocabulary of {c.vocab_size} tokens")
        if request.decoding.block_size != c.block_size:
            raise ValueError(f"block_size={request.decoding.block_size} differs from the model's {c.block_size}")
        if request.decoding.buffer_size > self.config.buffer_size:
            raise ValueError(
                f"buffer_size={request.decoding.buffer_size} exceeds this engine's {self.config.buffer_size} slots"
            )
        needed = pages_needed(request, block_size=c.block_size, page_size=self.page_size)
        if needed > self.scheduler.pool.capacity:
            raise ValueError(
                f"the prompt and max_tokens={request.max_tokens} need {needed} KV pages, the engine has "
                f"{self.scheduler.pool.capacity}; lower max_tokens or start it with more num_pages"
            )

    def add(self, request: Request) -> None:
        """Queue a request; it joins the batch at the next step that has room."""
        self.validate(request)
        if request.request_id in self._known:
            raise ValueError(f"request_id '{request.request_id}' is already being served")
        self._known.add(request.request_id)
        self.scheduler.waiting.append(request)

    def abort(self, request_id: str) -> Output | None:
        """Stop a request and free all it holds; `None` if it is not known (any more)."""
        for sequence in self.scheduler.running.values():
            if sequence.request.request_id == request_id:
                self._finish(sequence)
                return sequence.output("abort")
        for request in self.scheduler.waiting:
            if request.request_id == request_id:
                self.scheduler.waiting.remove(request)
                self._known.remove(request_id)
                return Sequence(request, self.buffer.block_size, -1, []).output("abort")
        return None

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def generate(self, requests: Seq[Request]) -> list[Output]:
        """Serve `requests` to the end; outputs in their order.

        Raises `ValueError`, and serves none, for a request that cannot be served, for ids that repeat, and while
        requests that were added one by one are still running: their outputs would have nowhere to go.
        """
        if self.has_work:
            raise ValueError(f"generate() needs an idle engine; {len(self._known)} requests are still being served")
        if len({r.request_id for r in requests}) < len(requests):
            raise ValueError("generate() needs a request_id of its own for each request")
        for request in requests:
            self.validate(request)
        for request in requests:
            self.add(request)
        outputs: dict[str, Output] = {}
        while self.has_work:
            for done in self.step():
                if done.output is not None:
                    outputs[done.request_id] = done.output
        return [outputs[r.request_id] for r in requests]

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """One forward for all sequences; what it committed. Without work it does nothing."""
        if not self.has_work:
            return []
        plan = self._schedule()
        logits_PV = self.runner.forward(plan.batch)
        commit = self.buffer.commit(predict(logits_PV, plan.open_RNB, self._forbidden_V))
        return self._collect(plan, commit)

    def _schedule(self) -> Plan:
        """Admit, choose prompt chunks, seat sequences whose prompt is complete, activate slots, lay out the batch."""
        started = time.perf_counter()
        self.scheduler.admit()
        chunks = self.scheduler.prefill()
        self.buffer.activate()
        decoding = [s for s in self.scheduler.running.values() if s.prompt_stored]
        for sequence in decoding:
            if not sequence.seated:
                self.buffer.join(sequence.row, sequence.request)
                sequence.seated, sequence.committed = True, sequence.prefix_length
        batch, open_RNB = self._layout(chunks)
        return Plan(
            batch=batch,
            open_RNB=open_RNB,
            storing_only_R=~self.buffer.active_RN.any(-1),
            decoding=decoding,
            prefilling=[c.sequence for c in chunks if not c.sequence.prompt_stored],
            snapshot=self._snapshot() if self._trace is not None else None,
            started=started,
        )

    def _layout(self, chunks: list[PrefillChunk]) -> tuple[Batch, Tensor]:
        """Prompt blocks first, then slots: all of them under static shapes, else the resident ones."""
        buffer, device = self.buffer, self.buffer.tokens_RNB.device
        size = buffer.block_size
        table_RP = self._page_table()
        prompt_tokens = [t for c in chunks for t in c.sequence.request.prompt[c.start : c.stop]]
        prompt_blocks = [b for c in chunks for b in range(c.start // size, c.stop // size)]
        prompt_rows = [c.sequence.row for c in chunks for _ in range(c.start, c.stop, size)]
        blocks_K = torch.tensor(prompt_blocks, dtype=torch.int64, device=device)
        rows_K = torch.tensor(prompt_rows, dtype=torch.int64, device=device)
        tokens_KB = torch.tensor(prompt_tokens, dtype=torch.int64, device=device).view(-1, size)

        resident_RN, open_RNB = buffer.resident_RN, buffer.open_RNB
        included = torch.ones_like(resident_RN) if self.config.static_shapes else resident_RN
        row, slot = included.nonzero(as_tuple=True)
        block = buffer.first_block_R[row] + slot
        stored = resident_RN[row, slot]
        logits_at = open_RNB[row, slot].flatten().nonzero()[:, 0] + tokens_KB.numel()
        return build_batch(
            tokens_RB=torch.cat((tokens_KB, buffer.tokens_RNB[row, slot])),
            blocks_R=torch.cat((blocks_K, block)),
            page_table_RP=table_RP[torch.cat((rows_K, row))],
            stored_R=torch.cat((torch.ones_like(blocks_K, dtype=torch.bool), stored)),
            seen_blocks_R=torch.cat((blocks_K + 1, torch.where(stored, block + 1, 0))),
            page_size=self.page_size,
            logits_at=logits_at,
        ), open_RNB

    def _page_table(self) -> Tensor:
        """Pages of every row, padded with the null page, no wider than any row reaches in this step."""
        reach = {
            row: min(len(s.pages), -(-(max(s.committed, s.prefilled) + self._window) // self.page_size))
            for row, s in self.scheduler.running.items()
        }
        width = max(reach.values())
        table = [[0] * width for _ in range(self.config.max_rows)]
        for row, sequence in self.scheduler.running.items():
            pages = sequence.pages[: reach[row]]
            table[row][: len(pages)] = pages
        return torch.tensor(table, device=self.buffer.tokens_RNB.device)

    @property
    def _window(self) -> int:
        return self.config.buffer_size * self.buffer.block_size

    def _snapshot(self) -> tuple[list[list[int]], list[list[float]]]:
        """Slot states and mask ratios as the forward sees them, by row and slot."""
        return self.buffer.state_RN.tolist(), (1.0 - self.buffer.progress_RN).tolist()

    def _record(self, plan: Plan, copied: list[list[int]], trace: TraceRecorder) -> None:
        assert plan.snapshot is not None
        states, mask_ratios = plan.snapshot
        trace.extend(
            [
                StepTrace(
                    request_id=sequence.request.request_id,
                    step=self._num_steps,
                    slot=slot,
                    block=sequence.committed // self.buffer.block_size + slot,
                    state=SlotState(state).name,
                    mask_ratio=mask_ratios[sequence.row][slot],
                    accepted=copied[sequence.row][2 + slot],
                )
                for sequence in plan.decoding
                for slot, state in enumerate(states[sequence.row])
            ]
        )

    def _collect(self, plan: Plan, commit: Commit) -> list[StepOutput]:
        """Count the step, hand out what was committed, let finished sequences go. One copy to the host."""
        num_slots = self.buffer.num_slots
        numbers = torch.stack((commit.num_blocks_R, plan.storing_only_R.long()), dim=1)
        copied = torch.cat((numbers, commit.accepted_RN, commit.tokens_RNB.flatten(1)), dim=1).tolist()
        seconds = time.perf_counter() - plan.started
        for sequence in plan.prefilling:
            sequence.num_prefill_forwards += 1
        if self._trace is not None:
            self._record(plan, copied, self._trace)
        outputs = []
        for sequence in plan.decoding:
            sequence.num_forwards += 1
            num_blocks, storing_only, *rest = copied[sequence.row]
            sequence.num_store_forwards += storing_only
            sequence.decode_seconds += seconds
            if num_blocks:
                tokens = rest[num_slots:][: num_blocks * self.buffer.block_size]
                outputs.append(self._emit(sequence, tokens))
        self._num_steps += 1
        return outputs

    def _emit(self, sequence: Sequence, committed: list[int]) -> StepOutput:
        """The useful ones of newly committed tokens: behind the prompt, within the budget, before EOS."""
        request, start = sequence.request, sequence.committed
        sequence.committed += len(committed)
        fresh = committed[max(0, len(request.prompt) - start) : sequence.end - start]
        stops = () if request.ignore_eos else self.model.config.eos_token_ids
        cut = next((i for i, t in enumerate(fresh) if t in stops), None)
        reason: FinishReason | None = None
        if cut is not None:
            fresh, reason = fresh[:cut], "stop"
        elif sequence.committed >= sequence.end:
            reason = "length"
        sequence.emitted += fresh
        if reason is not None:
            self._finish(sequence)
        return StepOutput(
            request_id=request.request_id,
            new_tokens=tuple(fresh),
            output=sequence.output(reason) if reason is not None else None,
        )

    def _finish(self, sequence: Sequence) -> None:
        self.buffer.leave(sequence.row)
        self.scheduler.release(sequence)
        self._known.remove(sequence.request.request_id)

    def check_integrity(self) -> None:
        """No page or row is lost or owned twice; raises `AssertionError`."""
        self.scheduler.check_integrity()
