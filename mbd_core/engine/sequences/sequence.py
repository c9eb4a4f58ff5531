"""One request's state in the engine: its tokens and lengths, its pages, its counts, the scores of a given text."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import ForwardExperts, Piece
from mbd_core.decoding.blocks.levenshtein import EditedBlock
from mbd_core.decoding.blocks.request import FinishReason, Output, Request, TokenScore
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.lane import num_lanes
from mbd_core.decoding.canvas.plan import PlannedDecoder
from mbd_core.decoding.grammar.guide import GuideState, Pick
from mbd_core.engine.memory.adapters import ResidentAdapter
from mbd_core.engine.sequences.slot_logs import FrameLog, StepMap, TopLog

# The log-probabilities of a given text, from left to right: each token's, in the forward before the token is put in.
#
# Forward k has seen the text before the k-th token, and masks in the rest of its block. So the sum over a text is
# exactly the log-likelihood under decoding of one position a forward, the leftmost: the chain rule over distributions
# that each sum to 1. Another order of filling gives another number.


class TextScores:
    """The scores of one request's template so far, one for each token that is decided."""

    def __init__(self, request: Request) -> None:
        self._template, self._number = request.template, len(request.committed)
        self.scores: list[TokenScore] = []

    def decide(self, logits_V: Tensor, pick: Pick, vocab: Vocab) -> tuple[int, float]:
        """The next token and its probability: the text's own token, or a token that `pick` chooses for a hole."""
        token = self._template[self._number + len(self.scores)]
        if token is None:
            token = pick(0, np.ones(vocab.size, dtype=bool)).token
        log_p_V = logits_V.float().log_softmax(-1)
        likeliest = int(vocab.likeliest(logits_V[None])[0])
        self.scores.append(
            TokenScore(logprob=float(log_p_V[token]), likeliest=likeliest, likeliest_logprob=float(log_p_V[likeliest]))
        )
        return token, float(log_p_V[token].exp())


