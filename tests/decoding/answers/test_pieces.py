"""A piece of an answer is sliced and joined as its lists are; counts add."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Edit, Piece

COLUMNS = ("tokens", "logprobs", "tops", "steps")
Column = tuple[object, ...]


def columns_of(piece: Piece) -> dict[str, Column]:
    return {name: getattr(piece, name) for name in COLUMNS}


def edits_by_place(piece: Piece) -> list[tuple[Edit, ...]]:
    """Of each token what was overwritten there, without its place."""
    return [tuple(Edit(0, e.step, e.token) for e in piece.edits if e.index == i) for i in range(len(piece))]


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    number = draw(st.integers(0, 6))
    column = st.lists(st.integers(0, 50), min_size=number, max_size=number).map(tuple)
    places = draw(st.lists(st.integers(0, max(0, number - 1)), max_size=4 if number else 0))
    return Piece(
        tokens=draw(column),
        logprobs=tuple(-float(v) for v in draw(column)),
        tops=tuple(((v, -1.0),) for v in draw(column)),
        steps=draw(column),
        edits=tuple(Edit(place, n, draw(st.integers(0, 50))) for n, place in enumerate(sorted(places))),
    )


PLACE = st.integers(-13, 13) | st.none()


@given(pieces(), pieces(), PLACE, PLACE)
def test_a_slice_of_a_sum_is_that_of_the_lists(a: Piece, b: Piece, i: int | None, j: int | None) -> None:
    part = (a + b)[i:j]
    for name, column in columns_of(part).items():
        assert column == (columns_of(a)[name] + columns_of(b)[name])[i:j]
    assert edits_by_place(part) == (edits_by_place(a) + edits_by_place(b))[i:j]
    assert all(0 <= edit.index < len(part) for edit in part.edits)


@given(pieces(), st.integers(0, 6))
def test_parts_join_to_the_whole(piece: Piece, i: int) -> None:
    assert piece[:i] + piece[i:] == piece


@given(pieces(), pieces(), pieces())
def test_addition_is_associative_and_has_a_zero(a: Piece, b: Piece, c: Piece) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + Piece() == a == Piece() + a


def test_a_column_that_nobody_asked_for_stays_away() -> None:
    piece = Piece(tokens=(1, 2, 3), steps=(1, 1, 2))
    assert (piece + piece)[1:].logprobs is None and (piece + piece)[1:].steps == (1, 2, 1, 1, 2)


def test_every_count_adds() -> None:
    names = [field.name for field in fields(Counts)]
    a = Counts(**{name: n for n, name in enumerate(names)})  # type: ignore[arg-type]
    b = Counts(**dict.fromkeys(names, 10))  # type: ignore[arg-type]
    assert [getattr(a + b, name) for name in names] == [n + 10 for n in range(len(names))]
    assert vars(sum([a, b], Counts())) == vars(a + b)
