"""A self-contained HTML page that replays one request forward by forward, under several decodings side by side.

The page is `replay.html` with data inserted; it needs no network and works from file://. The contents of all frames
are computed here, so that the page's script only draws.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jinja2 import Template

from mbd_core.decoding.answers.slots import DraftVerdict
from mbd_core.files import write_text
from mbd_core.tables import script_json
from mbd_core.trace.recorder import STATES
from mbd_core.trace.traced_run import ACTIVE, DUMMY, TO_CACHE, RequestTrace, TracedRun, block_lives

TEMPLATE = Path(__file__).with_name("replay.html")


@dataclass(frozen=True, kw_only=True)
class ReplaySlot:
    """A slot in one forward: `state` and `mask_ratio` before it, tokens and confidences after it (-1 = masked).

    `block` counts from 1, the request's first block. `new` and `edited` are offsets into the block. A server's frames
    have no confidences (`None`). Only a decoding that verifies its drafts has a `verdict`.
    """

    block: int
    state: str
    mask_ratio: float
    tokens: tuple[int, ...]
    confidences: tuple[float, ...] | None
    new: tuple[int, ...]
    edited: tuple[int, ...]
    verdict: DraftVerdict | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayFrame:
    """One forward. `num_tokens` counts the useful tokens so far, `num_committed` the useful tokens in the cache."""

    caption: str
    store_only: bool
    slots: tuple[ReplaySlot, ...]
    num_tokens: int
    num_committed: int
    num_cached_blocks: int


@dataclass(frozen=True, kw_only=True)
class ReplaySide:
    """One decoding of the request. The first `num_prompt` cells hold the prompt's remainder.

    `end` is the position of the EOS that ended the request, relative to the first block; `None` without one.
    """

    name: str
    block_size: int
    num_slots: int
    num_blocks: int
    num_prompt: int
    prompt_tokens: tuple[int, ...]
    end: int | None
    frames: tuple[ReplayFrame, ...]


def write_replay(
    sides: Sequence[ReplaySide], path: Path, *, title: str, note: str = "", texts: Mapping[int, str] | None = None
) -> None:
    """Write the page; `texts` maps token ids to their text (without it the page shows ids), `note` is the prompt."""
    write_text(path, replay_page(sides, title=title, note=note, texts=texts))


def replay_page(
    sides: Sequence[ReplaySide], *, title: str, note: str = "", texts: Mapping[int, str] | None = None
) -> str:
    """The page as a text, from the arguments of `write_replay`."""
    data = {
        "title": title,
        "note": note,
        "texts": None if texts is None else {str(k): v for k, v in texts.items()},
        "sides": [asdict(s) for s in sides],
    }
    page = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    return str(page.render(title=title, data=script_json(data)))


def shared_request(runs: Sequence[TracedRun]) -> str | None:
    """The first request that all runs have, `None` if there is none."""
    first, *others = ([r.request_id for r in run.requests] for run in runs)
    return next((request_id for request_id in first if all(request_id in ids for ids in others)), None)


def replay_runs(
    runs: Sequence[TracedRun],
    path: Path,
    *,
    request_id: str,
    note: str = "",
    eos_token_ids: Sequence[int] = (),
    decode: Callable[[int], str] | None = None,
) -> None:
    """Write the page of one request, one side for each run; `decode` returns the text of a token.

    Raises `ValueError` for a run without the request, or recorded without tokens.
    """
    sides = [replay_side(run.request(request_id), name=run.name, eos_token_ids=eos_token_ids) for run in runs]
    texts = None if decode is None else {token: decode(token) for token in sorted(used_tokens(sides))}
    title = " and ".join(side.name for side in sides) + ": one request, forward by forward"
    write_replay(sides, path, title=title, note=note, texts=texts)


def used_tokens(sides: Sequence[ReplaySide]) -> set[int]:
    """All token ids that the page will show."""
    slots = [slot for s in sides for f in s.frames for slot in f.slots]
    drafted = {t for slot in slots if slot.verdict is not None for t in slot.verdict.drafted if t is not None}
    frame_tokens = {t for slot in slots for t in slot.tokens if t >= 0}
    return frame_tokens | drafted | {t for s in sides for t in s.prompt_tokens}


def replay_side(request: RequestTrace, *, name: str, eos_token_ids: Sequence[int] = ()) -> ReplaySide:
    """The frames of a request. Raises `ValueError` if the request was not recorded in detail.

    With `eos_token_ids`, tokens from the first committed EOS on are not useful.
    """
    if request.tokens_TNB is None or request.confidences_TNB is None:
        raise ValueError(
            f"request '{request.request_id}' was traced without tokens; record it with detail to replay it"
        )
    first, size = int(request.block_TN[0, 0]), int(request.tokens_TNB.shape[2])
    num_prompt = int((request.tokens_TNB[0, 0] >= 0).sum() - request.accepted_TN[0, 0])
    resident = request.state_TN != DUMMY
    num_blocks = int(request.block_TN[resident].max()) - first + 1
    stored = sum(life.has_left for life in block_lives(request))
    cached_T = [int(b) - first for b in request.block_TN[1:, 0]] + [stored]

    tokens = np.full((num_blocks, size), -1)
    tokens[0, :num_prompt] = request.tokens_TNB[0, 0, :num_prompt]
    prompt_tokens = tuple(tokens[0, :num_prompt].tolist())
    history, frames = [], []
    for t in range(request.num_forwards):
        previous = tokens.copy()
        slots = [_slot(request, t, n, previous, first) for n in range(len(resident[t]))]
        for slot in slots:
            if slot.state != STATES[DUMMY]:
                tokens[slot.block - 1] = slot.tokens
        history.append(tokens.copy())
        frames.append(slots)
    final = tokens[:stored].ravel()
    if request.draft_TNB is not None:  # an answer with drafts ends before its last block is stored
        final = tokens.ravel()[: int(np.cumprod(tokens.ravel() >= 0).sum())]
    end = _end(final, num_prompt, eos_token_ids)
    useful = np.zeros(tokens.size, dtype=bool)
    useful[num_prompt:end] = True
    return ReplaySide(
        name=name,
        block_size=size,
        num_slots=resident.shape[1],
        num_blocks=num_blocks,
        num_prompt=num_prompt,
        prompt_tokens=prompt_tokens,
        end=end,
        frames=tuple(
            ReplayFrame(
                caption=caption(slots),
                store_only=bool(request.store_only_T[t]),
                slots=tuple(slots),
                num_tokens=int((useful & (after.ravel() >= 0)).sum()),
                num_committed=int((useful & (after.ravel() >= 0))[: cached * size].sum()),
                num_cached_blocks=cached,
            )
            for t, (slots, after, cached) in enumerate(zip(frames, history, cached_T, strict=True))
        ),
    )


def _slot(request: RequestTrace, t: int, n: int, previous_tokens: np.ndarray, first: int) -> ReplaySlot:
    assert request.tokens_TNB is not None and request.confidences_TNB is not None
    block, state, tokens = int(request.block_TN[t, n]) - first, int(request.state_TN[t, n]), request.tokens_TNB[t, n]
    previous = previous_tokens[block] if state != DUMMY else tokens
    new = tuple(np.flatnonzero((tokens >= 0) & (previous < 0)).tolist())
    return ReplaySlot(
        block=block + 1,
        state=STATES[state],
        mask_ratio=round(float(request.mask_ratio_TN[t, n]), 4),
        tokens=tuple(tokens.tolist()),
        confidences=tuple(np.round(request.confidences_TNB[t, n].astype(float), 4).tolist()),
        new=new,
        edited=tuple(np.flatnonzero((tokens >= 0) & (previous >= 0) & (tokens != previous)).tolist()),
        verdict=None if request.draft_TNB is None else _verdict(request, t, n, new),
    )


def _verdict(request: RequestTrace, t: int, n: int, new: Sequence[int]) -> DraftVerdict:
    """The forward's verdict on a slot's draft. The first tokens that the forward filled are the confirmed tokens."""
    assert request.draft_TNB is not None
    judged, confirmed = int(request.judged_TN[t, n]), int(request.confirmed_TN[t, n])
    return DraftVerdict(
        drafted=tuple(token if token >= 0 else None for token in request.draft_TNB[t, n].tolist()),
        judged=judged,
        confirmed=tuple(new[:confirmed]),
        refused=tuple(new[confirmed : confirmed + 1]) if confirmed < judged else (),
    )


def _end(committed: np.ndarray, num_prompt: int, eos_token_ids: Sequence[int]) -> int | None:
    at = np.flatnonzero(np.isin(committed[num_prompt:], np.array(eos_token_ids, dtype=np.int64)))
    return num_prompt + int(at[0]) if len(at) else None


def caption(slots: Sequence[ReplaySlot]) -> str:
    """A forward's work, for example 'Store B1 + decode B2, B3'."""
    stores = [s for s in slots if s.state == STATES[TO_CACHE]]
    active = [s for s in slots if s.state == STATES[ACTIVE]]
    judged = [s for s in active if s.verdict is not None and s.verdict.judged]
    drafts = [s for s in active if s.verdict is not None and any(t is not None for t in s.verdict.drafted)]
    others = [s for s in active if s not in judged and (s not in drafts or s.new)]
    parts = [
        (verb, ", ".join(f"B{s.block}" for s in of))
        for verb, of in (
            ("store", stores),
            ("decode", [s for s in others if s.mask_ratio > 0]),
            ("check", [s for s in others if s.mask_ratio == 0]),
            ("draft", [s for s in drafts if s not in judged]),
        )
        if of
    ]
    parts += (
        [("verify", ", ".join(_judgement_text(s.block, s.verdict) for s in judged if s.verdict))] if judged else []
    )
    text = " + ".join(f"{verb} {blocks}" for verb, blocks in parts) or "nothing resident"
    suffix = "" if active or not stores else " only: no token can come of this forward"
    return text[0].upper() + text[1:] + suffix


def _judgement_text(block: int, verdict: DraftVerdict) -> str:
    return f"B{block} ({len(verdict.confirmed)} of {verdict.judged} drafted tokens confirmed)"
