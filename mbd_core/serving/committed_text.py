"""Committed tokens to text as they come: characters split over tokens, and stop strings across any border."""

from collections.abc import Callable

from mbd_core.serving.stop_strings import StopStrings

Decode = Callable[[list[int]], str]

BROKEN = "\ufffd"


class CommittedText:
    """The text of one request, grown token by token.

    What `push` and `finish` return, joined, is the request's whole text; it does not depend on how the tokens were
    grouped into steps. A character whose bytes are still incomplete is held back (and dropped if generation ends
    inside it), and so is an ending that may yet grow into a stop string. The text ends before the stop string that is
    complete first; of two complete at the same character, before the longer.

    The window holds the last tokens whose text is out, then those whose text is not: some tokenizers decode a token
    by the tokens before it.
    """

    def __init__(self, decode: Decode, stops: StopStrings | None = None) -> None:
        self._decode, self._matcher = decode, (stops or StopStrings()).matcher()
        self._window: list[int] = []
        self._num_context = 0  # tokens of the window whose text is out
        self._context = ""  # their text
        self._ending = ""  # characters that may begin a stop string
        self.num_tokens = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with `token`, often empty."""
        assert not self.stopped, "the text has ended at a stop string"
        self.num_tokens += 1
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) <= len(self._context) or text.endswith(BROKEN):
            return ""
        delta = text[len(self._context) :]
        self._window = self._window[self._num_context :]
        self._num_context, self._context = len(self._window), self._decode(self._window)
        return self._release(delta)

    def finish(self) -> str:
        """The rest of the text, now that no token follows."""
        if self.stopped:
            return ""
        rest = self._decode(self._window)[len(self._context) :].rstrip(BROKEN)
        text = self._release(rest)
        if not self.stopped:
            text, self._ending = text + self._ending, ""
        return text

    def _release(self, delta: str) -> str:
        match = self._matcher.push(delta)
        text = self._ending + delta
        if match is not None:
            self.stopped = True
            end, length = match
            return text[: len(self._ending) + end - length]
        cut = len(text) - self._matcher.open_length
        self._ending = text[cut:]
        return text[:cut]