@dataclass(eq=False)
class SequenceState:
    """One request in the engine. It has four lengths, in tokens:

        allocated   tokens that its pages can hold
        prefilled   tokens of its prefix that are stored, or that the running forward stores
        committed   final tokens that are stored, or are being stored; 0 until the prefix is stored
        emitted     useful tokens that were handed out

    Tokens that are filled and not final stand in the Block Buffer.

    adapter            its LoRA adapter; `draft_adapter` is another adapter for rows that draft, if it has any
    row                its batch row; after a preemption its former row
    arrival            its age: the sequence with the lower number is older
    tokens             the prompt and the committed tokens after it, tokens committed by an earlier engine included
    origin             the position at which its block grid begins
    end                one past the last position it may fill
    span               positions it may ever store (`span`): up to `end` and the rest of its last block or row
    window             positions of its whole buffer, or of the longest row that its decoder plans
    num_lanes          copies of its positions in the cache: the lanes of a canvas, otherwise 1
    is_canvas          it decodes on a canvas, not in blocks
    is_planned         a decoder plans its rows, on a canvas or after its prefix; it is not in the Block Buffer
    decoder            the decoder that plans its rows after a prefix; it survives a preemption
    store              number of positions of each row that stores its prefix from `origin` on; `None`: causal rows of
                       any length
    prefix_length      tokens to be stored before it decodes: the prompt up to its first block in the buffer, or all
                       tokens committed before a preemption. If the prompt attends in full, at least the prompt. For
                       planned rows, the tokens that its decoder does not run itself. For a canvas, 0
    saved_row          its Block Buffer row, while it is preempted
    num_resident       its blocks in that row: 1 when it joins, after a preemption the number it left with
    num_pages_in_table  how many of its pages stand in the device's page table
    chain              hashes of its leading full pages, as far as they were needed
    num_shareable      leading pages whose tokens are final, so that other sequences may share them
    step_map           if the request asks for a rollout: the forwards that wrote the positions of its slots
    top_log            if the request asks for top_logprobs: the likeliest tokens of its slots' positions
    frame_log          if the request asks for frames: its slots after its last forward
    guide              its state in its grammar, if it has a grammar
    text_scores        if its text is scored: the scores of its tokens
    answer, tail       the tokens it handed out, without the request's `committed`, and the rest of its last
                       block, as in `Output`
    counted            its forwards, preemptions and decoding seconds, and the cached tokens of its first admission
    experts            if the request asks for them: the experts of its forwards
    block              if edits insert and remove tokens: its present block
    weights            the versions of the weights under which it was admitted first and last
    block_ages         forwards that the blocks in its slots took part in, while it is preempted
    added_at, admitted_at, stored_at  when it arrived, was first admitted, and had its prompt stored, in seconds of
                       `time.perf_counter`; 0 before that
    prompt_until       `stored_at`; or the beginning of the forward that stored the last prompt tokens, if this forward
                       also decoded
    """

    request: Request
    block_size: int
    adapter: ResidentAdapter | None = None
    draft_adapter: ResidentAdapter | None = None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    arrival: int = 0
    num_pages_in_table: int = 0
    seated: bool = False
    prefilled: int = 0
    committed: int = 0
    answer: Piece = field(init=False)
    tail: Piece = Piece()
    experts: list[ForwardExperts] = field(default_factory=list)
    guide: GuideState | None = None
    block: EditedBlock | None = None
    decoder: PlannedDecoder | None = None
    saved_row: list[Tensor] | None = None
    num_resident: int = 1
    chain: list[bytes] = field(default_factory=list)
    num_shareable: int = 0
    counted: Counts = Counts()
    block_ages: np.ndarray | None = None
    weights: tuple[int, int] | None = None
    added_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0
    stored_at: float = 0.0
    prompt_until: float = 0.0
    tokens: list[int] = field(init=False)
    prefix_length: int = field(init=False)
    origin: int = field(init=False)
    end: int = field(init=False)
    span: int = field(init=False)
    window: int = field(init=False)
    num_lanes: int = field(init=False)
    is_canvas: bool = field(init=False)
    is_planned: bool = field(init=False)
    store: int | None = field(init=False)
    step_map: StepMap | None = field(init=False)
    top_log: TopLog | None = field(init=False)
    frame_log: FrameLog | None = field(init=False)
    text_scores: TextScores | None = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = [*request.prompt, *request.committed]
        self.answer = request.nothing
        self.origin = request.decoding.grid_origin(len(request.prompt))
        self.end = len(request.prompt) + request.max_tokens
        planned = request.decoding.planned
        self.span, self.window = span(request, self.block_size), request.decoding.buffer_size * self.block_size
        self.store = self.block_size
        if planned is not None:
            self.window, self.store = planned.longest, planned.store
        self.num_lanes, self.is_canvas = lanes(request), request.decoding.canvas is not None
        self.is_planned = self.is_canvas or planned is not None
        self.prefix_length = 0 if self.is_canvas else request.first_block_start(len(self.tokens))
        self.text_scores = TextScores(request) if request.scored else None
        self.step_map = self._step_map()
        self.top_log = TopLog(request, self.block_size) if request.top_logprobs else None
        self.frame_log = FrameLog(request, self.block_size) if request.frames else None

    @property
    def is_drafted(self) -> bool:
        """Whether the engine's draft model drafts for it. Its pages then hold the draft model's keys too."""
        verify = self.request.decoding.verify
        return verify is not None and verify.draft_model

    @property
    def num_emitted(self) -> int:
        """Useful tokens that were handed out, tokens committed by an earlier engine included."""
        return len(self.request.committed) + len(self.answer)

    @property
    def first_window(self) -> int:
        """Positions it needs to begin decoding: its prefix and a whole buffer after it; a canvas needs all."""
        return self.span if self.is_canvas else min(self.span, self.prefix_length + self.window)

    @property
    def next_stop(self) -> int:
        """Positions that the next planned row may reach."""
        return min(self.span, self.committed + self.window)

    @property
    def prompt_stored(self) -> bool:
        """Its prefix is stored, or is being stored by this step."""
        return self.prefilled == self.prefix_length

    @property
    def decodes(self) -> bool:
        """It takes part in the next forward with blocks of the Block Buffer."""
        return not self.is_planned and self.prompt_stored

    @property
    def shares_prefix(self) -> bool:
        """Whether its pages may be shared. Their keys must depend only on earlier tokens, which excludes canvases and
        prompts under full attention (D2F). A request that records experts shares none: a shared page has no experts
        for it."""
        config = self.request.decoding
        is_alike = config.canvas is None and not config.attends_in_full and config.prefix_cache is not False
        return is_alike and not self.request.experts

    def prefilled_to(self, stop: int) -> None:
        """Note that its prefix is stored, or being stored, up to `stop`; a whole prefix is committed."""
        self.prefilled = stop
        if stop == self.prefix_length:
            self.committed = stop

    def commit(self, tokens: list[int]) -> None:
        """Append final tokens, whole blocks from position `committed` on. The boundary block repeats the prompt's
        remainder."""
        if not tokens:
            return
        remainder = self.tokens[self.committed :]
        assert len(tokens) % self.block_size == 0, f"{len(tokens)} tokens are not whole blocks"
        assert tokens[: len(remainder)] == remainder, "a committed block changes the prompt's remainder"
        self.tokens += tokens[len(remainder) :]
        self.committed = len(self.tokens)

    def extend(self, tokens: list[int], num_stored: int) -> None:
        """Appends its decoder's final tokens; of all tokens so far, the first `num_stored` are stored."""
        self.tokens += tokens
        self.committed = num_stored
        assert self.is_canvas or self.committed <= len(self.tokens), "positions without tokens count as stored"

    def began_under(self, version: int) -> None:
        """Note that it was admitted, for the first time or again, under these weights."""
        self.weights = (self.weights[0] if self.weights else version, version)

    def rewind(self) -> None:
        """Resets it after the loss of its pages: its committed tokens must be stored again before it goes on."""
        self.prefix_length = max(self.prefix_length, self.committed)
        self.prefilled = self.committed = 0
        self.counted += Counts(num_preemptions=1)

    def _step_map(self) -> StepMap | None:
        config = self.request.decoding
        if not self.request.has_rollout or self.is_planned:
            return None
        revises = config.t2t is not None or config.soft is not None
        return StepMap(config.buffer_size, self.block_size, edits=revises)

    def adapter_slot(self, *, drafts: bool) -> int:
        """The adapter slot of its rows, or with `drafts` of the rows that draft; 0 without an adapter."""
        adapter = self.draft_adapter if drafts and self.draft_adapter is not None else self.adapter
        return 0 if adapter is None else adapter.slot

    @property
    def queue_seconds(self) -> float:
        """Seconds from its arrival to its first batch row; 0 before that.

        A step that admits the request may also decode it. The step's seconds begin with its plan, before the
        admission.
        """
        end = min(self.admitted_at, self.prompt_until) if self.prompt_until else self.admitted_at
        return max(0.0, end - self.added_at)

    @property
    def prompt_seconds(self) -> float:
        """Seconds from its first batch row to `prompt_until`; 0 before that."""
        return max(0.0, self.prompt_until - self.admitted_at)

    def counts(self) -> Counts:
        """Its counts, without the forwards of its present row in the Block Buffer (`Ledger.counts` adds them)."""
        return replace(
            self.counted,
            num_prompt_tokens=len(self.request.prompt),
            num_tokens=self.request.num_generated(self.num_emitted),
            queue_seconds=self.queue_seconds,
            prompt_seconds=self.prompt_seconds,
        )

    def output(self, reason: FinishReason, *, stop_reason: int | None = None) -> Output:
        return Output(
            request_id=self.request.request_id,
            finish_reason=reason,
            counts=self.counts(),
            piece=self.answer,
            tail=self.tail,
            committed=self.request.committed,
            stop_reason=stop_reason,
            experts=tuple(self.experts),
            scores=() if self.text_scores is None else tuple(self.text_scores.scores),
        )


def lanes(request: Request) -> int:
    """Copies of its keys that a request needs: the lanes of its canvas, otherwise 1."""
    canvas = request.decoding.canvas
    return 1 if canvas is None else num_lanes(canvas, request.max_tokens)


def span(request: Request, block_size: int) -> int:
    """Positions a request may ever store: to its budget's end and the rest of its last block, or its overhang."""
    planned = request.decoding.planned
    if planned is not None or request.decoding.canvas is not None:
        return len(request.prompt) + request.max_tokens + (0 if planned is None else planned.overhang)
    origin = request.decoding.grid_origin(len(request.prompt))
    blocks = -(-(len(request.prompt) + request.max_tokens - origin) // block_size)
    return origin + blocks * block_size


def pages_needed(request: Request, *, block_size: int, page_size: int) -> int:
    """Pages that hold the `span` positions of a request, in each of its lanes."""
    return lanes(request) * -(-span(request, block_size) // page_size)
