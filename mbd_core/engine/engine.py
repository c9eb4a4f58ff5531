"""The Block Buffer engine: continuous batching of requests over one model (paper Section 3.3).

Shape legend: R rows (sequences), N slots, B block size, K rows of a forward, A positions asked for, V vocabulary.
"""

import itertools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mbd_core.canvas.single_lane import check_canvas
from mbd_core.decoding.acceptance import predict
from mbd_core.decoding.block_buffer import BlockBuffer
from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import FinishReason, Output, Request, StepOutput, StepTrace
from mbd_core.decoding.sampling import Vocab, log_probability
from mbd_core.engine.batch import Rows, pack, to_device
from mbd_core.engine.canvas_rows import CanvasRuns
from mbd_core.engine.graphs import DecodePrograms, ProgramKind
from mbd_core.engine.kv_cache import PagedKVCache
from mbd_core.engine.ledger import Ledger, work_of
from mbd_core.engine.page_pool import PagePool
from mbd_core.engine.rows import Slots, completing, prompt_rows, resident_slots
from mbd_core.engine.runner import EagerRunner, FusedVocab
from mbd_core.engine.scheduler import PrefillChunk, Scheduler
from mbd_core.engine.sequence import Sequence, pages_needed
from mbd_core.engine.step_report import HostCopy, Report, before, pack_report, unpack_report
from mbd_core.models.decoder import Decoder
from mbd_core.ops.attention import resolve

if TYPE_CHECKING:
    from mbd_core.trace.recorder import TraceRecorder


