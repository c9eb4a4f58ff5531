"""Stop strings in a text that grows: each character is looked at once, however long the stop strings are."""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, whose choices each follow them with a `matcher()`.

    Raises `ValueError` on an empty one, which would end every text before its first character.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("stop='' would end every text before its first character; leave it out")
        self._stops = [_Stop(stop) for stop in stops]

    def matcher(self) -> "StopMatcher":
        return StopMatcher(self._stops)


class StopMatcher:
    """How far each stop string has come in one text."""

    def __init__(self, stops: "Sequence[_Stop]") -> None:
        self._stops = stops
        self._lengths = [0] * len(stops)

    def push(self, text: str) -> tuple[int, int] | None:
        """Go on with `text`: where the stop string that is complete first ends in it, and its length.

        Of two that are complete at the same character the longer one. Nothing may follow a match.
        """
        for end, letter in enumerate(text, start=1) if self._stops else ():
            self._lengths = [s.next(n, letter) for s, n in zip(self._stops, self._lengths, strict=True)]
            complete = [n for s, n in zip(self._stops, self._lengths, strict=True) if n == len(s.text)]
            if complete:
                return end, max(complete)
        return None

    @property
    def open_length(self) -> int:
        """How many of the last characters may yet grow into a stop string."""
        return max(self._lengths, default=0)


class _Stop:
    """Knuth, Morris and Pratt's automaton of one stop string.

    Its state is a length: of the longest beginning of the stop string that the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [0] * len(text)  # the state that is left where the character after `i + 1` does not fit
        for i in range(1, len(text)):
            self._shorter[i] = self.next(self._shorter[i - 1], text[i])

    def next(self, length: int, letter: str) -> int:
        """The state after one more character; `length` is less than the whole."""
        while length and self.text[length] != letter:
            length = self._shorter[length - 1]
        return length + (self.text[length] == letter)
