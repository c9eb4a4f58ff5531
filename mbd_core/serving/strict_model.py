"""What every part of a request is: of the types that are named, without unknown fields, and never changed."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A string is not a number here, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
