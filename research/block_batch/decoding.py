"""The study's decoding: prompts, compared canvases, and the caches of some prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import question_prompt
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.decoding.canvas.plan import PlannedDecoder
from mbd_core.json_text import merge_fields, parse_json
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.plain_loops import PlainRun, run_planned
from research.block_batch.cache_watch import BranchWatch, SingleWatch, Sketch
from research.block_batch.caches import record_caches
from research.block_batch.outputs import BranchStudy, DecodedPrompt, StudiedPrompt

VARIED = {"canvas": ("block_length", "cache"), "branches": ("block_lengths",)}


@dataclass(frozen=True, kw_only=True)
class ComparedCanvases:
    """Fast-dLLM's dual cache by block length, and BlockBatch with a branch for each block length."""

    single: dict[int, Canvas]
    block_batch: Canvas


def compared_canvases(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    max_tokens: int,
    tau: float | None = None,
    fields: Mapping[str, Any] | None = None,
) -> ComparedCanvases:
    """The canvases at `lengths`, ascending, with confidence threshold `tau` and other decoding `fields`.

    Raises `ValueError` for a block-causal model, for lengths that cannot be compared, and for fields that cannot be
    honoured or that the comparison itself varies.
    """
    if config.attention != "full":
        raise ValueError(
            f"a {config.architecture} attends in blocks: BlockBatch needs full attention (LLaDA, Dream, DiffuCoder)"
        )
    _check_lengths(lengths, max_tokens)
    other_fields, canvas, branches = _parts(fields or {})
    if tau is not None:
        if "tau" in canvas:
            raise ValueError("the threshold is given twice, as --tau and as canvas.tau in --decoding; leave one out")
        canvas = {**canvas, "tau": tau}

    def build(method: str, canvas_fields: Mapping[str, Any]) -> Canvas:
        changes = {**other_fields, "canvas": {**canvas, **canvas_fields}}
        result = decoding_config({}, merge_fields(METHODS[method], changes), block_size=config.block_size).canvas
        assert result is not None
        return result

    return ComparedCanvases(
        single={n: build("fast-dllm-dual", {"block_length": n}) for n in lengths},
        block_batch=build("block-batch", {"branches": {**branches, "block_lengths": list(lengths)}}),
    )


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    text = ",".join(map(str, lengths))
    if len(lengths) < 2 or list(lengths) != sorted(set(lengths)) or lengths[0] < 1:
        raise ValueError(f"--block-lengths {text} must be at least two lengths, ascending, each once")
    if lengths[-1] > max_tokens:
        raise ValueError(f"--block-lengths {text}: {lengths[-1]} exceeds --max-tokens {max_tokens}; leave it out")