LOGITS_AT_ONCE = 1 << 26


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
    static_shapes       in steps that only decode send every slot of the rows in use through the model, resident or
                        not (Alg. 5), so that a CUDA graph can be replayed; otherwise only resident slots (Alg. 4).
                        `None`: on a GPU
    graphs              replay static steps as CUDA graphs, with kernels that allow it. `None`: on a GPU
    overlap             launch a static step before the results of the one before are read, where that is safe.
                        `None`: on a GPU
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
    static_shapes: bool | None = None
    graphs: bool | None = None
    overlap: bool | None = None
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
    """Who takes part in a step: sequences whose blocks are decoded, by row, and prompt chunks to be stored."""

    step: int
    decoding: Mapping[int, Sequence]
    chunks: list[PrefillChunk]
    kind: ProgramKind
    started: float


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step whose device part has been launched: a report on those who decode in blocks, the canvases' logits."""

    plan: Plan
    report: HostCopy | None
    canvas_logits_AV: Tensor | None = None


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
        if vocab_limit is not None and not 1 <= vocab_limit <= model.config.vocab_size:
            raise ValueError(f"vocab_limit={vocab_limit} must lie in 1..{model.config.vocab_size}")
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
        longest = min(config.num_pages, -(-c.max_positions // self.page_size) + config.buffer_size)
        self.runner = EagerRunner(
            model.eval(),
            cache,
            self.attention,
            num_rows=config.max_rows,
            # unused slots stand behind the longest sequence
            num_positions=(longest + config.buffer_size + 1) * self.page_size,
        )
        vocab = FusedVocab if device.type == "cuda" else Vocab
        self._vocab = vocab(c.mask_token_id, vocab_limit or c.vocab_size)
        self._canvases = CanvasRuns(c, cache, self._vocab)
        self._tables_RP = torch.zeros((config.max_rows, longest), dtype=torch.int64, device=device)
        self._ledger = Ledger(config.max_rows, block_size=self.block_size, page_size=self.page_size)
        self.static_shapes = device.type == "cuda" if config.static_shapes is None else config.static_shapes
        # whole blocks of positions whose float32 logits, all copies together, stay under about a gigabyte
        self.logits_chunk = max(1, LOGITS_AT_ONCE // c.vocab_size // self.block_size) * self.block_size
        self._programs = DecodePrograms(
            self.runner,
            self.buffer,
            self._tables_RP,
            self._vocab,
            page_size=self.page_size,
            batch_invariant=config.batch_invariant,
            graphs=config.graphs,
            logits_chunk=self.logits_chunk,
        )
        for name in ("overlap", "graphs"):
            if getattr(config, name) and not self.static_shapes:
                raise ValueError(
                    f"{name}=True cannot be honoured without static_shapes=True: static steps only have it"
                )
        self.graphs = self.static_shapes and self._programs.records
        if trace is not None:
            trace.block_size = self.block_size
        self._trace = trace
        self._num_steps = 0
        self.overlap = device.type == "cuda" if config.overlap is None else config.overlap
        self._launched: Launched | None = None
        self._held: list[StepOutput] = []
        self._coming: list[Sequence] = []  # running, and on their way to the buffer
        self.last_report_X = np.zeros(0)
        self.num_ahead = 0  # steps launched before the one before was read
        self._collected = 0.0

    # -- requests -----------------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Raise `ValueError` for a request this engine can never serve, saying which value and what to do."""
        c, length = self.model.config, len(request.prompt)
        if not length:
            raise ValueError("the prompt is empty: it must hold at least one token")
        if not isinstance(request.max_tokens, int) or request.max_tokens < 1:
            raise ValueError(f"max_tokens={request.max_tokens} must be a whole number of at least 1")
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
        if decoding.prefix_cache and not self.config.prefix_caching:
            raise ValueError("prefix_cache=True cannot be honoured: this engine was started without prefix caching")
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
        held = [o.output for o in self._held if o.request_id == request_id]
        self._held = [o for o in self._held if o.request_id != request_id]
        sequence = self.scheduler.find(request_id)
        if sequence is None:  # it may have ended in a step that nobody has been told of yet
            return next((output for output in held if output is not None), None)
        self._finish(sequence)
        return sequence.output("abort")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._launched or self._held)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_known(self) -> int:
        """Requests that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def preempt(self) -> str | None:
        """Take its pages from the youngest running request, which goes on later; its id, `None` if none runs."""
        self._held += self.land()
        sequence = self.scheduler.preempt_youngest()
        if sequence is None:
            return None
        self._put_aside(sequence)
        return sequence.request.request_id

    def _check_idle(self, what: str) -> None:
        if self.has_work:
            untold = self.num_known + sum(o.output is not None for o in self._held)
            raise ValueError(f"{what}() needs an idle engine; {untold} requests are still being served")

    @torch.inference_mode()
    def prepare(self, decoding: DecodingConfig) -> int:
        """Capture the graphs that greedy requests with `decoding` will replay; how many there are.

        Otherwise each is captured when it is first needed, and who needs it waits. Without graphs there are none.
        Raises `ValueError` while requests are being served.
        """
        self._check_idle("prepare")
        if not self.graphs or decoding.canvas is not None:
            return 0
        request = Request(request_id="", prompt=(0,), max_tokens=1, decoding=decoding)
        kinds = self._programs.kinds(decoding.buffer_size, work_of(request))
        for kind in kinds:
            self._programs.record(kind)
        return len(kinds)

    def generate(self, requests: Seq[Request]) -> list[Output]:
        """Serve `requests` to the end; outputs in their order.

        Raises `ValueError`, and serves none, for a request that cannot be served, for ids that repeat, and while
        requests that were added one by one are still running: their outputs would have nowhere to go.
        """
        if self._launched is not None and not self.num_known:
            self.step()  # it concerns requests that were aborted
        self._check_idle("generate")
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

    def close(self) -> None:
        """Let go of what stands behind the engine: nothing here, other processes where there are several ranks."""

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One forward for all sequences; what it committed. Without work it does nothing."""
        if self._held:
            held, self._held = self._held, []
            return held
        if not self.has_work:
            return []
        if self._launched is not None and not self._may_run_ahead():
            return self.land()
        plan = self.schedule()
        launched = self.launch(plan)
        if not (self.overlap and self._static(plan)):
            assert self._launched is None
            return self.collect(launched)
        self.num_ahead += self._launched is not None
        outputs = self.land()
        self._launched = launched
        return outputs

    def land(self) -> list[StepOutput]:
        """Collect the step that was launched and not waited for, if there is one."""
        launched, self._launched = self._launched, None
        return [] if launched is None else self.collect(launched)

    def _may_run_ahead(self) -> bool:
        """Whether the next step can be launched before the last one's results are known: nobody is to be seated, and
        there are pages for whatever both steps may fill."""
        running = self.scheduler.running
        if not running:
            return False
        if self.scheduler.waiting and len(running) < self.config.max_rows:
            return False
        return int(self._ledger.missing_pages_R(unread=1).sum()) <= self.scheduler.pool.num_free

    def schedule(self) -> Plan:
        """A step's first part, on the host: make room, admit, choose prompt chunks, seat sequences whose prompt is
        complete."""
        started = time.perf_counter()
        self._make_room()
        self.admit()
        chunks = self.scheduler.prefill() if self._coming else []
        for sequence in [s for s in self._coming if s.decodes]:
            self._coming.remove(sequence)
            self._seat(sequence)
        self._num_steps += 1
        return Plan(
            step=self._num_steps - 1,
            decoding=self._ledger.sequences,
            chunks=chunks,
            kind=self._kind(),
            started=started,
        )

    def admit(self) -> list[Sequence]:
        """Requests that now run; those that decode in blocks come to the buffer when their prefix is stored."""
        admitted = self.scheduler.admit()
        for sequence in admitted:
            if sequence.is_canvas:
                self._canvases.join(sequence)
            else:
                self._coming.append(sequence)
                self._table(sequence)
        return admitted

    def _static(self, plan: Plan) -> bool:
        """Whether a step is a program: it only decodes, in blocks."""
        return self.static_shapes and bool(plan.decoding) and not plan.chunks and not self._canvases.running

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """A step's second part, on the device: one forward and what follows from it."""
        if self._static(plan):
            return Launched(plan=plan, report=HostCopy(self._programs.run(plan.kind, num_pages=self._width)))
        report_X, canvas_logits_AV = self._mixed_step(plan)
        report = None if report_X is None else HostCopy(report_X)
        return Launched(plan=plan, report=report, canvas_logits_AV=canvas_logits_AV)

    def _kind(self) -> ProgramKind:
        """What this step's decoding asks for."""
        num_rows = self._programs.bucket(max(self._ledger.num_rows, 1))
        asked = self._ledger.asks_at_most(unread=int(self._launched is not None))
        return ProgramKind(
            num_rows=num_rows,
            num_asked=self._programs.portion(num_rows, asked),
            **self._ledger.work(),
        )

    def _seat(self, sequence: Sequence) -> None:
        if sequence.saved is None:
            self.buffer.join(sequence.row, sequence.request)
        else:
            self.buffer.restore(sequence.row, sequence.saved)
            sequence.saved = None
        self._ledger.seat(sequence)
        sequence.seated = True

    def _put_aside(self, sequence: Sequence) -> None:
        """A preempted sequence: keep what stands in its buffer row. A canvas keeps nothing and begins anew; what it
        repeats is no part of its NFE."""
        if sequence.seated and not sequence.is_canvas:
            sequence.saved = self.buffer.save(sequence.row)
        self._leave(sequence)
        if sequence.is_canvas:
            sequence.num_prefill_forwards += sequence.num_forwards
            sequence.num_forwards, sequence.decode_seconds = 0, 0.0

    def _leave(self, sequence: Sequence) -> None:
        """Nothing of a running sequence stays in its row."""
        if sequence.is_canvas:
            self._canvases.leave(sequence.row)
        elif sequence.seated:
            self.buffer.leave(sequence.row)
            self._ledger.leave(sequence)
        else:
            self._coming.remove(sequence)
        sequence.seated = False

    def _make_room(self) -> None:
        """Pages for those who may outgrow theirs in this step; who has to give up its own for it is put aside."""
        unread = int(self._launched is not None)
        rows = self._ledger.missing_pages_R(unread=unread).nonzero()[0].tolist()
        if not rows:
            return
        upto_R = self._ledger.upto_R(unread=unread)
        short = sorted((self._ledger.sequences[row] for row in rows), key=lambda s: s.arrival)
        for sequence in self.scheduler.grow(lambda s: int(upto_R[s.row]), short):
            self._put_aside(sequence)
        grown = [s for s in short if s.seated]
        for sequence in grown:
            self._ledger.moved(sequence)
        self._table(*grown)

    def _table(self, *sequences: Sequence) -> None:
        """Write their new pages into the device's table; rows nobody is in keep what they had, and nobody reads it."""
        new = [(s.row, place, s.pages[place]) for s in sequences for place in range(s.num_tabled, len(s.pages))]
        if new:
            row, place, page = to_device(new, self._tables_RP.device).T
            self._tables_RP[row, place] = page
        for sequence in sequences:
            sequence.num_tabled = len(sequence.pages)

    @property
    def _width(self) -> int:
        """Pages that any sequence in the buffer or on its way there has at most."""
        return max([self._ledger.most_pages, *(len(s.pages) for s in self._coming)]) or 1

    def _mixed_step(self, plan: Plan) -> tuple[Tensor | None, Tensor]:
        """Prompt chunks, resident slots and canvases in one forward; the report of those who decode in blocks, and the
        canvases' logits."""
        shift = self.model.config.shift_logits
        tables_RP = self._tables_RP[:, : self._width]
        groups: list[Rows] = []
        slots: Slots | None = None
        if plan.chunks:
            groups.append(prompt_rows(plan.chunks, tables_RP, block_size=self.block_size))
        if plan.decoding:
            buffer = self.buffer.head(plan.kind.num_rows)
            buffer.activate()
            seen = before(buffer)
            slots = resident_slots(
                buffer,
                tables_RP,
                plan.chunks,
                shift=shift,
                softens=plan.kind.softens,
                whole=self.config.batch_invariant,
            )
            groups.append(slots.rows)
        canvases = self._canvases.rows(before=sum(len(g.tokens_T) for g in groups))
        if canvases is not None:
            groups.append(canvases)
        batch = pack(groups, page_size=self.page_size, batch_invariant=self.config.batch_invariant)
        hidden_AD = self.runner.forward(batch)
        if shift and (stored := completing(plan.chunks)):
            rows, at = to_device(stored, hidden_AD.device).T
            self.runner.remember(rows, at)
        num_asked = 0 if slots is None else len(slots.rows.logits_at_A)
        split = self._canvases.num_asked if canvases is not None and batch.split is not None else None
        canvas_logits_AV = self.runner.logits(hidden_AD[num_asked:], split=split)
        if slots is None:
            return None, canvas_logits_AV
        prediction = predict(
            self.runner.blockwise_logits(hidden_AD, batch, block_size=self.block_size),
            num_asked,
            slots.at_A,
            self._vocab,
            shape=buffer.masked_RNB.shape,
            chunk=self.logits_chunk,
            draw=buffer.draw(slots.at_A) if plan.kind.draws else None,
            fallback_P=buffer.fallback_at(slots.at_A) if plan.kind.scores else None,
        )
        commit = buffer.commit(prediction, revises=plan.kind.revises, quotas=plan.kind.quotas)
        if shift:
            self.runner.remember_committed(slots.slot_end_RN, commit.num_blocks_R)
        return pack_report(seen, commit, buffer), canvas_logits_AV

    # -- after the forward --------------------------------------------------------------------------------------

    def collect(self, launched: Launched) -> list[StepOutput]:
        """A step's third part, on the host again: count it, hand out what was committed, let finished sequences go.

        Of a step launched ahead, sequences that had ended or were aborted by then have no share.
        """
        outputs = self._collect_blocks(launched.plan, launched.report)
        if launched.canvas_logits_AV is not None and self._canvases.running:
            outputs += self._collect_canvases(launched.plan, launched.canvas_logits_AV)
        return outputs

    def _collect_blocks(self, plan: Plan, copy: HostCopy | None) -> list[StepOutput]:
        self.scheduler.stored(plan.chunks)
        for sequence in {id(c.sequence): c.sequence for c in plan.chunks}.values():
            if not sequence.prompt_stored:
                sequence.num_prefill_forwards += 1
        if copy is None:
            return []
        self.last_report_X = copy.read()
        report = self.last_report
        seconds = self._seconds(plan)
        decoding = plan.decoding
        if decoding is not self._ledger.sequences:
            decoding = {row: s for row, s in decoding.items() if self.scheduler.is_running(s)}
        if self._trace is not None and decoding:
            self.record(self._trace, plan.step, decoding, report)
        self._ledger.count(decoding, report, seconds)
        outputs = []
        for row in report.num_blocks_R.nonzero()[0].tolist():
            if row in decoding:
                sequence = decoding[row]
                left = slice(int(report.num_blocks_R[row]))
                tokens = report.tokens_RNB[row, left].astype(np.int64).ravel().tolist()
                outputs.append(self._emit(sequence, tokens, report.confidence_RNB[row, left].ravel()))
                if sequence.seated:
                    self._ledger.moved(sequence)
        return outputs

    @property
    def last_report(self) -> Report:
        """What the last step that was collected reported of those who decode in blocks."""
        return unpack_report(self.last_report_X, num_slots=self.buffer.num_slots, block_size=self.block_size)

    def _seconds(self, plan: Plan) -> float:
        """Wall time of a step: since it was scheduled, or since the one before it was collected."""
        now = time.perf_counter()
        since, self._collected = max(plan.started, self._collected), now
        return now - since

    def _emit(self, sequence: Sequence, committed: list[int], confidence: np.ndarray) -> StepOutput:
        """The useful ones of newly committed tokens: behind the prompt, within the budget, before EOS."""
        request, start = sequence.request, sequence.committed
        useful = slice(max(0, len(request.prompt) - start), max(0, sequence.end - start))
        self.scheduler.commit(sequence, committed)
        ended = start + len(committed) >= sequence.end
        logprobs = log_probability(torch.from_numpy(confidence[useful])).tolist() if request.logprobs else None
        return self._hand_out(sequence, committed[useful], logprobs, ended=ended)

    def _hand_out(
        self, sequence: Sequence, fresh: list[int], logprobs: list[float] | None, *, ended: bool
    ) -> StepOutput:
        """Give out new tokens, up to an EOS among them; with that, or when `ended`, the request is done."""
        request = sequence.request
        stops = () if request.ignore_eos else self.model.config.eos_token_ids
        cut = min([fresh.index(eos) for eos in stops if eos in fresh], default=None)
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
        """The canvases' part of the step: tokens decided without a gap are handed out."""
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
                            step=plan.step,
                            slot=lane,
                            block=block,
                            state="CANVAS",
                            mask_ratio=update.mask_ratio[lane, block],
                            accepted=accepted,
                            edited=update.edited.get((lane, block), 0),
                        )
                        for (lane, block), accepted in update.accepted.items()
                    ]
                )
            known = len(sequence.emitted)
            fresh = decoder.tokens[known:]
            if not decoder.done and not sequence.request.ignore_eos:
                # an EOS counts when the blocks up to its own are complete
                fresh = list(itertools.takewhile(lambda t: t not in self.model.config.eos_token_ids, fresh))
            if fresh or decoder.done:
                logprobs = decoder.log_probs[known:] if sequence.request.logprobs else None
                outputs.append(self._hand_out(sequence, fresh, logprobs, ended=decoder.done))
        return outputs

    def record(self, trace: "TraceRecorder", step: int, decoding: Mapping[int, Sequence], report: Report) -> None:
        """Tell `trace` of a step in which `decoding` took part, by row."""
        rows = list(decoding)
        masked = report.masked_RNB[rows] > 0
        trace.add(
            step,
            [s.request.request_id for s in decoding.values()],
            [(s.committed - s.origin) // self.block_size for s in decoding.values()],
            report.states_RN[rows],
            report.mask_ratio_RN[rows],
            report.accepted_RN[rows],
            report.edited_RN[rows],
            np.where(masked, -1, report.tokens_RNB[rows]) if trace.detail else None,
            np.where(masked, 0.0, report.confidence_RNB[rows]) if trace.detail else None,
        )

    def _finish(self, sequence: Sequence) -> None:
        if self.scheduler.is_running(sequence):
            self._leave(sequence)
        self.scheduler.release(sequence)

    def check_integrity(self) -> None:
        """No page or row is lost or owned twice; raises `AssertionError`."""
        self.scheduler.check_integrity()
