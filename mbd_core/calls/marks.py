"""Marks in a growing text."""


def open_length(text: str, mark: str) -> int:
    """The number of last characters that may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
