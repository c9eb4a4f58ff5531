"""A fitted noise-schedule as a JSON file.

It is checked with pydantic, which drawing from a schedule does not need: a training step runs without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mbd_core.files import write_json
from mbd_core.json_text import parse_json
from mbd_core.multitf.states.noise import FittedNoise

KIND = "fitted noise"


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    ratios: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)]
    count: Annotated[int, Field(ge=1)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["fitted noise"]
    source: str
    states: Annotated[list[_State], Field(min_length=1)]


def noise_fields(noise: FittedNoise) -> Mapping[str, Any]:
    """The schedule as its JSON file holds it."""
    states = [{"ratios": list(ratios), "count": count} for ratios, count in noise.states]
    return {"kind": KIND, "source": noise.source, "states": states}


def write_noise(path: Path, noise: FittedNoise) -> None:
    """Write the schedule as JSON."""
    write_json(path, noise_fields(noise))


def read_noise(path: Path) -> FittedNoise:
    """What `write_noise` wrote; `ValueError`, one sentence, names the file and the field that is wrong."""
    try:
        read = _File.model_validate(parse_json(path.read_bytes(), "it"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise ValueError(f"{path} is no fitted noise-schedule: {field}: {message}") from None
    except ValueError as error:  # no text, or no JSON
        raise ValueError(f"{path} is no fitted noise-schedule: {error}") from None
    try:
        return FittedNoise(states=tuple((tuple(s.ratios), s.count) for s in read.states), source=read.source)
    except ValueError as error:
        raise ValueError(f"{path} is no fitted noise-schedule: {error}") from None
