"""The decoder of a request whose rows are planned on the host: on a canvas, or after a stored prefix."""

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.decoding.canvas.plan import PlannedDecoder
from mbd_core.decoding.causal.denoised import BlockDecoder
from mbd_core.decoding.causal.drafted import DraftedDecoder, DraftPair
from mbd_core.decoding.causal.guided_verified import GuidedVerifyingDecoder
from mbd_core.decoding.causal.next_token import TokenDecoder
from mbd_core.decoding.causal.renoise import RenoisingDecoder
from mbd_core.decoding.causal.verified import VerifyingDecoder
from mbd_core.decoding.grammar.guide import GuideState


def planned_decoder(
    request: Request,
    *,
    eos_token_ids: tuple[int, ...],
    vocab: Vocab,
    shift: bool,
    guide: GuideState | None = None,
    pair: DraftPair | None = None,
) -> PlannedDecoder:
    """The decoder of one request, whose decoding names a canvas or a method after a prefix.

    `eos_token_ids` are the model's. `shift`: its logits predict the next position. `guide` is the request's, if it has
    a grammar; `pair` is of an engine with a draft model. Raises the `ValueError` of `check_canvas`.
    """
    decoding = request.decoding
    if decoding.causal is not None:
        if decoding.causal.method == "dlm":
            return BlockDecoder(request, eos_token_ids=eos_token_ids, vocab=vocab)
        return TokenDecoder(request, eos_token_ids=eos_token_ids, vocab=vocab, guide=guide)
    if decoding.verify is not None and decoding.verify.draft_model:
        assert pair is not None and guide is None, "admission refuses it"
        return DraftedDecoder(request, eos_token_ids=eos_token_ids, vocab=vocab, pair=pair)
    if decoding.verify is not None and guide is not None:
        return GuidedVerifyingDecoder(request, eos_token_ids=eos_token_ids, vocab=vocab, guide=guide)
    if decoding.verify is not None:
        return VerifyingDecoder(request, eos_token_ids=eos_token_ids, vocab=vocab)
    if decoding.renoise is not None:
        return RenoisingDecoder(request, eos_token_ids=eos_token_ids, vocab=vocab)
    assert decoding.canvas is not None, "its decoding names no planned method"
    return canvas_decoder(
        request.prompt,
        request.max_tokens,
        decoding.canvas,
        request.sampling,
        eos_token_ids=() if request.ignore_eos else eos_token_ids,
        vocab=vocab,
        shift=shift,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
    )
