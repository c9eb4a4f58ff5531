"""Stop strings cost a bounded number of comparisons a character."""

import pytest

from mbd_core.serving.text.committed import StopStrings


class Letter(str):
    """A character that counts how often it is compared."""

    compared = 0

    def __ne__(self, other: object) -> bool:
        Letter.compared += 1
        return str.__ne__(self, other)

    def __eq__(self, other: object) -> bool:
        Letter.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


class Letters(str):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return (Letter(letter) for letter in str.__iter__(self))


@pytest.mark.parametrize("text", ["a" * 4000, "ab" * 2000, "a" * 1000 + "b" * 1000])
def test_long_stop_strings_that_nearly_match_cost_no_more_than_short_ones(text: str) -> None:
    matcher = StopStrings(["a" * 1023 + "c", "ab" * 511 + "c"]).matcher()
    Letter.compared = 0
    assert matcher.push(Letters(text)) is None
    assert len(text) <= Letter.compared <= 2 * 3 * len(text), "two stop strings, at most three comparisons each"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        StopStrings(["a", ""])
