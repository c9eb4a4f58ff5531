"""Templates: fixed text and holes behind a prompt, as token positions and back as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mbd_core.serving.committed_text import Decode
from mbd_core.serving.strict_model import items

MAX_PARTS = 256
MAX_HOLE = 65_536


class Hole(BaseModel):
    """`hole` tokens to be filled in."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    hole: Annotated[int, Field(ge=1, le=MAX_HOLE)]


Template = Annotated[list[str | Hole], items(MAX_PARTS, least=1)]


def check_template(parts: Sequence[str | Hole]) -> None:
    """Raise `ValueError` for a template that has no hole first."""
    if not isinstance(parts[0], Hole):
        raise ValueError(
            "template: begins with text; a template begins with a hole, put the text before it into prompt"
        )


@dataclass(frozen=True)
class TemplateTokens:
    """A template as the engine takes it: `tokens`, `None` in holes; each part with its number of tokens."""

    parts: tuple[tuple[str | Hole, int], ...]
    tokens: tuple[int | None, ...]

    def texts(self, tokens: Sequence[int], decode: Decode) -> tuple[str, list[str]]:
        """The whole text of an answer of these tokens, fixed text exactly as it was given, and the text of each hole
        that they reach."""
        whole, holes, start = "", list[str](), 0
        for part, length in self.parts:
            if start >= len(tokens):
                break
            if isinstance(part, Hole):
                holes.append(decode(list(tokens[start : start + length])))
                whole += holes[-1]
            else:
                whole += part
            start += length
        return whole, holes


def template_tokens(
    parts: Sequence[str | Hole], encode: Callable[[str], Sequence[int]], *, limit: int
) -> TemplateTokens:
    """`encode` gives the tokens of fixed text, without special ones. Raises `ValueError` where the holes alone are
    more than `limit` tokens."""
    in_holes = sum(part.hole for part in parts if isinstance(part, Hole))
    if in_holes > limit:
        raise ValueError(f"its holes are {in_holes} tokens; the limit is {limit} in all")
    tokens: list[int | None] = []
    lengths: list[int] = []
    for part in parts:
        ids: list[Any] = [None] * part.hole if isinstance(part, Hole) else list(encode(part))
        tokens += ids
        lengths.append(len(ids))
    return TemplateTokens(tuple(zip(parts, lengths, strict=True)), tuple(tokens))
