"""The arms of the comparison of a real model with its base, and the rows that it keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mbd_core.engine.config import Dtype


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A model, its decoding, and the dtype of its engine; `None` is the comparison's dtype.

    `draft_model` drafts for the model, if its decoding says so (`verify.draft_model`). With `schema` the JSON of
    `package-fields` is decoded under the schema of its fields, the other tasks' answers freely.
    """

    model: str
    decoding: Mapping[str, Any]
    dtype: Dtype | None = None
    draft_model: str | None = None
    schema: bool = False


ARMS = {
    "base, token by token": Arm(model="smollm2-135m", decoding={}),
    "SingleBD": Arm(model="smollm2-bd", decoding={"buffer_size": 1}),
    "MultiBD on the same model": Arm(model="smollm2-bd", decoding={"buffer_size": 4}),
    "MultiBD after MultiTF": Arm(model="smollm2-mbd", decoding={"buffer_size": 4}),
    "base fine-tuned, token by token": Arm(model="smollm2-ar", decoding={}),
    "MBD, token by token": Arm(model="smollm2-mbd", decoding={"causal": {"method": "ar"}}),
    "the same, drafted 16 at once": Arm(model="smollm2-mbd", decoding={"causal": {"block_length": 16}}),
}
BASE, SINGLE, NAIVE, TRAINED, CONTROL, OWN, DRAFTED = ARMS
LLAMA_CPP = "base, llama.cpp"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An arm's answer to a question, asked without other requests: its tokens, its forwards, the request's seconds.

    `tau` is the threshold `tau_m2t` where the command names thresholds. `is_valid` says of JSON whether it has the
    schema, `schema` whether it was decoded under it. `nats` is the answer's negative log-likelihood under the base,
    which reads it as `tokens_read`. Published rows lack the texts, because others own them; a digest tells equal
    texts.
    """

    arm: str
    task: str
    is_right: bool
    tokens: int
    forwards: int
    seconds: float
    tau: float | None = None
    is_valid: bool | None = None
    schema: bool = False
    nats: float | None = None
    tokens_read: int = 0
    digest: str = ""
    question: str = ""
    wanted: str = ""
    text: str = ""
