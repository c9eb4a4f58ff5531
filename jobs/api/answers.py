"""The answers that `LLM` returns, and the traces of how their blocks filled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Self, cast

from mbd_core.decoding.answers.slots import Frame
from mbd_core.files import check_new_file, write_text
from mbd_core.serving.api.shapes import AnswerCall, Completion, Logprobs
from mbd_core.trace.frame_replay import frame_side
from mbd_core.trace.replay import replay_page, used_tokens

HEIGHT = 640  # pixels of a trace in a notebook


@dataclass(frozen=True, kw_only=True)
class Trace:
    """How the blocks of one answer filled, forward by forward. A notebook draws it.

    frames  the tokens in the slots of the Block Buffer after each forward
    """

    frames: tuple[Frame, ...] = field(repr=False)
    page: str = field(repr=False)

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return f"Trace({len(self)} forwards)"

    def write(self, path: str | Path) -> Path:
        """Write a page that needs no network. Raises `ValueError` if the file exists."""
        check_new_file(Path(path))
        write_text(Path(path), self.page)
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, so that its styles and script do not reach the notebook."""
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        return f'<iframe title="trace" sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.page)}"></iframe>'

    @classmethod
    def of(
        cls,
        frames: Sequence[Frame],
        *,
        name: str,
        note: str,
        prompt: Sequence[int],
        num_tokens: int,
        ended: bool,
        decode: Callable[[list[int]], str],
    ) -> Self | None:
        """The trace of an answer's frames, `None` if there are no frames."""
        if not frames:
            return None
        block_size = max(len(slot.tokens) for frame in frames for slot in frame.slots)  # a draft model has its own
        side = frame_side(frames, name=name, block_size=block_size, prompt=prompt, num_tokens=num_tokens, ended=ended)
        texts = {token: decode([token]) for token in sorted(used_tokens([side]))}
        page = replay_page([side], title=f"{name}: one request, forward by forward", note=note, texts=texts)
        return cls(frames=tuple(frames), page=page)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer. `print` shows its text; a notebook draws its trace.

    text           the text without thoughts and tool calls
    tokens         the token ids without the EOS
    prompt_tokens  the prompt's token ids
    finish_reason  `stop`, `length`, `tool_calls` or `abort`
    stop_reason    the stop string or the member of `stop_token_ids` that ended it
    forwards       forwards in which its blocks took part
    tpf            tokens per forward
    reasoning      the thoughts before the text, if the model's chat template knows thoughts
    tool_calls     the calls of functions, in the form of OpenAI's API
    logprobs       if requested: the log-probabilities, in the form of OpenAI's API
    notes          requested settings that had no effect
    trace          if requested: how its blocks filled
    reply          the endpoint's whole reply
    """

    text: str
    tokens: tuple[int, ...] = field(repr=False)
    prompt_tokens: tuple[int, ...] = field(repr=False)
    finish_reason: str
    stop_reason: int | str | None = None
    forwards: int
    tpf: float
    reasoning: str = ""
    tool_calls: tuple[AnswerCall, ...] = ()
    logprobs: Logprobs = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    trace: Trace | None = field(default=None, repr=False)
    reply: Completion = field(repr=False)

    @classmethod
    def of(cls, reply: Completion, trace: Trace | None = None) -> Self:
        """The answer in a reply with one choice."""
        (choice,), measures = reply["choices"], reply["mbd"]
        message = choice.get("message")
        return cls(
            text=choice.get("text", "") if message is None else message["content"] or "",
            tokens=tuple(choice["token_ids"]),
            prompt_tokens=tuple(choice["prompt_token_ids"]),
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            forwards=measures["num_forwards"],
            tpf=measures["tpf"],
            reasoning="" if message is None else message.get("reasoning", ""),
            tool_calls=() if message is None else tuple(message.get("tool_calls", ())),
            logprobs=choice["logprobs"],
            notes=tuple(measures.get("notes", ())),
            trace=trace,
            reply=reply,
        )

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a turn of a chat: `messages += [answer.message, {"role": "user", "content": ...}]`."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            turn["reasoning"] = self.reasoning
        if self.tool_calls:
            turn |= {"content": self.text or None, "tool_calls": [dict(cast(Any, call)) for call in self.tool_calls]}
        return turn

    def _repr_html_(self) -> str | None:
        return None if self.trace is None else self.trace._repr_html_()
