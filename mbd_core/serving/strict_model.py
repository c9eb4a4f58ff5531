"""What every part of a request is: of the types that are named, without unknown fields, and never changed.

Requests are read on the loop that serves everybody, so lists are bounded, and the first wrong item ends them.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A string is not a number here, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def items(most: int, *, least: int | None = None) -> Any:
    """The bounds of a list. An item that is wrong is the list's only error: a million of them took half a minute."""
    return Field(min_length=least, max_length=most, fail_fast=True)
