"""Whether an engine can ever serve a request: checked once, and the result is a type."""

import time
from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mbd_core.decoding.answers.piece import MAX_TOPS
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import MAX_STOP_IDS, PENALTIES
from mbd_core.decoding.canvas.canvas_decoder import canvas_max_tokens, check_canvas
from mbd_core.decoding.grammar.guide import Grammars, Guide, GuideState
from mbd_core.decoding.grammar.schemas import GrammarRefused
from mbd_core.engine.sequences.sequence import pages_needed
from mbd_core.models.model_config import ModelConfig

RefusedField = Literal[
    "prompt",
    "committed",
    "max_tokens",
    "decoding",
    "request_id",
    "adapter",
    "rollout",
    "experts",
    "grammar",
    "template",
    "frames",
    "logit_bias",
    "stop_token_ids",
    "min_tokens",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
Code = Literal["invalid_value", "context_length_exceeded"]


class RequestRefused(ValueError):
    """A request that cannot be served. `field` names the wrong field, `code` the fault, in OpenAI's words."""

    def __init__(self, field: RefusedField, message: str, code: Code = "invalid_value") -> None:
        super().__init__(message)
        self.field, self.code = field, code

    def __reduce__(self) -> tuple[type["RequestRefused"], tuple[RefusedField, str, Code]]:
        """It crosses processes."""
        return type(self), (self.field, str(self), self.code)


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that its engine can serve; only `Admission.check` makes one.

    checked_at  time of the check, in seconds of `time.perf_counter`; the request waits from then on
    guide       its compiled grammar; if `None`, the engine compiles the grammar. A follower's guide is the grammar's
                state
    """

    request: Request
    checked_at: float = field(default_factory=time.perf_counter, compare=False)
    guide: GuideState | None = field(default=None, compare=False)


class Admission:
    """The limits of one engine: its positions, the model's vocabulary, its slots, its pages.

    max_positions  positions of a sequence, at most the model's
    num_pages      pages that a sequence can own
    adapters       names of the loaded LoRA adapters, which change while the engine runs. A copy of this object in
                   another process has no names and leaves the check to the engine
    ar_adapters    names of the adapters with which the model has an autoregressive mode
    grammars       whether the engine can compile grammars
    draft          the engine's draft model, if it has one
    batch_invariant  whether no answer may depend on the load
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        max_positions: int,
        block_size: int,
        buffer_size: int,
        page_size: int,
        num_pages: int,
        prefix_caching: bool,
        adapters: Set[str] = frozenset(),
        ar_adapters: Set[str] = frozenset(),
        grammars: bool = False,
        draft: ModelConfig | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._draft, self._batch_invariant = draft, batch_invariant
        self._adapters: Set[str] | None = adapters
        self._ar_adapters = ar_adapters
        self.max_positions = max_positions
        self._model, self._prefix_caching = model, prefix_caching
        self._block_size, self._buffer_size = block_size, buffer_size
        self._page_size, self._num_pages = page_size, num_pages
        self._grammars = grammars

    @property
    def model(self) -> ModelConfig:
        return self._model

    @property
    def buffer_size(self) -> int:
        """Slots of the engine's buffer."""
        return self._buffer_size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_adapters": None}

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer can have together."""
        return min(self.max_positions, self._num_pages * self._page_size)

    def room(self, prompt_length: int) -> int:
        """Tokens that can follow a prompt of `prompt_length`; a canvas with several lanes may have less."""
        return max(0, self.max_length - prompt_length)

    def default_max_tokens(self, request: Request) -> int:
        """The `max_tokens` for a client that gave none: `request.max_tokens`, or the nearest number that its method
        can decode and that fits after its prompt. If nothing fits, the number is 1, which `check` refuses."""

        def pages(max_tokens: int) -> int:
            candidate = replace(request, max_tokens=max_tokens)
            return pages_needed(candidate, block_size=self._block_size, page_size=self._page_size)

        request = replace(request, decoding=self.in_draft_blocks(request.decoding))
        canvas, preferred = request.decoding.canvas, request.max_tokens
        limit = bisect_right(range(1, self.room(len(request.prompt)) + 1), self._num_pages, key=pages)
        number = (
            min(preferred, limit) if canvas is None else canvas_max_tokens(canvas, preferred=preferred, most=limit)
        )
        return max(1, number)

    def in_draft_blocks(self, decoding: DecodingConfig) -> DecodingConfig:
        """`decoding` with the draft model's block size, if the draft model drafts for its requests."""
        verify = decoding.verify
        if self._draft is None or verify is None or not verify.draft_model:
            return decoding
        return replace(decoding, block_size=self._draft.block_size)

    def _what_fits(self, request: Request) -> str:
        number = self.default_max_tokens(request)
        candidate = replace(request, max_tokens=number)
        pages = pages_needed(candidate, block_size=self._block_size, page_size=self._page_size)
        if number <= self.room(len(request.prompt)) and pages <= self._num_pages:
            return f"max_tokens={number} fits after this prompt"
        return f"shorten the prompt: {self.max_length} tokens fit in all"

    def check(self, request: Request) -> AdmittedRequest:
        """Raises `RequestRefused` for a request that this engine can never serve; it names the value and a remedy."""
        request = replace(request, decoding=self.in_draft_blocks(request.decoding))
        self._check_prompt(request)
        self.check_adapter(request)
        self._check_method(request)
        _check_rollout(request)
        self._check_experts(request)
        _check_frames(request)
        self._check_grammar(request)
        self._check_template(request)
        self._check_ends(request)
        self._check_choice(request)
        num_pages = pages_needed(request, block_size=self._block_size, page_size=self._page_size)
        if num_pages > self._num_pages:
            raise RequestRefused(
                "max_tokens",
                f"the prompt and max_tokens={request.max_tokens} need {num_pages} KV pages, the engine has "
                f"{self._num_pages}; {self._what_fits(request)}, more with more num_pages",
                "context_length_exceeded",
            )
        return AdmittedRequest(request)

    def check_adapter(self, request: Request) -> None:
        """Raises `RequestRefused` if an adapter of the request is not loaded (any more)."""
        for name in (request.adapter, request.draft_adapter):
            if name is None or self._adapters is None or name in self._adapters:
                continue
            names = ", ".join(sorted(self._adapters)) or "none"
            raise RequestRefused("adapter", f"adapter '{name}' is not loaded; loaded: {names}")

    def _check_grammar(self, request: Request) -> None:
        if request.grammar is None:
            return
        changes, causal = _revising_part(request.decoding), request.decoding.causal
        if causal is not None and causal.method == "ar" and causal.thinking is None:
            changes = None  # it decodes token by token, and a guide takes in each token
        verify = request.decoding.verify
        if verify is not None and verify.exact:
            changes = None  # from left to right, as at block size 1
        if changes is not None:
            reason = f"{changes} changes tokens that the grammar has accepted; decode without it"
            if causal is not None:
                reason = "no guide follows drafts, or blocks that are filled in any order; give causal the method ar"
                if causal.method == "ar":
                    reason = "thinking inserts a token that the grammar may refuse; leave it out"
            if verify is not None:
                reason = "verify fills a block in any order; let verify.exact be true, or verify be null"
            if changes == "renoise":
                reason = "a canvas is drawn anew in each forward, and no guide follows it; decode with another model"
            if changes == "canvas":
                reason = "a canvas does not fill an answer from left to right; it needs a model that decodes in blocks"
        elif request.decoding.entropy is not None:
            reason = "it is filled from left to right, and entropy chooses positions anywhere; leave out entropy"
        elif request.template:
            reason = "with a template its text has gaps; give one of them"
        elif request.ignore_eos:
            reason = "an answer under a grammar ends with its EOS; leave out ignore_eos"
        elif not self._model.eos_token_ids:
            reason = "the model has no EOS token to end the answer with"
        elif not self._grammars:
            reason = "this engine was started without a tokenizer"
        else:
            return
        raise RequestRefused("grammar", f"{request.grammar.subject()} cannot be honoured: {reason}")

    def _check_template(self, request: Request) -> None:
        if not request.template:
            return
        changes = _revising_part(request.decoding)
        if changes is not None:
            reason = f"a template's text is fixed and cannot be decoded with {changes}"
        elif not request.ignore_eos:
            reason = "a template ends at its own end and needs ignore_eos"
        elif len(request.template) != request.max_tokens:
            reason = f"the template has {len(request.template)} positions, not max_tokens={request.max_tokens}"
        elif None not in request.template and not request.scored:
            reason = "the template has no hole"
        elif request.scored and self._model.attention == "full":
            reason = f"scores need a model that attends in blocks; {self._model.architecture} sees the whole sequence"
        else:
            return
        raise RequestRefused("template", reason)

    def _check_experts(self, request: Request) -> None:
        if not request.experts:
            return
        if self._model.moe is None:
            reason = f"{self._model.architecture} here has no experts"
        elif not request.rollout:
            reason = "they are part of a rollout: ask for that too"
        elif request.committed:
            reason = "the forwards of committed tokens were another engine's: ask for the whole answer anew"
        else:
            return
        raise RequestRefused("experts", f"experts cannot be recorded: {reason}")

    def _check_ends(self, request: Request) -> None:
        if not 0 <= request.min_tokens <= request.max_tokens:
            why = f"min_tokens={request.min_tokens} must lie in 0..max_tokens={request.max_tokens}"
            raise RequestRefused("min_tokens", why)
        if len(request.stop_token_ids) > MAX_STOP_IDS:
            why = f"stop_token_ids has {len(request.stop_token_ids)} tokens; give at most {MAX_STOP_IDS}"
            raise RequestRefused("stop_token_ids", why)
        part = "a grammar" if request.grammar is not None else "a template" if request.template else None
        names: tuple[Literal["min_tokens", "stop_token_ids"], ...] = ("min_tokens", "stop_token_ids")
        for name in names:
            if part is not None and getattr(request, name):
                raise RequestRefused(name, f"{name} cannot be honoured: {part} says where the answer ends")

    def _check_choice(self, request: Request) -> None:
        """Checks the fields that change logits or report them."""
        sampling, decoding = request.sampling, request.decoding
        if not 0 <= request.top_logprobs <= MAX_TOPS:
            raise RequestRefused("top_logprobs", f"top_logprobs={request.top_logprobs} must lie in 0..{MAX_TOPS}")
        if request.top_logprobs and not request.logprobs:
            raise RequestRefused("top_logprobs", "top_logprobs needs logprobs")
        if request.top_logprobs and not decoding.in_buffer:
            part = _revising_part(decoding)
            why = f"top_logprobs cannot be given with {part}, which keeps the accepted token's log-probability alone"
            raise RequestRefused("top_logprobs", why)
        reason = penalties_refused(decoding)
        for name, neutral in PENALTIES.items():
            if reason is not None and getattr(sampling, name) != neutral:
                why = f"{name}={getattr(sampling, name)} cannot be honoured: {reason}; decode without it"
                raise RequestRefused(name, why)

    def _check_prompt(self, request: Request) -> None:
        model, length = self._model, len(request.prompt)
        if not length:
            raise RequestRefused("prompt", "the prompt is empty: it must hold at least one token")
        if not isinstance(request.max_tokens, int) or request.max_tokens < 1:
            raise RequestRefused("max_tokens", f"max_tokens={request.max_tokens} must be a whole number of at least 1")
        if length + request.max_tokens > self.max_positions:
            is_model_limit = self.max_positions == model.max_positions
            raise RequestRefused(
                "prompt" if length >= self.max_positions else "max_tokens",
                f"the prompt's {length} tokens and max_tokens={request.max_tokens} exceed "
                f"{'the model' if is_model_limit else 'this server'}'s {self.max_positions} positions; "
                f"{self._what_fits(request)}",
                "context_length_exceeded",
            )
        if len(request.committed) >= request.max_tokens:
            raise RequestRefused(
                "committed",
                f"{len(request.committed)} tokens are committed of max_tokens={request.max_tokens}: nothing is left",
            )
        token_fields: tuple[tuple[RefusedField, tuple[int, ...]], ...] = (
            ("prompt", request.prompt),
            ("committed", request.committed),
            ("template", tuple(t for t in request.template if t is not None)),
            ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
            ("stop_token_ids", request.stop_token_ids),
        )
        for name, tokens in token_fields:
            wrong = next((t for t in tokens if not 0 <= t < model.vocab_size), None)
            if wrong is not None:
                raise RequestRefused(
                    name, f"{name} token {wrong} lies outside the vocabulary of {model.vocab_size} tokens"
                )

    def _check_method(self, request: Request) -> None:
        try:
            if request.decoding.canvas is not None:
                self._check_canvas(request)
            elif request.decoding.renoise is not None:
                self._check_renoise(request)
            elif request.decoding.verify is not None:
                self._check_verify(request)
            elif request.decoding.causal is not None:
                self._check_causal(request, request.decoding.causal)
            else:
                self._check_blocks(request)
        except ValueError as error:
            raise RequestRefused("decoding", str(error)) from None

    def _check_canvas(self, request: Request) -> None:
        if self._model.attention != "full":
            raise ValueError(
                f"canvas needs a model with full attention; {self._model.architecture}'s is {self._model.attention}"
            )
        if request.committed:
            raise ValueError("canvas begins anew: it cannot go on after committed tokens")
        assert request.decoding.canvas is not None
        check_canvas(
            request.decoding.canvas,
            prompt_length=len(request.prompt),
            max_tokens=request.max_tokens,
            eos_token_ids=() if request.ignore_eos else self._model.eos_token_ids,
        )

    def _check_renoise(self, request: Request) -> None:
        """Refuses fields that contradict a canvas with its own schedule of temperatures."""
        self._check_prefix_cache(request.decoding)
        if self._model.gemma is None:
            raise ValueError(
                f"renoise needs a model that denoises drawn tokens; {self._model.architecture} fills masks"
            )
        if request.decoding.block_size != self._block_size:
            raise ValueError(
                f"block_size={request.decoding.block_size} differs from the canvas of {self._block_size} tokens"
            )
        if request.sampling.draws:
            raise ValueError(
                f"renoise draws by temperatures of its own, from t_max to t_min, and takes no temperature="
                f"{request.sampling.temperature}, top_p, top_k or min_p: leave them out; `seed` varies the answer"
            )
        if request.adjusts:
            raise ValueError(
                "renoise takes no logit_bias, penalty or min_tokens: each forward draws the canvas anew, and no token "
                "of it is final before the last; leave them out"
            )

    def _check_verify(self, request: Request) -> None:
        decoding, model = request.decoding, self._model
        self._check_prefix_cache(decoding)
        if decoding.buffer_size > self._buffer_size:
            raise ValueError(f"buffer_size={decoding.buffer_size} exceeds this engine's {self._buffer_size} slots")
        if request.adjusts:
            raise ValueError(
                "verify takes no logit_bias, penalty, min_p or min_tokens yet: drafts and judgements are compared by "
                "the model's own probabilities; leave them out"
            )
        assert decoding.verify is not None
        if decoding.verify.slots == "measured" and request.sampling.draws and self._batch_invariant:
            raise ValueError(
                f"verify.slots='measured' draws other tokens at another load, and this engine is batch_invariant; let "
                f"verify.slots be all, or temperature be 0 instead of {request.sampling.temperature:g}"
            )
        if decoding.verify.draft_model:
            if self._draft is None:
                raise ValueError(
                    "verify.draft_model needs an engine that was started with a draft model; give --draft-model, or "
                    "leave verify.draft_model out"
                )
            if request.adapter is not None:
                raise ValueError("verify.draft_model cannot be had with an adapter yet; leave one of them out")
            if request.grammar is not None:
                alone = (
                    '"causal": {"method": "ar"}'
                    if "ar" in model.ar_methods
                    else '"verify": {"exact": true, "store": "causal"}'
                )
                raise ValueError(f"verify.draft_model follows no grammar yet; decode with {{{alone}}}")
            return
        if model.attention != "block_causal" or not model.has_mask:
            instead = " or ".join(model.prefix_methods) or "a canvas"
            raise ValueError(
                f"verify needs a model that drafts blocks and has a mode with block size 1; {model.architecture} has "
                f"no such mode: take {instead}"
            )
        if model.moe is not None and model.moe.expert_capacity:
            raise ValueError(
                f"verify needs experts that each token chooses alone; {model.architecture}'s are chosen by whole "
                "blocks: leave it out"
            )
        if decoding.block_size != self._block_size:
            raise ValueError(f"block_size={decoding.block_size} differs from the model's {self._block_size}")
        if decoding.carry != model.shift_logits:
            predicts = "the next position" if model.shift_logits else "their own"
            raise ValueError(
                f"carry={decoding.carry} cannot be had with verify here: {model.architecture}'s logits predict "
                f"{predicts}; let carry be {model.shift_logits}"
            )

    def _check_causal(self, request: Request, causal: Causal) -> None:
        decoding = request.decoding
        self._check_prefix_cache(decoding)
        model = self._model_with(request.adapter)
        methods = model.ar_methods
        if "ar" not in methods:
            raise ValueError(
                f"causal needs a model that predicts the next token by causal rows; {self._model.architecture} "
                "does not, unless a training with states.ar_weight wrote ar_mode into its generation_config.json, or "
                "the adapter of such a training is asked for"
            )
        if model.ar_mode and causal.method.replace("_", "-") not in methods:
            raise ValueError(
                f"causal.method={causal.method!r} is no method of {self._model.architecture}'s autoregressive mode: "
                f"take {' or '.join(methods)}"
            )
        if causal.method != "ar" and "linear-spec" not in methods:
            raise ValueError(
                f"causal.method={causal.method!r} needs a model with a mask token; {self._model.architecture} is "
                'autoregressive: take {"method": "ar"}'
            )
        length, most = causal.row_length(decoding.block_size), self._buffer_size * self._page_size
        rows = causal.rows(decoding.block_size)
        if causal.ahead and rows.longest > most:
            raise ValueError(
                f"causal.ahead with drafts of {length} takes {rows.longest} positions of a forward, and this engine's "
                f"{self._buffer_size} slots have {most}: give a shorter causal.block_length, or more slots"
            )
        if causal.ahead and request.adjusts:
            raise ValueError(
                "causal.ahead takes no logit_bias, penalty, min_p or min_tokens, which count tokens that its drafts "
                "cannot know: leave them out, or ahead"
            )
        if length > most:
            raise ValueError(
                f"causal.block_length={length} exceeds the {most} positions of this engine's {self._buffer_size} slots"
            )
        if causal.thinking is not None and causal.thinking.end_token_id >= self._model.vocab_size:
            raise ValueError(
                f"causal.thinking.end_token_id={causal.thinking.end_token_id} lies outside the vocabulary of "
                f"{self._model.vocab_size} tokens"
            )

    def _model_with(self, adapter: str | None) -> ModelConfig:
        """The model as an adapter makes it. A copy that does not know the adapters leaves their mode to the engine."""
        if adapter is None or self._model.attention != "block_causal":
            return self._model
        return replace(self._model, ar_mode=self._adapters is None or adapter in self._ar_adapters)

    def _check_prefix_cache(self, decoding: DecodingConfig) -> None:
        if decoding.prefix_cache and not self._prefix_caching:
            raise ValueError("prefix_cache=True cannot be honoured: this engine was started without prefix caching")

    def _check_blocks(self, request: Request) -> None:
        decoding = request.decoding
        self._check_prefix_cache(decoding)
        if self._model.attention == "causal":
            field = "renoise" if "renoise" in self._model.prefix_methods else 'causal, such as {"method": "ar"}'
            raise ValueError(
                f"{self._model.architecture} stores its keys by causal rows and decodes with "
                f"{' or '.join(self._model.prefix_methods)}, not block by block in a buffer; "
                f"let its decoding name {field}"
            )
        if decoding.block_size != self._block_size:
            raise ValueError(f"block_size={decoding.block_size} differs from the model's {self._block_size}")
        if decoding.edit is not None:
            self._check_edit(request)
        if decoding.prompt_attention == "full" and self._model.attention != "full":
            raise ValueError(
                "prompt_attention='full' (D2F) needs a model with full attention; "
                f"{self._model.architecture}'s is {self._model.attention}"
            )
        if decoding.carry and not self._model.shift_logits:
            raise ValueError(
                f"carry=True needs logits that predict the next position; {self._model.architecture}'s predict their "
                "own; leave it out"
            )
        if decoding.buffer_size > self._buffer_size:
            raise ValueError(f"buffer_size={decoding.buffer_size} exceeds this engine's {self._buffer_size} slots")

    def _check_edit(self, request: Request) -> None:
        """Refuses fields that contradict edits, which insert and remove tokens inside a block."""
        if self._model.edit_token_ids is None:
            raise ValueError(f"edit needs tokens that edit; {self._model.architecture} here has no delete_token_id")
        conflicts = {
            "logprobs' top_logprobs": request.top_logprobs > 0,
            "replay": request.replay,
            "temperature above 0": request.sampling.draws,
            "a logit_bias, a penalty, min_p or min_tokens": request.adjusts,
        }
        conflict = next((name for name, applies in conflicts.items() if applies), None)
        if conflict is not None:
            raise ValueError(
                f"edit cannot be had with {conflict}: its tokens are greedy and move; leave one of them out"
            )


def compile_guide(grammars: Grammars, request: Request) -> Guide | None:
    """A request's compiled grammar, `None` without a grammar; may be called from any thread. Raises `RequestRefused`
    if the grammar cannot be honoured."""
    if request.grammar is None:
        return None
    try:
        return grammars.guide(
            request.grammar, max_tokens=request.max_tokens, committed=request.committed, closing=request.closing
        )
    except GrammarRefused as error:
        raise RequestRefused("grammar", str(error)) from None


def _revising_part(decoding: DecodingConfig) -> str | None:
    """The part of a decoding whose forwards see more than masks and final tokens; `None` without such a part."""
    names = ("verify", "t2t", "soft", "edit", "canvas", "causal", "renoise")
    return next((name for name in names if getattr(decoding, name) is not None), None)


def penalties_refused(decoding: DecodingConfig) -> str | None:
    """Why penalties cannot be honoured with a decoding; `None` where they can."""
    changes = _revising_part(decoding)
    if changes in ("t2t", "soft"):
        return f"{changes} revises filled tokens, which a penalty would count against themselves"
    if decoding.canvas is not None and decoding.canvas.branches is not None:
        return "branches take over each other's tokens, which no forward of their own has counted"
    return None


def _check_rollout(request: Request) -> None:
    """Refuses a rollout where filled tokens can change: its step map could not tell what the forwards have seen."""
    changes = _revising_part(request.decoding)
    if request.rollout and changes == "verify":
        raise RequestRefused(
            "rollout",
            "a step map cannot be given with verify: it does not say which of its forwards drafted, and which judged "
            "at block size 1; decode without it",
        )
    if request.rollout and changes is not None:
        raise RequestRefused(
            "rollout",
            f"a step map cannot be given with {changes}: its forwards see more than masks and final tokens; decode "
            "without it",
        )


def _check_frames(request: Request) -> None:
    if request.frames and not request.decoding.in_buffer and request.decoding.verify is None:
        part = _revising_part(request.decoding)
        raise RequestRefused(
            "frames", f"frames show the slots of a Block Buffer, and {part} has none; leave frames or {part} out"
        )
