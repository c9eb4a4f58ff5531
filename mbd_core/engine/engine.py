"""The Block Buffer engine: continuous batching of requests over one model (paper Section 3.3)."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.levenshtein import EditTokens
from mbd_core.decoding.blocks.request import Output, Request, StepOutput, aborted_step
from mbd_core.decoding.grammar.closings import STEP_TRIES
from mbd_core.decoding.grammar.guide import Grammars, Guide, GuideState
from mbd_core.engine.build import build_parts
from mbd_core.engine.collector import Collector
from mbd_core.engine.config import EngineConfig, SwapMode
from mbd_core.engine.measures import EngineCounts, EngineMeasures, measure
from mbd_core.engine.memory.adapters import AdapterInUse
from mbd_core.engine.memory.dormant import DormantMemory, NotEnoughMemory, gpu_tensors
from mbd_core.engine.memory.weights import StagedWeights, WeightSource, overwrite, stage_weights
from mbd_core.engine.ranks import Alone, EngineCall, Ranks, on_all_ranks, with_next_step
from mbd_core.engine.schedule.scheduler import Scheduler
from mbd_core.engine.sequences.admission import AdmittedRequest, RequestRefused, compile_guide
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.decode import decode_step, run_eagerly, store_step
from mbd_core.engine.step.kinds import StepKind, row_limits
from mbd_core.engine.step.planned_graphs import planned_kinds
from mbd_core.engine.step.report import HostCopy, StepReport
from mbd_core.engine.step.routed_experts import experts_of
from mbd_core.engine.step.rows import SlotLayout, StepRows, packed_rows
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step_ahead import LaunchedStep, StepAhead, StepPlan
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import recorded_experts
from mbd_core.ops.attention.choice import AttentionKernel

if TYPE_CHECKING:
    from mbd_core.trace.recorder import TraceRecorder


class Engine:
    """Requests in, committed tokens out; `step()` is one forward: schedule, launch, collect."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        trace: "TraceRecorder | None" = None,
        vocab_limit: int | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks | None = None,
        draft_model: Decoder | None = None,
    ) -> None:
        """Builds the parts of an engine; raises `ValueError` for a setting that cannot be honoured.

        vocab_limit  the tokenizer's size: ids from there on are padding and never predicted
        grammars     compiles grammars; without it requests with a grammar are refused
        clock        measures steps, in seconds
        ranks        the ranks that hold the model together, this rank included; by default this rank alone
        draft_model  a smaller model of the same tokenizer, which drafts for requests that ask for it
        """
        parts = build_parts(
            model, config, vocab_limit=vocab_limit, grammars=grammars is not None, draft_model=draft_model
        )
        self.model, self.config, self._grammars = model, config, grammars
        self.ranks: Ranks = Alone() if ranks is None else ranks
        self.block_size, self.page_size, self.num_pages = parts.block_size, parts.page_size, parts.num_pages
        self.static_shapes, self.overlap = parts.static_shapes, parts.overlap
        self.admission, self.adapters, self.ahead = parts.admission, parts.adapters, StepAhead()
        self._seating, self._state, self._kinds, self._graphs = parts.seating, parts.state, parts.kinds, parts.graphs
        self.scheduler: Scheduler = parts.seating.scheduler
        if trace is not None:
            trace.block_size = self.block_size
        self.pacer, self.drafting, self._clock = parts.pacer, parts.drafting, clock
        self._collector = Collector(
            self._seating,
            self.pacer,
            self.drafting,
            clock=clock,
            eos_token_ids=model.config.eos_token_ids,
            share=self.ranks.share,
            tries=partial(step_tries, config),  # no method: the engine must die with its last reference
            trace=trace,
        )
        self._num_steps = 0
        self._unsent_steps: list[StepOutput] = []  # collected between steps, given out by the next step
        self._staged_weights: StagedWeights | None = None
        self.weights_version = 0
        """The version of the weights: the number of swaps, or the version that came with the last swap."""
        self._dormant: DormantMemory | None = None

    # -- parts --------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> BlockBuffer:
        return self._state.buffer

    @property
    def runner(self) -> ModelRunner:
        return self._state.runner

    @property
    def attention(self) -> AttentionKernel:
        return self._state.runner.attention

    @property
    def graphs(self) -> bool:
        """Whether steps can be replayed as CUDA graphs."""
        return self._graphs.enabled

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit into the KV memory."""
        return self.scheduler.pool.capacity * self.page_size

    def graph_report(self) -> dict[str, Any]:
        """Why there are no graphs; the number and bytes of graphs; steps so far, replayed and eager (`StepGraphs`)."""
        return self._graphs.report()

    @property
    def last_report(self) -> StepReport:
        """The report of the last step that was read, on the sequences that decode in blocks."""
        return self._collector.last_report

    @property
    def counts(self) -> EngineCounts:
        """The counts of the steps so far."""
        return self._collector.counts

    def measures(self) -> EngineMeasures:
        """The engine's work so far and its load. May be called from any thread, and delays no step."""
        return measure(
            self.scheduler,
            self.pacer,
            counts=self.counts,
            graph_report=self.graph_report(),
            report=self.last_report,
            rows=self._seating.ledger.sequences,
        )

    def order(self, call: EngineCall) -> Any:
        """Makes a call on every rank."""
        return call.apply(self)

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; it joins the batch at the next step that has room. Raises `RequestRefused`."""
        self.add_admitted(self.admission.check(request))

    def add_admitted(self, admitted_request: AdmittedRequest) -> None:
        """Queue a request that was checked before; raises `RequestRefused` if its id is being served, and if its
        adapter was unloaded since."""
        request = admitted_request.request
        if self.asleep:
            raise RequestRefused("request_id", "the engine sleeps; wake it up first")
        self.admission.check_adapter(request)
        if self.scheduler.find(request.request_id) is not None:
            raise RequestRefused("request_id", f"request_id '{request.request_id}' is already being served")
        guide: GuideState | None = admitted_request.guide or self.compile(request)
        sequence = self.scheduler.add(
            request, self.adapters.get(request.adapter), self.adapters.get(request.draft_adapter)
        )
        sequence.added_at, sequence.guide = admitted_request.checked_at, guide

    def compile(self, request: Request) -> Guide | None:
        """A request's compiled grammar, `None` without a grammar; may be called from any thread. Raises
        `RequestRefused` if the grammar cannot be honoured."""
        if request.grammar is None:
            return None
        assert self._grammars is not None, "its admission refuses a grammar"
        return compile_guide(self._grammars, request)

    @with_next_step
    def abort(self, request_id: str) -> Output | None:
        """Stop a request and free all it holds; `None` if it is not known (any more)."""
        held_outputs = [o.output for o in self._unsent_steps if o.request_id == request_id]
        self._unsent_steps = [o for o in self._unsent_steps if o.request_id != request_id]
        sequence = self.scheduler.find(request_id)
        if sequence is None:  # it may have ended in a step whose outputs are still unsent
            return next((output for output in held_outputs if output is not None), None)
        self._seating.finish(sequence)
        self._swap_if_due()
        return sequence.output("abort")

    def abort_all(self) -> list[StepOutput]:
        """Stops every request; returns all last outputs, with the committed tokens that were not handed out yet."""
        outputs = list(self._unsent_steps)
        for name in [o.request_id for o in outputs if o.output is not None]:
            self.abort(name)
        for sequence in [*self.scheduler.running.values(), *self.scheduler.waiting]:
            if (output := self.abort(sequence.request.request_id)) is not None:
                outputs.append(aborted_step(output, weights=sequence.weights or (0, 0)))
        return outputs

    @with_next_step
    def preempt(self) -> str | None:
        """Preempts the youngest running request, which goes on later; returns its id, `None` if no request runs."""
        self._unsent_steps += self.land()
        sequence = self.scheduler.preempt_youngest()
        if sequence is None:
            return None
        self._seating.set_aside(sequence)
        return sequence.request.request_id

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.ahead.step or self._unsent_steps)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_known(self) -> int:
        """Requests that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Serve `requests` to the end; outputs in their order.

        Raises `ValueError`, and serves none, for a request that cannot be served, for ids that repeat, and while
        requests from `add` are still running, because their outputs would have nowhere to go.
        """
        if self.ahead.step is not None and not self.num_known:
            self.step()  # ends the step of aborted requests
        self.check_idle("generate")
        if len({r.request_id for r in requests}) < len(requests):
            raise ValueError("generate() needs a request_id of its own for each request")
        admitted_requests = [self.admission.check(request) for request in requests]
        for admitted_request in admitted_requests:
            self.add_admitted(admitted_request)
        outputs: dict[str, Output] = {}
        with self.pacer.without_streams():
            while self.has_work:
                for step in self.step():
                    if step.output is not None:
                        outputs[step.request_id] = step.output
        return [outputs[r.request_id] for r in requests]

    def check_idle(self, method: str) -> None:
        """Raises `ValueError` while requests are being served; `method` names the call that needs an idle engine."""
        if self.has_work:
            num_unfinished = self.num_known + sum(o.output is not None for o in self._unsent_steps)
            raise ValueError(f"{method}() needs an idle engine; {num_unfinished} requests are still being served")

    @on_all_ranks
    @torch.inference_mode()
    def prepare(self, decoding: DecodingConfig) -> int:
        """Captures graphs for greedy requests with `decoding`, and, if they decode in slots, larger graphs for all
        other requests in slots; returns the number of graphs.

        Graphs are captured here and never later: a step of a kind without one runs eagerly. Raises `ValueError` while
        requests are being served.
        """
        self.check_idle("prepare")
        if decoding.in_buffer:
            return self._graphs.capture(self._kinds.to_capture(decoding))
        decoding, adapters = self.admission.in_draft_blocks(decoding), self.config.max_adapters > 0
        draft_runner = self._state.draft_runner
        lacks_draft = decoding.verify is not None and decoding.verify.draft_model and draft_runner is None
        draft = None if draft_runner is None else draft_runner.model.config
        limits = row_limits(self.model.config, self.config, self.page_size, draft)
        if lacks_draft or (decoding.planned is not None and decoding.planned.longest > limits.positions):
            return 0  # admission refuses every such request
        return self._graphs.capture((), planned_kinds(decoding, max_rows=self.config.max_rows, adapters=adapters))

    @on_all_ranks
    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Raises `ValueError` while requests are being served."""
        self.check_idle("forget_prefixes")
        self.scheduler.pool.forget()

    def close(self) -> None:
        """Let go of the captured graphs, and of the other processes where there are several ranks."""
        self._graphs.release()

    # -- adapters and weights, between two steps ----------------------------------------------------------------

    @on_all_ranks
    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter, a folder in PEFT's layout; from now on requests can name it as their `adapter`.

        Raises `ValueError`, and changes nothing, if no slot is free or the adapter does not fit the model
        (`checkpoint.adapter`).
        """
        self.adapters.place(name, self.ranks.agree(lambda: self.adapters.read(name, folder)))

    @on_all_ranks
    def unload_adapter(self, name: str) -> None:
        """Frees an adapter's slot. Raises `ValueError` if it is not loaded, `AdapterInUse` while requests use it."""
        if self.adapters.get(name) is None:
            raise ValueError(f"adapter '{name}' is not loaded")
        sequences = (*self.scheduler.running.values(), *self.scheduler.waiting)
        if users := sum(name in (s.request.adapter, s.request.draft_adapter) for s in sequences):
            raise AdapterInUse(f"adapter '{name}' cannot be unloaded while {users} requests use it")
        self.adapters.remove(name)

    @on_all_ranks
    def update_weights(self, source: WeightSource, *, mode: SwapMode = "preempt", version: int | None = None) -> None:
        """Replaces the model's weights by weights of the same shapes: a model folder, or the decoder's tensors by
        name. No request is lost.

        "preempt" swaps at once: running requests keep their committed tokens, which are stored again, and go on.
        "wait" swaps when the running requests have ended; steps go on meanwhile, and no other request begins.
        The prefix cache is emptied; adapters stay. `weights_version` becomes `version`, by default the old version
        plus 1. Raises `ValueError` for weights that do not fit, while other weights wait, and while asleep.
        """
        weights = self.ranks.agree(lambda: self._stage(source, mode))
        self._staged_weights, self.scheduler.closed = replace(weights, version=version), True
        self._swap_if_due()

    def _stage(self, source: WeightSource, mode: SwapMode) -> StagedWeights:
        """Read and check other weights; change nothing."""
        if not isinstance(source, Path):
            source = self.ranks.each(source)
        try:
            if self.asleep:
                raise ValueError("the engine sleeps, and its weights have no place; wake it up first")
            if self._staged_weights is not None:
                raise ValueError(
                    "other weights still wait for the requests that run; try again when they are in place"
                )
            return stage_weights(self.model, source, mode)
        finally:
            if not isinstance(source, Path):
                for _ in source:  # a rank that refuses the weights still takes the rest: other ranks send or wait
                    pass

    @property
    def swap_waits(self) -> bool:
        """Whether weights are staged that are not in place yet."""
        return self._staged_weights is not None

    def _swap_if_due(self) -> None:
        if self._staged_weights is not None and self.scheduler.may_swap(self._staged_weights.mode):
            self._swap(self._staged_weights)

    @torch.inference_mode()
    def _swap(self, weights: StagedWeights) -> None:
        self._unsent_steps += self.land()
        while (sequence := self.scheduler.preempt_youngest()) is not None:
            self._seating.set_aside(sequence)
        overwrite(self.model, weights)
        self.runner.weights_changed()
        self.weights_version = self.weights_version + 1 if weights.version is None else weights.version
        self.scheduler.weights_changed(self.weights_version)
        self._staged_weights, self.scheduler.closed = None, False

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps: its memory is given back, and it takes no requests."""
        return self._dormant is not None

    @on_all_ranks
    def sleep(self) -> int:
        """Gives back the memory of KV pages and graphs, and on a GPU of the weights, which wait on the host. Returns
        the bytes. The prefix cache is emptied. Raises `ValueError` while requests are being served, and asleep."""
        self.check_idle("sleep")
        if self.asleep:
            raise ValueError("the engine sleeps already")
        return self.ranks.total(self._give_memory_back())

    def _give_memory_back(self) -> int:
        self._graphs.release()
        self.scheduler.weights_changed(self.weights_version)  # the weights stay, but the pages lose their content
        runners = [each for each in (self.runner, self._state.draft_runner) if each is not None]
        self._dormant = DormantMemory(
            caches=[part for each in runners for part in (each.cache.k, each.cache.v)],
            weights=[tensor for each in runners for tensor in gpu_tensors(each.model)],
        )
        return self._dormant.num_bytes

    @on_all_ranks
    def wake_up(self) -> None:
        """Takes the memory again; `prepare` captures graphs anew. Raises `ValueError` awake, and torch's error if
        memory is short."""
        if self._dormant is None:
            raise ValueError("wake_up() needs an engine that sleeps")
        try:
            self.ranks.agree(self._dormant.restore)
        except ValueError as error:
            if not self._dormant.num_bytes:  # this rank has its memory, another has not
                self._give_memory_back()
            raise NotEnoughMemory(f"there is not enough memory to wake up: {error}") from error
        self._dormant = None

    # -- the loop -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Runs one forward for all sequences and returns the tokens it committed. Without work it does nothing."""
        outputs = self._advance()
        self._swap_if_due()
        return outputs

    def _advance(self) -> list[StepOutput]:
        if self._unsent_steps:
            outputs, self._unsent_steps = self._unsent_steps, []
            return outputs
        if not self.has_work:
            return []
        if self.ahead.step is not None and not self._may_run_ahead():
            return self.land()
        plan = self.schedule()
        step = self.launch(plan)
        if self.overlap and self._is_static(plan) and not plan.chunks:
            earlier_step = self.ahead.put(step)
            return [] if earlier_step is None else self.collect(earlier_step)
        assert self.ahead.step is None
        return self.collect(step)

    def land(self) -> list[StepOutput]:
        """Collect the step that runs ahead, if there is one."""
        step = self.ahead.take()
        return [] if step is None else self.collect(step)

    def schedule(self) -> StepPlan:
        """A step's first part, on the host: make room, admit, choose prompt chunks, seat sequences whose prompt is
        complete."""
        started_at, drafts = self._clock(), self.drafts()
        self._seating.make_room(unread=self.ahead.unread)
        self.admit()
        chunks = self._seating.prefill(self.pacer.pace)
        max_blocks = self.config.blocks_each(self.num_running)
        self._seating.planned.hold_to(self.config.budget_each(self.num_running), drafts=drafts)
        self._num_steps += 1
        return StepPlan(
            number=self._num_steps - 1,
            decoding=self._seating.ledger.sequences,
            chunks=chunks,
            kind=self._kind(max_blocks),
            max_blocks=max_blocks,
            started_at=started_at,
        )

    def _kind(self, max_blocks: int) -> StepKind:
        """The kind of the next step. A packed step depends on its rows and its work alone."""
        ledger, unread = self._seating.ledger, self.ahead.unread
        if not self.static_shapes:
            return self._kinds.whole(num_rows=ledger.num_rows, work=ledger.work())
        ledger.hold_to(max_blocks)
        return self._kinds.kind(
            num_rows=ledger.num_rows,
            num_slots=ledger.most_slots(unread=unread),
            num_asked=ledger.asks_at_most(unread=unread),
            work=ledger.work(),
        )

    def drafts(self) -> bool:
        """Whether requests that may draft do so in the next step. The budget may still keep them from it."""
        if self.drafting is None:
            return True
        running, waiting = self.scheduler.running, self.scheduler.waiting
        soon = chain(running.values(), islice(waiting, max(0, self.config.max_rows - len(running))))
        return self.drafting.choose(self._seating.planned.choices(sum(s.is_planned for s in soon)))

    def admit(self) -> list[SequenceState]:
        """Gives waiting requests the free batch rows and pages; returns the sequences that run from now on."""
        return self._seating.admit()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """A step's second part, on the device: one forward, or two (see `EngineConfig`), then predict and commit."""
        num_pages = self._seating.num_pages
        self.buffer.hold_to(plan.max_blocks)
        tables_RP, planned = self._state.tables_RP[:, :num_pages], self._seating.planned
        layout = SlotLayout(
            shift=self.model.config.shift_logits,
            softens=plan.kind.work.softens,
            whole=self.config.batch_invariant,
        )

        def lay_out(buffer: BlockBuffer | None) -> StepRows:
            return packed_rows(
                buffer,
                tables_RP,
                plan.chunks,
                planned,
                layout,
                block_size=self.block_size,
                adapters_R=self._state.adapters_R if self._seating.adapts else None,
            )

        if self._is_static(plan):
            if plan.chunks:  # first: a sequence whose prompt they complete decodes in this step
                store_step(self._state, lay_out(None))
            return LaunchedStep(plan=plan, report=HostCopy(self._graphs.run(plan.kind, num_pages=num_pages)))
        recording = [s for s in self.scheduler.running.values() if s.request.experts]
        if recording:
            with recorded_experts(self.model) as calls:
                step = self._launch_packed(plan, lay_out, replays=False)
            assert self.runner.last_batch is not None
            return replace(step, experts=experts_of(recording, self.runner.last_batch, calls))
        return self._launch_packed(plan, lay_out, replays=not plan.chunks)

    def _launch_packed(
        self, plan: StepPlan, lay_out: Callable[[BlockBuffer | None], StepRows], *, replays: bool
    ) -> LaunchedStep:
        if not plan.decoding:
            run = self._graphs.forward if replays else run_eagerly
            planned = store_step(self._state, lay_out(None), run=run)
            return LaunchedStep(plan=plan, report=None, planned=planned)
        ids = self.model.config.edit_token_ids
        steering = self._seating.ledger.steering(
            self.ranks.share, tries=step_tries(self.config), ids=EditTokens(*ids) if ids else None
        )
        report, planned_part = decode_step(self._state, plan.kind, lay_out, steering)
        return LaunchedStep(plan=plan, report=HostCopy(report), planned=planned_part)

    def collect(self, step: LaunchedStep) -> list[StepOutput]:
        """A step's third part, on the host again: counts it, hands out committed tokens, releases ended sequences."""
        return self._collector.collect(step)

    def _is_static(self, plan: StepPlan) -> bool:
        """Whether a step decodes everything in blocks and on the device, and records no experts."""
        is_static = self.static_shapes and bool(plan.decoding) and not self._seating.decides_on_host
        return is_static and not any(s.request.experts for s in self.scheduler.running.values())

    def _may_run_ahead(self) -> bool:
        """Whether no sequence waits to be seated, and pages suffice for all that this step and the next may fill."""
        running = self.scheduler.running
        if not running or (self.scheduler.waiting and len(running) < self.config.max_rows):
            return False
        return int(self._seating.ledger.missing_pages_R(unread=1).sum()) <= self.scheduler.pool.num_free

    def check_integrity(self) -> None:
        """No page or batch row is lost or owned twice; raises `AssertionError`."""
        self.scheduler.check_integrity()


def step_tries(config: EngineConfig) -> float:
    """The work of all guides in a step. In a batch-invariant engine a row must not wait for other rows."""
    return math.inf if config.batch_invariant else STEP_TRIES
