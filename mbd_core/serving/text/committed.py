"""Turns committed tokens into text as they come; characters may be split over tokens, and stop strings end the
text."""

from collections.abc import Callable, Sequence

from mbd_core.calls.marks import open_length
from mbd_core.calls.thoughts import Thoughts

# Stop strings in a growing text: each character is read once, however long the stop strings are.


class StopStrings:
    """The stop strings of a request; each choice has its own `matcher()`.

    Raises `ValueError` for an empty stop string, which would end every text before its first character.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("stop='' would end every text before its first character; leave it out")
        self._stops = [_Stop(stop) for stop in stops]

    def matcher(self) -> "StopMatcher":
        return StopMatcher(self._stops)


class StopMatcher:
    """The match length of each stop string at the end of one text."""

    def __init__(self, stops: "Sequence[_Stop]") -> None:
        self._stops = stops
        self._lengths = [0] * len(stops)

    def push(self, text: str) -> tuple[int, int] | None:
        """Append `text`. Returns the end, in `text`, of the first complete stop string, and the string's length.

        If two stop strings are complete at the same character, the longer string counts. Nothing may be pushed after a
        match.
        """
        for end, letter in enumerate(text, start=1) if self._stops else ():
            self._lengths = [s.next(n, letter) for s, n in zip(self._stops, self._lengths, strict=True)]
            complete = [n for s, n in zip(self._stops, self._lengths, strict=True) if n == len(s.text)]
            if complete:
                return end, max(complete)
        return None

    @property
    def open_length(self) -> int:
        """The number of last characters that may be the beginning of a stop string."""
        return max(self._lengths, default=0)


class _Stop:
    """Knuth, Morris and Pratt's automaton of one stop string.

    Its state is the length of the longest prefix of the stop string with which the text ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [0] * len(text)  # the next shorter state after `i + 1` matched characters
        for i in range(1, len(text)):
            self._shorter[i] = self.next(self._shorter[i - 1], text[i])

    def next(self, length: int, letter: str) -> int:
        """The state after one more character; `length` is less than the stop string's length."""
        while length and self.text[length] != letter:
            length = self._shorter[length - 1]
        return length + (self.text[length] == letter)


DecodeTokens = Callable[[list[int]], str]

BROKEN = "\ufffd"


class CommittedText:
    """The text of one request, grown token by token.

    The results of `push` and `finish` join to the request's whole text, which does not depend on how the tokens were
    grouped into steps. A character with incomplete bytes is held back, and dropped if generation ends inside it. An
    ending that may be the beginning of a stop string is held back too. The text ends before the first complete stop
    string; if two strings are complete at the same character, before the longer string.

    The window holds the last tokens whose text is released, and all tokens whose text is not, because some tokenizers
    decode a token depending on the tokens before it.
    """

    def __init__(
        self,
        decode: DecodeTokens,
        stops: StopStrings | None = None,
        *,
        min_tokens: int = 0,
        thoughts: Thoughts | None = None,
    ) -> None:
        """Stop strings are not searched in the text of the first `min_tokens` tokens, nor in `thoughts`."""
        self._min_tokens = min_tokens
        self._thoughts = None if stops is None or thoughts is None else _ThoughtsText(thoughts)
        self._decode, self._matcher = decode, (stops or StopStrings()).matcher()
        self._window: list[int] = []
        self._num_context = 0  # tokens of the window with released text
        self._context = ""  # their text
        self._ending = ""  # characters that may begin a stop string
        self.num_tokens = 0
        self.in_character = False  # whether the text ends within a character
        self.stop: str | None = None  # the stop string at which the text has ended

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, token: int) -> str:
        """The text that became certain with `token`, often empty."""
        assert not self.stopped, "the text has ended at a stop string"
        self.num_tokens += 1
        self._window.append(token)
        text = self._decode(self._window)
        self.in_character = text.endswith(BROKEN)
        if len(text) <= len(self._context) or self.in_character:
            return ""
        delta = text[len(self._context) :]
        self._window = self._window[self._num_context :]
        self._num_context, self._context = len(self._window), self._decode(self._window)
        return self._release(delta)

    def finish(self) -> str:
        """The rest of the text; no token may follow."""
        if self.stopped:
            return ""
        tail = self._decode(self._window)[len(self._context) :].rstrip(BROKEN)
        text = self._release(tail)
        if self._thoughts is not None and not self.stopped:
            text += self._release_answer(self._thoughts.finish())
        if not self.stopped:
            text, self._ending = text + self._ending, ""
        return text

    def _release(self, delta: str) -> str:
        if self._thoughts is not None:
            thoughts, delta = self._thoughts.push(delta)
            return thoughts + self._release_answer(delta)
        return self._release_answer(delta)

    def _release_answer(self, delta: str) -> str:
        match = self._matcher.push(delta) if self.num_tokens > self._min_tokens else None
        text = self._ending + delta
        if match is not None:
            end, length = match
            end += len(self._ending)
            self.stop = text[end - length : end]
            return text[: end - length]
        split = len(text) - self._matcher.open_length
        self._ending = text[split:]
        return text[:split]


class _ThoughtsText:
    """Splits a growing text at the end of its thoughts, and keeps every character."""

    def __init__(self, thoughts: Thoughts) -> None:
        self._form, self._held = thoughts.form, ""
        self._place = "thoughts" if thoughts.is_open else "beginning"  # or "answer"

    def push(self, delta: str) -> tuple[str, str]:
        """The text up to the thoughts' end, and the text after it, as far as they are certain."""
        text, self._held = self._held + delta, ""
        if self._place == "beginning":
            bare = text.lstrip()
            if not bare.startswith(self._form.begin) and self._form.begin.startswith(bare):
                self._held = text
                return "", ""
            self._place = "thoughts" if bare.startswith(self._form.begin) else "answer"
        if self._place == "answer":
            return "", text
        thoughts, mark, answer = text.partition(self._form.end)
        if mark:
            self._place = "answer"
            return thoughts + mark, answer
        kept = open_length(text, self._form.end)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], ""

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held
