"""The Block Buffer engine: continuous batching of requests over one model (paper Section 3.3).

Shape legend: R rows (sequences), N slots, B block size, K rows of a forward, A positions asked for, V vocabulary.
"""

import itertools
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.accept import predict
from mbd_core.decoding.buffer import BlockBuffer, Commit
from mbd_core.decoding.canvas import check_canvas
from mbd_core.engine.batch import Batch, Rows, pack
from mbd_core.engine.canvas import CanvasRuns
from mbd_core.engine.runner import EagerRunner
from mbd_core.engine.scheduler import PrefillChunk, Scheduler
from mbd_core.engine.sequence import Sequence, pages_needed
from mbd_core.kvcache.cache import PagedKVCache
from mbd_core.kvcache.pool import PagePool
from mbd_core.models.decoder import Decoder
from mbd_core.ops.attention import resolve
from mbd_core.types import FinishReason, Output, Request, StepOutput, StepTrace

if TYPE_CHECKING:
    from mbd_core.trace import TraceRecorder


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's sizes.

    max_rows            sequences decoded at once
    buffer_size         physical slots a row; a request may ask for fewer
    block_size          for a model that was trained without blocks (LLaDA, Dream), the ones D2F decodes it in
    page_size           tokens a page, a multiple of the block size (default: the least such of at least 16)
    num_pages           pages of KV memory
    max_prefill_tokens  prompt tokens stored a step, at most
    prefix_caching      keep stored blocks, prompt and generated, for requests that begin alike
    static_shapes       send every slot of every row through the model, used or not, so that a decode step always
                        has max_rows * buffer_size blocks (Alg. 5); otherwise only resident slots (Alg. 4)
    batch_invariant     compute every row by itself: slower, and a request's numbers do not depend on the others, bit
                        for bit
    attention           the attention kernel by name; by default the best there is
    """

    max_rows: int = 16
    buffer_size: int = 4
    block_size: int | None = None
    page_size: int | None = None
    num_pages: int = 512
    max_prefill_tokens: int = 2048
    prefix_caching: bool = True
    static_shapes: bool = False
    batch_invariant: bool = False
    attention: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "buffer_size", "num_pages", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def resolve_page_size(self, block_size: int) -> int:
        page_size = -(-16 // block_size) * block_size if self.page_size is None else self.page_size
        if page_size < 1 or page_size % block_size:
            raise ValueError(f"page_size={page_size} is not a multiple of the model's block_size={block_size}")
        return page_size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step's work: the batch, which of its logits are the buffer's, and which sequences take part."""

    batch: Batch
    asked_RNB: Tensor
    num_asked: int
    slot_end_RN: Tensor
    storing_only_R: Tensor
    decoding: list[Sequence]
    chunks: list[PrefillChunk]
    snapshot: Tensor | None
    started: float


