"""Streams that their client takes up again: what a stream says of its places, and the request for the rest.

    asked for with resumable      each commit ends with its place: {"id", "num_tokens", "forwards"}, "seed" where drawn
    cut                           the client keeps its last place, and the tokens and the text up to there
    the same body, with resume    that place and `token_ids`, at any gateway: the stream goes on behind them

Nothing of a stream is kept by the server: the tokens come back as those that another engine has committed
(`Request.committed`), as where a replica is lost (`mbd_core/serving/tokens/resumable.py`). So the rest is what would
have followed where blocks are decoded one after the other, greedy or with a seed; blocks that a larger buffer had
begun to decode are decoded anew.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator

from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.fields import Strict, items
from mbd_core.serving.text.committed import CommittedText, Decode, StopStrings

MAX_TOKENS, MAX_FORWARDS = 2**18, 2**31
SEEDS = 2**64  # a seed has 64 bits, with sign
Seed = Annotated[int, Field(ge=-SEEDS // 2, lt=SEEDS // 2)]


class Resume(Strict):
    """A place of a stream as the stream gave it, and the tokens up to there.

    id          of the stream, which goes on under it
    num_tokens  how many tokens stand before the place
    forwards    that the choice has taken part in: the noise of drawn tokens goes on from that number
    seed        of the choice, where tokens are drawn
    token_ids   the choice's tokens before the place
    """

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], items(MAX_TOKENS, least=1)]
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    forwards: Annotated[int, Field(ge=0, lt=MAX_FORWARDS)]
    seed: Seed | None = None
    id: Annotated[str, Field(pattern=r"^(chat)?cmpl-[0-9a-f]{32}$")]

    @model_validator(mode="after")
    def _check(self) -> "Resume":
        if len(self.token_ids) != self.num_tokens:
            raise ValueError(
                f"resume: num_tokens is {self.num_tokens}, and token_ids has {len(self.token_ids)}; give the tokens "
                "of the stream's chunks up to the one with this place, and none after it"
            )
        return self


class ResumableFields(Strict):
    """resumable  in a stream, `token_ids` in each chunk and the place behind each commit, to go on from
    resume     go on behind such a place; everything else as in the stream that was cut
    """

    resumable: bool | None = None
    resume: Resume | None = None


def check_fields(asked: ResumableFields, *, stream: bool, num_choices: int, calls: bool) -> None:
    """`ValueError` for a request that cannot be taken up again, or that takes up what is no one choice."""
    for name in ("resumable", "resume"):
        if getattr(asked, name):
            if not stream:
                raise ValueError(f"{name}: only allowed when stream is true; ask again for a whole answer")
            if calls:
                raise ValueError(f"{name}: an answer that may call tools is not taken up again; leave it out")
    if asked.resume is not None and num_choices != 1:
        raise ValueError("resume: takes up one choice; give its own prompt and n 1")


def place(request: Request, reply_id: str, *, num_tokens: int, num_forwards: int) -> dict[str, Any]:
    """The place behind the first `num_tokens` tokens of a choice, `num_forwards` on this server."""
    drawn = {"seed": request.sampling.seed} if request.sampling.temperature else {}
    forwards = request.first_forward + num_forwards
    return {"id": reply_id, "num_tokens": num_tokens, "forwards": forwards, **drawn}


def taken_up(request: Request, resume: Resume) -> Request:
    """The request for what follows the place; its engine checks the tokens."""
    return replace(request, committed=tuple(resume.token_ids), first_forward=resume.forwards)


def begun_texts(requests: Sequence[Request], decode: Decode, stop: Sequence[str]) -> list[CommittedText]:
    """The text of each request behind its `committed` tokens, which their client has.

    Raises `ApiError` (400) where the answer has ended among them.
    """
    stops = StopStrings(stop)
    texts = []
    for request in requests:
        text = CommittedText(decode, stops)
        for token in request.committed:
            text.push(token)
            if text.stopped:
                message = "resume: the answer has ended, a stop string is complete in its tokens"
                raise ApiError(400, message, param="resume", code="invalid_value")
        texts.append(text)
    return texts
