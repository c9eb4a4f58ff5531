"""The decoder of a request that fills a canvas, and the limits within which a request fits one."""

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.plan import CanvasDecoder, CanvasTask
from mbd_core.decoding.canvas.single_lane import SingleCanvas
from mbd_core.decoding.canvas.unmasking import steps_of_block

# The limits of a canvas: whether a request fits its settings, and how many tokens it decodes by default.


def check_canvas(canvas: Canvas, *, prompt_length: int, max_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
    """Raise `ValueError` if a request cannot be decoded with these settings."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if prompt_length < 1:
        raise ValueError("the prompt is empty; give at least one token")
    if canvas.forbid_eos and not eos_token_ids:
        raise ValueError("canvas.forbid_eos=True needs EOS ids; leave it out where EOS is ignored")
    if canvas.steps is None:
        return
    if _fills_every_step(canvas) and canvas.steps > max_tokens:
        raise ValueError(f"canvas.steps={canvas.steps} exceeds max_tokens={max_tokens}: each step fills a position")
    size = canvas.block_length or max_tokens
    num_blocks = -(-max_tokens // size)
    for block in range(num_blocks):
        if not steps_of_block(canvas.steps, max_tokens, block * size, min((block + 1) * size, max_tokens)):
            raise ValueError(
                f"canvas.steps={canvas.steps} leaves block {block} of {num_blocks} without a step; "
                f"raise steps or canvas.block_length={canvas.block_length}"
            )


def canvas_max_tokens(canvas: Canvas, *, preferred: int, most: int) -> int:
    """The default of `max_tokens`: `preferred`, or the nearest number up to `most` that gives every step a token and
    every block a step. If there is no such number, `check_canvas` refuses the result.
    """
    number = preferred
    if canvas.steps is not None:
        if canvas.block_length is not None:
            number = min(number, canvas.steps * canvas.block_length)  # each block takes at least one step
        if _fills_every_step(canvas):
            number = max(number, canvas.steps)
    return min(number, most)


def _fills_every_step(canvas: Canvas) -> bool:
    """Whether every step accepts at least one token, so that there are no more steps than tokens."""
    return canvas.accept in ("quota", "threshold")


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