class Engine:
    """Requests in, committed tokens out; `step()` is one forward."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        trace: "TraceRecorder | None" = None,
        vocab_limit: int | None = None,
    ) -> None:
        """`vocab_limit` is the tokenizer's size: ids from there on are padding and never predicted."""
        weights = model.model.norm.weight
        device, c = weights.device, model.config
        self.model, self.config = model, config
        if config.block_size not in (None, c.block_size) and c.attention == "block_causal":
            raise ValueError(f"block_size={config.block_size} cannot be honoured: the model has {c.block_size}")
        self.block_size = config.block_size or c.block_size
        self.page_size = config.resolve_page_size(self.block_size)
        if config.max_prefill_tokens < self.block_size:
            raise ValueError(
                f"max_prefill_tokens={config.max_prefill_tokens} is less than a block ({self.block_size})"
            )
        self.scheduler = Scheduler(
            max_rows=config.max_rows,
            block_size=self.block_size,
            page_size=self.page_size,
            pool=PagePool(config.num_pages),
            max_prefill_tokens=config.max_prefill_tokens,
            prefix_caching=config.prefix_caching,
            # what follows a prefix is predicted from its last hidden state, which pages do not hold
            compute_last_block=c.shift_logits,
        )
        self.buffer = BlockBuffer(
            num_rows=config.max_rows,
            num_slots=config.buffer_size,
            block_size=self.block_size,
            mask_token_id=c.mask_token_id,
            eos_token_ids=c.eos_token_ids,
            device=device,
        )
        self.attention = resolve(
            device,
            weights.dtype,
            c.head_dim,
            self.page_size,
            config.attention,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
        )
        cache = PagedKVCache(
            c, num_pages=config.num_pages, page_size=self.page_size, dtype=weights.dtype, device=device
        )
        self.runner = EagerRunner(model.eval(), cache, self.attention, num_rows=config.max_rows)
        self._forbidden_V = torch.zeros(c.vocab_size, dtype=torch.bool, device=device)
        self._forbidden_V[c.mask_token_id] = True
        self._forbidden_V[vocab_limit or c.vocab_size :] = True
        self._canvases = CanvasRuns(c, cache, self._forbidden_V)
        self._tables_RP = torch.zeros((config.max_rows, 1), dtype=torch.int64, device=device)
        self._table_of: list[tuple[int, ...]] = [()] * config.max_rows
        if trace is not None:
            trace.block_size = self.block_size
        self._trace = trace
        self._num_steps = 0

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
        self._validate_method(request)
        needed = pages_needed(request, block_size=self.block_size, page_size=self.page_size)
        if needed > self.scheduler.pool.capacity:
            raise ValueError(
                f"the prompt and max_tokens={request.max_tokens} need {needed} KV pages, the engine has "
                f"{self.scheduler.pool.capacity}; lower max_tokens or start it with more num_pages"
            )

    def _validate_method(self, request: Request) -> None:
        c, decoding = self.model.config, request.decoding
        if decoding.canvas is not None:
            if c.attention != "full":
                raise ValueError(f"canvas needs a model with full attention; {c.architecture} attends in blocks")
            eos = () if request.ignore_eos else c.eos_token_ids
            check_canvas(
                decoding.canvas,
                prompt_length=len(request.prompt),
                max_tokens=request.max_tokens,
                eos_token_ids=eos,
            )
            return
        if decoding.block_size != self.block_size:
            raise ValueError(f"block_size={decoding.block_size} differs from the model's {self.block_size}")
        if decoding.prompt_attention == "full" and c.attention != "full":
            raise ValueError(
                f"prompt_attention='full' (D2F) needs a model with full attention; {c.architecture} attends in blocks"
            )
        if decoding.buffer_size > self.config.buffer_size:
            raise ValueError(
                f"buffer_size={decoding.buffer_size} exceeds this engine's {self.config.buffer_size} slots"
            )

    def add(self, request: Request) -> None:
        """Queue a request; it joins the batch at the next step that has room."""
        self.validate(request)
        if self.scheduler.find(request.request_id) is not None:
            raise ValueError(f"request_id '{request.request_id}' is already being served")
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Output | None:
        """Stop a request and free all it holds; `None` if it is not known (any more)."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        self._finish(sequence)
        return sequence.output("abort")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_known(self) -> int:
        """Requests that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def preempt(self) -> str | None:
        """Take its pages from the youngest running request, which goes on later; its id, `None` if none runs."""
        sequence = self.scheduler.preempt_youngest()
        if sequence is None:
            return None
        self._put_aside(sequence)
        return sequence.request.request_id

    def generate(self, requests: Seq[Request]) -> list[Output]:
        """Serve `requests` to the end; outputs in their order.

        Raises `ValueError`, and serves none, for a request that cannot be served, for ids that repeat, and while
        requests that were added one by one are still running: their outputs would have nowhere to go.
        """
        if self.has_work:
            raise ValueError(f"generate() needs an idle engine; {self.num_known} requests are still being served")
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
        logits_AV = self.runner.forward(plan.batch)
        commit = self._commit(plan, logits_AV[: plan.num_asked])
        return [*self._collect(plan, commit), *self._collect_canvases(plan, logits_AV[plan.num_asked :])]

    def _schedule(self) -> Plan:
        """Make room, admit, choose prompt chunks, seat sequences whose prompt is complete, activate slots, lay out."""
        started = time.perf_counter()
        for sequence in self.scheduler.grow(self._upto):
            self._put_aside(sequence)
        for sequence in self.scheduler.admit():
            if sequence.request.decoding.canvas is not None:
                self._canvases.join(sequence)
        chunks = self.scheduler.prefill()
        decoding = [s for s in self.scheduler.running.values() if s.decodes]
        for sequence in decoding:
            if not sequence.seated:
                self._seat(sequence)
        self.buffer.activate()
        self._update_tables()
        asked_RNB = self.buffer.asked_RNB
        prompt = self._prompt_rows(chunks)
        slots, slot_end_RN, num_asked = self._slot_rows(asked_RNB, chunks, before=len(prompt.tokens_T))
        canvases = self._canvases.rows(before=len(prompt.tokens_T) + len(slots.tokens_T))
        batch = pack(
            [g for g in (prompt, slots, canvases) if g is not None],
            page_size=self.page_size,
            batch_invariant=self.config.batch_invariant,
        )
        return Plan(
            batch=batch,
            asked_RNB=asked_RNB,
            num_asked=num_asked,
            slot_end_RN=slot_end_RN,
            storing_only_R=~self.buffer.active_RN.any(-1),
            decoding=decoding,
            chunks=chunks,
            snapshot=self._snapshot(),
            started=started,
        )

    def _upto(self, sequence: Sequence) -> int:
        """Positions for which it needs pages in the next step."""
        if sequence.request.decoding.canvas is not None:
            return sequence.first_window
        window = sequence.request.decoding.buffer_size * self.block_size
        return min(sequence.span, max(sequence.prefix_length, sequence.committed) + window)

    def _seat(self, sequence: Sequence) -> None:
        if sequence.saved is None:
            self.buffer.join(sequence.row, sequence.request)
        else:
            self.buffer.restore(sequence.row, sequence.saved)
            sequence.saved = None
        sequence.seated = True

    def _put_aside(self, sequence: Sequence) -> None:
        """A preempted sequence: keep what stands in its buffer row. A canvas keeps nothing and begins anew; what it
        repeats is no part of its NFE."""
        if not sequence.seated:
            return
        if sequence.request.decoding.canvas is None:
            sequence.saved = self.buffer.save(sequence.row)
            self.buffer.leave(sequence.row)
        else:
            self._canvases.leave(sequence.row)
            sequence.num_prefill_forwards += sequence.num_forwards
            sequence.num_forwards = 0
        sequence.seated = False

    def _update_tables(self) -> None:
        """Bring the device's page table up to date; rows without a sequence keep what they had, nobody reads it."""
        running = self.scheduler.running
        width = max((len(s.pages) for s in running.values()), default=1)
        if width > self._tables_RP.shape[1]:
            self._tables_RP = torch.nn.functional.pad(self._tables_RP, (0, width - self._tables_RP.shape[1]))
        for row, sequence in running.items():
            now = (sequence.arrival, sequence.num_preemptions, len(sequence.pages))
            if self._table_of[row] != now:
                self._tables_RP[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
                self._table_of[row] = now

    @property
    def _width(self) -> int:
        """Pages that any running sequence has at most."""
        return max((len(s.pages) for s in self.scheduler.running.values()), default=1)

    def _prompt_rows(self, chunks: list[PrefillChunk]) -> Rows:
        """Prompt blocks to be stored, a row each; a prompt under full attention is one row."""
        size, device = self.block_size, self.buffer.tokens_RNB.device
        tokens: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
            step = size if chunk.start >= chunk.sequence.origin else chunk.stop - chunk.start
            row_starts = range(chunk.start, chunk.stop, step)
            starts += row_starts
            lengths += [step] * len(row_starts)
            rows += [chunk.sequence.row] * len(row_starts)
        starts_K, lengths_K = torch.tensor([starts, lengths], dtype=torch.int64, device=device)
        before_K = torch.nn.functional.pad(lengths_K.cumsum(0), (1, 0))[:-1]
        offset = (starts_K - before_K).repeat_interleave(lengths_K, output_size=len(tokens))
        return Rows(
            tokens_T=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions_T=torch.arange(len(tokens), device=device) + offset,
            lengths_K=size if all(n == size for n in lengths) else lengths,
            kv_lens_K=starts_K + lengths_K,
            pages_KP=self._tables_RP[torch.tensor(rows, dtype=torch.int64, device=device), : self._width],
            stored_K=torch.ones(len(rows), dtype=torch.bool, device=device),
            logits_at_A=torch.zeros(0, dtype=torch.int64, device=device),
            asked=[0] * len(rows),
        )

    def _slot_rows(self, asked_RNB: Tensor, chunks: list[PrefillChunk], *, before: int) -> tuple[Rows, Tensor, int]:
        """Slots, a row each: all of them under static shapes, else the resident ones; and the packed token at which
        each slot ends (R, N), and how many positions are asked for."""
        buffer, device = self.buffer, self.buffer.tokens_RNB.device
        size, resident_RN = self.block_size, buffer.resident_RN
        included = torch.ones_like(resident_RN) if self.config.static_shapes else resident_RN
        row, slot = included.nonzero(as_tuple=True)
        stored = resident_RN[row, slot]
        positions_KB = buffer.positions_RNB[row, slot]
        asked_KB = asked_RNB[row, slot]
        logits_at = asked_KB.flatten().nonzero()[:, 0] + before
        softens = any(s.request.decoding.soft is not None for s in self.scheduler.running.values())
        if self.model.config.shift_logits:
            logits_at = self._predecessors(logits_at, row, slot, chunks)
        slot_end_RN = torch.zeros_like(resident_RN, dtype=torch.int64)
        slot_end_RN[row, slot] = torch.arange(len(row), device=device) * size + size - 1 + before
        rows = Rows(
            tokens_T=buffer.tokens_RNB[row, slot].flatten(),
            positions_T=positions_KB.flatten(),
            lengths_K=size,
            kv_lens_K=torch.where(stored, positions_KB[:, -1] + 1, 1),
            pages_KP=self._tables_RP[row, : self._width],
            stored_K=stored,
            logits_at_A=logits_at,
            weight_T=buffer.weight_RNB[row, slot].flatten() if softens else None,
            asked=asked_KB.sum(-1).tolist() if self.config.batch_invariant else None,
        )
        return rows, slot_end_RN, len(logits_at)

    def _predecessors(self, logits_at: Tensor, row: Tensor, slot: Tensor, chunks: list[PrefillChunk]) -> Tensor:
        """Where logits are to be read of a model whose logits predict the next position: one token earlier.

        Slots of a row lie behind one another. In front of slot 0 stands the last committed position: in this forward
        if its prompt chunk is, else in the runner's memory.
        """
        last = [-1 - row for row in range(self.config.max_rows)]
        for chunk, stop in self._completing(chunks):
            last[chunk.sequence.row] = stop - 1
        before = sum(c.stop - c.start for c in chunks)
        slot_row = (logits_at - before) // self.block_size
        opens = (slot[slot_row] == 0) & ((logits_at - before) % self.block_size == 0)
        return torch.where(opens, torch.tensor(last, device=row.device)[row[slot_row]], logits_at - 1)

    def _completing(self, chunks: list[PrefillChunk]) -> list[tuple[PrefillChunk, int]]:
        """Chunks that complete their sequence's prefix, each with the packed token it stops at."""
        out, stop = [], 0
        for chunk in chunks:
            stop += chunk.stop - chunk.start
            if chunk.stop == chunk.sequence.prefix_length:
                out.append((chunk, stop))
        return out

    def _snapshot(self) -> Tensor | None:
        """Slot states and mask ratios as the forward sees them (R, 2 N), for a trace."""
        if self._trace is None:
            return None
        return torch.cat((self.buffer.state_RN.double(), 1.0 - self.buffer.progress_RN), dim=1)

    def _commit(self, plan: Plan, logits_AV: Tensor) -> Commit:
        """What the forward says of the buffer's asked positions, and what follows from it."""
        running = [s.request for s in plan.decoding]
        draws = any(r.sampling.temperature > 0 for r in running)
        scores = any(r.decoding.fallback not in ("confidence", "leftmost") for r in running)
        asked = plan.asked_RNB
        prediction = predict(
            logits_AV,
            asked,
            self._forbidden_V,
            draw=self.buffer.draw(asked) if draws else None,
            fallback_P=self.buffer.fallback_R[asked.nonzero(as_tuple=True)[0]] if scores else None,
        )
        commit = self.buffer.commit(prediction)
        if self.model.config.shift_logits:
            self._remember(plan, commit)
        return commit

    def _remember(self, plan: Plan, commit: Commit) -> None:
        """Keep the hidden states of positions that were committed last, from which the next ones are predicted."""
        completing = self._completing(plan.chunks)
        if completing:
            device = commit.num_blocks_R.device
            rows = torch.tensor([c.sequence.row for c, _ in completing], device=device)
            self.runner.remember(rows, torch.tensor([stop - 1 for _, stop in completing], device=device))
        left = commit.num_blocks_R.nonzero()[:, 0]
        if len(left):
            self.runner.remember(left, plan.slot_end_RN[left, commit.num_blocks_R[left] - 1])

    # -- after the forward --------------------------------------------------------------------------------------

    def _collect(self, plan: Plan, commit: Commit) -> list[StepOutput]:
        """Count the step, hand out what was committed, let finished sequences go. One copy to the host."""
        size = self.block_size
        told = self._trace is not None or any(s.request.logprobs for s in plan.decoding)
        parts = [
            commit.num_blocks_R[:, None],
            plan.storing_only_R[:, None],
            commit.accepted_RN,
            commit.edited_RN,
            commit.tokens_RNB.flatten(1),
            commit.masked_RNB.flatten(1),
        ]
        if told:
            parts.append(commit.confidence_RNB.flatten(1))
        if plan.snapshot is not None:
            parts.append(plan.snapshot)
        copied = torch.cat([p.double() for p in parts], dim=1).cpu().numpy()
        width = np.cumsum([p.shape[1] for p in parts])[:-1]
        num_blocks, storing_only, accepted, edited, tokens, masked, *rest = np.split(copied, width, axis=1)
        confidence = rest.pop(0) if told else None
        seconds = time.perf_counter() - plan.started
        self.scheduler.stored(plan.chunks)
        for sequence in {id(c.sequence): c.sequence for c in plan.chunks}.values():
            if not sequence.prompt_stored:
                sequence.num_prefill_forwards += 1
        if self._trace is not None:
            self._record(plan, rest[0], accepted, edited, tokens, masked, confidence)
        outputs = []
        for sequence in plan.decoding:
            row = sequence.row
            sequence.num_forwards += 1
            sequence.num_store_forwards += int(storing_only[row, 0])
            sequence.decode_seconds += seconds
            left = int(num_blocks[row, 0]) * size
            if left:
                told_here = confidence[row, :left] if confidence is not None and sequence.request.logprobs else None
                outputs.append(self._emit(sequence, tokens[row, :left].astype(np.int64).tolist(), told_here))
        self._num_steps += 1
        return outputs

    def _emit(self, sequence: Sequence, committed: list[int], confidence: np.ndarray | None) -> StepOutput:
        """The useful ones of newly committed tokens: behind the prompt, within the budget, before EOS."""
        request, start = sequence.request, sequence.committed
        useful = slice(max(0, len(request.prompt) - start), max(0, sequence.end - start))
        self.scheduler.commit(sequence, committed)
        ended = start + len(committed) >= sequence.end
        logprobs = None if confidence is None else np.log(confidence[useful]).tolist()
        return self._hand_out(sequence, committed[useful], logprobs, ended=ended)

    def _hand_out(
        self, sequence: Sequence, fresh: list[int], logprobs: list[float] | None, *, ended: bool
    ) -> StepOutput:
        """Give out new tokens, up to an EOS among them; with that, or when `ended`, the request is done."""
        request = sequence.request
        stops = () if request.ignore_eos else self.model.config.eos_token_ids
        cut = next((i for i, t in enumerate(fresh) if t in stops), None)
        reason: FinishReason | None = "length" if ended else None
        if cut is not None:
            fresh, reason = fresh[:cut], "stop"
        if logprobs is not None:
            logprobs = logprobs[: len(fresh)]
            sequence.logprobs += logprobs
        sequence.emitted += fresh
        if reason is not None:
            self._finish(sequence)
        return StepOutput(
            request_id=request.request_id,
            new_tokens=tuple(fresh),
            output=sequence.output(reason) if reason is not None else None,
            logprobs=None if logprobs is None else tuple(logprobs),
        )

    def _collect_canvases(self, plan: Plan, logits_AV: Tensor) -> list[StepOutput]:
        """The canvases' part of the step: tokens decided without a gap are handed out, but with several branches,
        which may still be overwritten, only at the end."""
        outputs = []
        updates = self._canvases.update(logits_AV)
        seconds = time.perf_counter() - plan.started
        for run, update in updates:
            sequence, decoder = run.sequence, run.decoder
            sequence.num_forwards += 1
            sequence.decode_seconds += seconds
            if self._trace is not None:
                self._trace.extend(
                    [
                        StepTrace(
                            request_id=sequence.request.request_id,
                            step=self._num_steps - 1,
                            slot=lane,
                            block=block,
                            state="ACTIVE",
                            mask_ratio=update.mask_ratio[lane, block],
                            accepted=accepted,
                            edited=update.edited.get((lane, block), 0),
                        )
                        for (lane, block), accepted in update.accepted.items()
                    ]
                )
            sure = decoder.done or decoder.num_lanes == 1
            known = len(sequence.emitted)
            fresh = decoder.tokens[known:] if sure else []
            if not decoder.done:  # an EOS counts when the blocks up to its own are complete
                fresh = list(itertools.takewhile(lambda t: t not in self.model.config.eos_token_ids, fresh))
            if fresh or decoder.done:
                logprobs = decoder.log_probs[known:] if sequence.request.logprobs else None
                outputs.append(self._hand_out(sequence, fresh, logprobs, ended=decoder.done))
        return outputs

    def _record(
        self,
        plan: Plan,
        snapshot: np.ndarray,
        accepted: np.ndarray,
        edited: np.ndarray,
        tokens: np.ndarray,
        masked: np.ndarray,
        confidence: np.ndarray | None,
    ) -> None:
        assert self._trace is not None
        if not plan.decoding:
            return
        rows = [s.row for s in plan.decoding]
        states, mask_ratios = np.split(snapshot[rows], 2, axis=1)
        detail: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if self._trace.detail:
            assert confidence is not None
            shape = (len(rows), self.buffer.num_slots, self.block_size)
            hidden = masked[rows] > 0
            detail = (
                np.where(hidden, -1, tokens[rows]).reshape(shape),
                np.where(hidden, 0.0, confidence[rows]).reshape(shape),
            )
        first = [(s.committed - s.origin) // self.block_size for s in plan.decoding]
        ids = [s.request.request_id for s in plan.decoding]
        self._trace.add(self._num_steps, ids, first, states, mask_ratios, accepted[rows], edited[rows], *detail)

    def _finish(self, sequence: Sequence) -> None:
        if self.scheduler.is_running(sequence):
            self.buffer.leave(sequence.row)
            self._canvases.leave(sequence.row)
        self.scheduler.release(sequence)

    def check_integrity(self) -> None:
        """No page or row is lost or owned twice; raises `AssertionError`."""
        self.scheduler.check_integrity()
