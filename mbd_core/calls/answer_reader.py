"""Reads one answer: thoughts first, then text, then calls."""

from dataclasses import replace

from mbd_core.calls.reader import CallReader, TextPiece
from mbd_core.calls.thoughts import ThoughtReader


class AnswerReader:
    """One state machine over an answer's text, which is pushed in pieces of any size.

    num_calls             calls so far
    num_reasoning_tokens  tokens of the thoughts, if no push is of several tokens
    """

    def __init__(self, thoughts: ThoughtReader | None, calls: CallReader | None) -> None:
        self._thoughts, self._calls = thoughts, calls
        self.num_reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str, *, ends: bool, num_tokens: int = 1) -> TextPiece:
        """The piece of the answer that is certain after `text`; with `ends`, nothing follows.

        `num_tokens` are the tokens that gave `text`. A token may give no text, and a step may have no token.
        """
        reasoning = ""
        if self._thoughts is not None:
            was_in_thought = self._thoughts.in_thought
            reasoning, text = self._thoughts.push(text, ends=ends)
            if was_in_thought or self._thoughts.in_thought:
                self.num_reasoning_tokens += num_tokens
        if self._calls is None:
            return TextPiece(content=text, reasoning=reasoning)
        return replace(self._calls.push(text, ends=ends), reasoning=reasoning)
