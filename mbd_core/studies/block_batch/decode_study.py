"""Decodes the study's prompts with every block length alone and with BlockBatch, and watches the caches of some."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mbd_core.bench.plain_loops import PlainRun, run_canvas
from mbd_core.canvas.branches import BranchedCanvas
from mbd_core.canvas.canvas_decoder import canvas_decoder
from mbd_core.canvas.plan import CanvasDecoder
from mbd_core.decoding.canvas_config import Canvas
from mbd_core.decoding.sampling import Vocab
from mbd_core.decoding.sampling_config import Sampling
from mbd_core.models.decoder import Decoder
from mbd_core.studies.block_batch.cache_record import record_caches
from mbd_core.studies.block_batch.cache_watch import BranchWatch, SingleWatch, Sketch
from mbd_core.studies.block_batch.compared_canvases import ComparedCanvases
from mbd_core.studies.block_batch.study import BranchStudy, DecodedPrompt, StudiedPrompt
from mbd_core.studies.block_batch.study_prompts import StudyPrompt


@dataclass(frozen=True, kw_only=True)
class StudyDecoder:
    """A model and the settings of its decoding.

    vocab_limit  the tokenizer's size; larger ids are never predicted
    sketch_size  the numbers of a sketch, which `seed` determines
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
            run = run_canvas(self.model, self._decoder(prompt, canvas), watch=watches.get(n))
            single[n] = _decoded(prompt, run)
            tick()
        branched = self._decoder(prompt, self.canvases.block_batch)
        assert isinstance(branched, BranchedCanvas)
        branch_watch = None if sketch is None else BranchWatch(sketch, branched)
        run = run_canvas(self.model, branched, watch=branch_watch)
        tick()
        assert branched.winner is not None
        caches = None
        if branch_watch is not None:
            caches = record_caches({n: watch.run for n, watch in watches.items()}, branch_watch.run)
        return StudiedPrompt(
            name=prompt.name,
            prompt_length=len(prompt.ids),
            single=single,
            block_batch=_decoded(prompt, run),
            winner=list(self.canvases.single)[branched.winner],
            branches=branched.stats(),
            caches=caches,
        )

    def _decoder(self, prompt: StudyPrompt, canvas: Canvas) -> CanvasDecoder:
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


def _decoded(prompt: StudyPrompt, run: PlainRun) -> DecodedPrompt:
    return DecodedPrompt(
        tokens=run.tokens,
        num_forwards=run.num_forwards,
        finish_reason=run.finish_reason,
        accuracy=None if prompt.grade is None else prompt.grade(run.tokens),
    )
