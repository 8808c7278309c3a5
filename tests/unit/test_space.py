"""Spaces: every point is legal or lost to one named rule, alone as in columns."""

import dataclasses
import pickle

import numpy as np
import pytest
from counting import bytecodes
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.space import Columns, Space


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    order: str
    fused: bool


SPACE = Space(
    Tile,
    choices={"rows": (8, 16, 32), "columns": (8, 16), "order": ("m", "n"), "fused": (False, True)},
    rules={
        "rows divide 48": lambda s: 48 % s.rows == 0,
        "a wide tile is walked along n": lambda s: (s.columns == 8) | (s.order == "n"),
        "only small tiles are fused": lambda s: ~(np.asarray(s.fused)) | (s.rows * s.columns <= 128),
    },
)


@dataclasses.dataclass(frozen=True)
class Nothing:
    """No choice at all."""


def test_points_are_the_whole_product_with_the_last_choice_fastest():
    points = SPACE.points()
    assert len(points) == SPACE.size == 24
    assert [points.row(index)["fused"] for index in range(4)] == [False, True, False, True]
    assert len({tuple(points.row(index).values()) for index in range(24)}) == 24


def test_every_illegal_point_is_lost_to_the_first_rule_that_its_fields_break():
    legal, dropped = SPACE.legal()
    assert dropped == {
        "rows divide 48": 8,
        "a wide tile is walked along n": 4,
        "only small tiles are fused": 1,
    }
    assert len(legal) + sum(dropped.values()) == SPACE.size


def test_one_schedule_and_columns_of_all_are_judged_alike():
    legal = set(SPACE.schedules(SPACE.legal()[0]))
    for schedule in SPACE.schedules(SPACE.points()):
        assert (SPACE.broken(schedule) is None) == (schedule in legal)


@given(
    st.permutations(["rows", "columns", "order", "fused"]),
    st.permutations(list(SPACE.rules)),
)
def test_the_order_of_fields_and_rules_changes_neither_the_legal_points_nor_the_sum(fields, rules):
    space = Space(Tile, {name: SPACE.choices[name] for name in fields}, {rule: SPACE.rules[rule] for rule in rules})
    legal, dropped = space.legal()
    judged = [schedule for schedule in space.schedules(space.points()) if space.broken(schedule) is None]
    assert list(space.schedules(legal)) == judged
    assert len(legal) + sum(dropped.values()) == space.size
    # In the order in which they were asked: as soon as the fields are there, then as declared.
    needed = {"rows divide 48": {"rows"}, "a wide tile is walked along n": {"columns", "order"}}
    needed["only small tiles are fused"] = {"rows", "columns", "fused"}
    asked = sorted(rules, key=lambda rule: max(map(fields.index, needed[rule])))
    assert list(dropped) == [rule for rule in asked if rule in dropped]


def test_a_rule_that_names_no_field_of_the_space_is_a_defect_not_a_rule_without_effect():
    space = Space(Tile, SPACE.choices, {"misspelt": lambda s: s.row_count > 8})
    with pytest.raises(AttributeError, match="no column 'row_count'; there are rows, columns, order, fused"):
        space.legal()


def test_an_illegal_schedule_is_told_why():
    assert SPACE.broken(Tile(8, 8, "m", False)) is None
    assert SPACE.broken(Tile(32, 8, "m", False)) == "breaks the rule 'rows divide 48'"
    assert SPACE.broken(Tile(8, 8, "k", False)) == "order=k is not among m, n"


def test_a_rule_that_does_not_look_at_the_schedule_counts_for_all():
    never = Space(Tile, SPACE.choices, {"never": lambda s: False})
    legal, dropped = never.legal()
    assert (len(legal), dropped) == (0, {"never": 24})


