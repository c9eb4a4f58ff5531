"""What `LLM` returns: an answer, and the trace of how its blocks filled."""

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
    """How the blocks of one answer filled, forward by forward. In a notebook it is drawn.

    frames  what each forward left in the slots of the Block Buffer
    """

    frames: tuple[Frame, ...] = field(repr=False)
    page: str = field(repr=False)

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return f"Trace({len(self)} forwards)"

    def write(self, path: str | Path) -> Path:
        """Write it as a page that needs no network; `ValueError` for a file that is there already."""
        check_new_file(Path(path))
        write_text(Path(path), self.page)
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own: its styles and its script reach nothing of the notebook."""
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        return f'<iframe title="trace" sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.page)}"></iframe>'

    @classmethod
    def of(
        cls,
        frames: Sequence[Frame],
        *,
        name: str,
        note: str,
        block_size: int,
        prompt: Sequence[int],
        num_tokens: int,
        ended: bool,
        decode: Callable[[list[int]], str],
    ) -> Self | None:
        """The trace of an answer's frames, `None` where no forward had any."""
        if not frames:
            return None
        side = frame_side(frames, name=name, block_size=block_size, prompt=prompt, num_tokens=num_tokens, ended=ended)
        texts = {token: decode([token]) for token in sorted(used_tokens([side]))}
        page = replay_page([side], title=f"{name}: one request, forward by forward", note=note, texts=texts)
        return cls(frames=tuple(frames), page=page)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer. Printed, it is its text; with a trace, a notebook draws it.

    text           without the calls of tools
    tokens         its token ids, the EOS not included
    prompt_tokens  those of its prompt
    finish_reason  `stop`, `length`, `tool_calls` or `abort`
    stop_reason    the stop string, or the one of `stop_token_ids`, that ended it
    forwards       forwards that its blocks took part in
    tpf            tokens per forward
    tool_calls     the calls of functions, as OpenAI's API has them
    logprobs       where asked for, as OpenAI's API has them
    notes          what was asked for and had no effect
    trace          where asked for, how its blocks filled
    reply          the endpoint's whole reply
    """

    text: str
    tokens: tuple[int, ...] = field(repr=False)
    prompt_tokens: tuple[int, ...] = field(repr=False)
    finish_reason: str
    stop_reason: int | str | None = None
    forwards: int
    tpf: float
    tool_calls: tuple[AnswerCall, ...] = ()
    logprobs: Logprobs = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    trace: Trace | None = field(default=None, repr=False)
    reply: Completion = field(repr=False)

    @classmethod
    def of(cls, reply: Completion, trace: Trace | None = None) -> Self:
        """The answer in a reply of one choice."""
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
        if self.tool_calls:
            turn |= {"content": self.text or None, "tool_calls": [dict(cast(Any, call)) for call in self.tool_calls]}
        return turn

    def _repr_html_(self) -> str | None:
        return None if self.trace is None else self.trace._repr_html_()
