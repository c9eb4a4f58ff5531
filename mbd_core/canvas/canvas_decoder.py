"""The decoder of a request that fills a canvas."""

from mbd_core.canvas.branches import BranchedCanvas
from mbd_core.canvas.limits import check_canvas
from mbd_core.canvas.plan import CanvasDecoder, CanvasTask
from mbd_core.canvas.single_lane import SingleCanvas
from mbd_core.decoding.canvas_config import Canvas
from mbd_core.decoding.sampling import Vocab
from mbd_core.decoding.sampling_config import Sampling


def canvas_decoder(
    prompt: tuple[int, ...],
    max_tokens: int,
    canvas: Canvas,
    sampling: Sampling,
    *,
    eos_token_ids: tuple[int, ...],
    vocab: Vocab,
    shift: bool,
) -> CanvasDecoder:
    """The decoder of one request.

    With empty `eos_token_ids` no token ends the request. With `shift` the logits of position p - 1 predict position p.
    Raises the `ValueError` of `check_canvas`.
    """
    check_canvas(canvas, prompt_length=len(prompt), max_tokens=max_tokens, eos_token_ids=eos_token_ids)
    kind = SingleCanvas if canvas.branches is None else BranchedCanvas
    return kind(
        CanvasTask(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            canvas=canvas,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            vocab=vocab,
            shift=shift,
        )
    )