def _parts(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split decoding fields in three: fields outside `canvas`, of `canvas` outside `branches`, and of `branches`."""
    canvas = fields.get("canvas", {})
    branches = canvas.get("branches", {}) if isinstance(canvas, Mapping) else None
    if not isinstance(canvas, Mapping) or not isinstance(branches, Mapping):
        raise ValueError(f"--decoding {dict(fields)}: canvas must be a JSON object, and branches in it as well")
    for owner, part in (("canvas", canvas), ("branches", branches)):
        for name in VARIED[owner]:
            if name in part:
                raise ValueError(f"--decoding has {owner}.{name}, which the study varies itself; leave it out")
    other_fields = {name: value for name, value in fields.items() if name != "canvas"}
    return other_fields, {name: value for name, value in canvas.items() if name != "branches"}, dict(branches)


@dataclass(frozen=True, kw_only=True)
class StudyPrompt:
    """One prompt; `grade` returns the score of an output (0 to 1), and is `None` if the prompt has no grader."""

    name: str
    ids: tuple[int, ...]
    grade: Callable[[list[int]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line of a prompts file: a text or token ids."""

    name: str
    text: str | None = None
    ids: tuple[int, ...] | None = None


def read_prompts(path: Path, *, limit: int | None = None) -> list[PromptLine]:
    """The first `limit` prompts of a file of lines {"prompt": "text"} or {"prompt_ids": [1, 2]}.

    Raises `ValueError` for a file that cannot be read, has no prompt or has a malformed line, which it names.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other ends of lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    prompts = [_prompt_line(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts[:limit]


def _prompt_line(line: str, number: int, path: Path) -> PromptLine:
    row = parse_json(line, f"{path}, line {number}: it")
    if not isinstance(row, dict) or ("prompt" in row) == ("prompt_ids" in row):
        raise ValueError(f"{path}, line {number}: must be an object with either prompt or prompt_ids")
    name, text, ids = f"line {number}", row.get("prompt"), row.get("prompt_ids")
    if ids is None:
        if not (isinstance(text, str) and text):
            raise ValueError(f"{path}, line {number}: prompt must be a text that is not empty")
        return PromptLine(name=name, text=text)
    if not (ids and isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise ValueError(f"{path}, line {number}: prompt_ids must be a list of token ids that is not empty")
    return PromptLine(name=name, ids=tuple(ids))


def study_prompts(lines: Sequence[PromptLine], tokenizer: PreTrainedTokenizerBase | None) -> list[StudyPrompt]:
    """The prompts as token ids; only texts need a tokenizer."""
    prompts = []
    for line in lines:
        ids = line.ids
        if ids is None:
            assert tokenizer is not None and line.text is not None
            ids = tuple(question_prompt(tokenizer, line.text))
        prompts.append(StudyPrompt(name=line.name, ids=ids))
    return prompts


def check_prompts(prompts: Sequence[StudyPrompt], config: ModelConfig, *, max_tokens: int) -> None:
    """Raise `ValueError` for a prompt that is too long for the model, or has an id outside its vocabulary."""
    for prompt in prompts:
        if len(prompt.ids) + max_tokens > config.max_positions:
            raise ValueError(
                f"{prompt.name}: a prompt of {len(prompt.ids)} and --max-tokens {max_tokens} exceed the model's "
                f"{config.max_positions} positions"
            )
        foreign = [i for i in prompt.ids if not 0 <= i < config.vocab_size]
        if foreign:
            raise ValueError(
                f"{prompt.name}: token id {foreign[0]} lies outside the vocabulary of {config.vocab_size}"
            )


@dataclass(frozen=True, kw_only=True)
class StudyDecoder:
    """A model and the settings of its decoding.

    vocab_limit  the tokenizer's size; larger ids are never predicted
    sketch_size  length of a sketch; `seed` seeds the sketches' random projection
    """

    model: Decoder
    canvases: ComparedCanvases
    max_tokens: int
    vocab_limit: int
    sketch_size: int = 256
    seed: int = 1729

    def study(
        self, prompts: Sequence[StudyPrompt], *, num_watched: int, tick: Callable[[], object] = lambda: None
    ) -> BranchStudy:
        """Decode all prompts and watch the caches of the first `num_watched`; `tick` is called after each run."""
        weights = self.model.lm_head.weight
        return BranchStudy(
            block_lengths=list(self.canvases.single),
            prompts=[
                self.study_prompt(prompt, watched=number < num_watched, tick=tick)
                for number, prompt in enumerate(prompts)
            ],
            graded=all(prompt.grade is not None for prompt in prompts),
            rounding=torch.finfo(weights.dtype).eps,
        )

    def study_prompt(
        self, prompt: StudyPrompt, *, watched: bool, tick: Callable[[], object] = lambda: None
    ) -> StudiedPrompt:
        """Decode one prompt by every canvas and, if it is `watched`, record its caches."""
        length = len(prompt.ids) + self.max_tokens
        sketch = Sketch(self.model, length=length, size=self.sketch_size, seed=self.seed) if watched else None
        single: dict[int, DecodedPrompt] = {}
        watches: dict[int, SingleWatch] = {}
        for n, canvas in self.canvases.single.items():
            if sketch is not None:
                watches[n] = SingleWatch(
                    self.model, sketch, prompt_length=len(prompt.ids), max_tokens=self.max_tokens, block_length=n
                )
            run = run_planned(self.model, self._decoder(prompt, canvas), watch=watches.get(n))
            single[n] = _decoded_prompt(prompt, run)
            tick()
        decoder = self._decoder(prompt, self.canvases.block_batch)
        assert isinstance(decoder, BranchedCanvas)
        branch_watch = None if sketch is None else BranchWatch(sketch, decoder)
        run = run_planned(self.model, decoder, watch=branch_watch)
        tick()
        assert decoder.winner is not None
        caches = None
        if branch_watch is not None:
            caches = record_caches({n: watch.run for n, watch in watches.items()}, branch_watch.run)
        return StudiedPrompt(
            name=prompt.name,
            prompt_length=len(prompt.ids),
            single=single,
            block_batch=_decoded_prompt(prompt, run),
            winner=list(self.canvases.single)[decoder.winner],
            branches=decoder.stats(),
            caches=caches,
        )

    def _decoder(self, prompt: StudyPrompt, canvas: Canvas) -> PlannedDecoder:
        config = self.model.config
        return canvas_decoder(
            prompt.ids,
            self.max_tokens,
            canvas,
            Sampling(),
            eos_token_ids=config.eos_token_ids,
            vocab=Vocab(config.mask_token_id, self.vocab_limit),
            shift=config.shift_logits,
        )


def _decoded_prompt(prompt: StudyPrompt, run: PlainRun) -> DecodedPrompt:
    return DecodedPrompt(
        tokens=run.tokens,
        num_forwards=run.num_forwards,
        finish_reason=run.finish_reason,
        accuracy=None if prompt.grade is None else prompt.grade(run.tokens),
    )
