"""Committed tokens become text: characters split over tokens, and stop strings across any border."""

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mbd_core.serving.text.committed import BROKEN, CommittedText, StopStrings


@dataclass
class ByteTokens:
    """A byte-level vocabulary made for one text: token i is the i-th piece of its bytes."""

    pieces: list[bytes]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[t] for t in tokens).decode("utf-8", "replace")


def cut_up(data: bytes, borders: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(b % (len(data) + 1) for b in borders)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def grow(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], CommittedText]:
    text = CommittedText(ByteTokens(pieces).decode, StopStrings(stop))
    deltas = []
    for token in range(len(pieces)):
        deltas.append(text.push(token))
        if text.stopped:
            return deltas, text
    return [*deltas, text.finish()], text


def before_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """The definition, character by character: the stop string complete first, the longest of those."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


words = st.text(alphabet="abé漢🙂 \n", max_size=30)


@given(text=words, borders=st.lists(st.integers(0, 200), max_size=40))
def test_characters_split_over_tokens_come_out_whole(text: str, borders: list[int]) -> None:
    deltas, _ = grow(cut_up(text.encode(), borders))
    assert "".join(deltas) == text
    assert not any(BROKEN in d for d in deltas)


@given(data=st.binary(max_size=30), borders=st.lists(st.integers(0, 60), max_size=20))
def test_bytes_that_are_no_text_decode_as_they_would_at_once(data: bytes, borders: list[int]) -> None:
    deltas, _ = grow(cut_up(data, borders))
    assert "".join(deltas) == data.decode("utf-8", "replace").rstrip(BROKEN)


@given(
    text=words,
    borders=st.lists(st.integers(0, 200), max_size=40),
    stop=st.lists(st.text(alphabet="abé漢🙂 \n", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_stop_strings_match_across_any_border(text: str, borders: list[int], stop: tuple[str, ...]) -> None:
    pieces = cut_up(text.encode(), borders)
    deltas, grown = grow(pieces, stop)
    wanted = before_first_stop(text, stop)
    assert "".join(deltas) == wanted
    assert grown.stopped == any(s in text for s in stop)
    if grown.stopped:  # at the first token that ended a character with a stop string complete
        ends = grown.num_tokens, grown.num_tokens - 1
        shown, before = (b"".join(pieces[:end]).decode("utf-8", "replace") for end in ends)
        assert any(s in shown for s in stop)
        assert before.endswith(BROKEN) or not any(s in before for s in stop)


def test_an_ending_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    text = CommittedText(ByteTokens([b"x", b"#", b"a", b"#", b"#"]).decode, StopStrings(("##",)))
    assert [text.push(t) for t in range(5)] == ["x", "", "#a", "", ""]
    assert text.stopped
    assert text.finish() == ""