def test_a_space_without_choices_has_one_point():
    space = Space(Nothing, {})
    legal, dropped = space.legal()
    assert (space.size, len(legal), dropped) == (1, 1, {})
    assert list(space.schedules(legal)) == [Nothing()]
    assert space.broken(Nothing()) is None
    assert space.decode({}) == Nothing()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"row": 8, "columns": 8, "order": "m", "fused": True}, "no field 'row'; did you mean 'rows'"),
        ({"rows": 8, "columns": 8, "order": "m"}, "lacks fused"),
        ({"rows": "8", "columns": 8, "order": "m", "fused": True}, "rows='8' is not a int"),
        ({"rows": 8, "columns": 8, "order": "m", "fused": 1}, "fused=1 is not a bool"),
    ],
)
def test_what_does_not_decode_says_what_would(values, message):
    with pytest.raises(ValueError, match=message):
        SPACE.decode(values)


@dataclasses.dataclass(frozen=True)
class LaterTile(Tile):
    """As `Tile`, with a field that came later than stored schedules."""

    split: int = 1


LATER = Space(LaterTile, {**SPACE.choices, "split": (2, 1)}, SPACE.rules)


@given(st.integers(0, 23))
def test_a_schedule_from_before_a_field_existed_is_the_one_at_its_default(index):
    old = SPACE.points().row(index)
    schedule = LATER.decode(old)
    assert schedule == LaterTile(**old, split=1)
    assert LATER.encode(dataclasses.asdict(schedule)) == old
    assert LATER.broken(schedule) == SPACE.broken(SPACE.decode(old))


@given(st.integers(0, 47))
def test_a_point_has_one_spelling_and_decodes_from_it(index):
    row = LATER.points().row(index)
    assert ("split" in LATER.encode(row)) == (row["split"] != 1)
    assert dataclasses.asdict(LATER.decode(LATER.encode(row))) == row == dataclasses.asdict(LATER.decode(row))


def test_a_later_field_is_still_checked():
    with pytest.raises(ValueError, match="split='1' is not a int"):
        LATER.decode({"rows": 8, "columns": 8, "order": "m", "fused": True, "split": "1"})
    with pytest.raises(ValueError, match="lacks fused"):
        LATER.decode({"rows": 8, "columns": 8, "order": "m", "split": 1})


@given(st.integers(0, 23))
def test_a_row_decodes_to_the_schedule_it_came_from(index):
    points = SPACE.points()
    row = points.row(index)
    assert {type(value) for value in row.values()} == {int, str, bool}
    schedule = SPACE.decode(row)
    assert dataclasses.asdict(schedule) == row
    assert Columns.of([schedule]).row(0) == row


@given(st.lists(st.integers(0, 23), max_size=10))
def test_taken_rows_are_the_rows_asked_for_in_that_order(which):
    points = SPACE.points()
    taken = points.take(np.array(which, dtype=int))
    assert [taken.row(i) for i in range(len(taken))] == [points.row(index) for index in which]


def test_columns_must_be_of_one_length_and_name_what_they_have():
    with pytest.raises(ValueError, match="lengths"):
        Columns({"a": [1, 2], "b": [1]})
    with pytest.raises(ValueError, match="lengths"):
        Columns({"a": [1, 2]}, length=3)
    with pytest.raises(AttributeError, match="no column 'c'; there are a, b"):
        _ = Columns({"a": [1], "b": [2]}).c
    with pytest.raises(ValueError, match="at least one schedule"):
        Columns.of([])


def test_columns_survive_the_way_to_another_process():
    points = pickle.loads(pickle.dumps(SPACE.points()))
    assert [points.row(i) for i in range(24)] == [SPACE.points().row(i) for i in range(24)]
    assert len(pickle.loads(pickle.dumps(Columns({}, length=1)))) == 1


def test_a_hundred_thousand_points_are_judged_with_little_more_python_than_thirty_two():
    def space(extent):
        choices = {name: tuple(range(1, extent + 1)) for name in "abcde"}
        names = dataclasses.make_dataclass("Five", list(choices), frozen=True)
        return Space(names, choices, {"a below b": lambda s: s.a < s.b, "c divides 12": lambda s: 12 % s.c == 0})

    legal, dropped = space(10).legal()
    assert len(legal) + sum(dropped.values()) == 100_000
    assert bytecodes(space(10).legal) <= 1.2 * bytecodes(space(2).legal)
