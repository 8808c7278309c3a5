"""Keys of constants tell apart what Python's equality does not."""

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from search_spaces.exact import exact
from search_spaces.operation import Params


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float


class Pair(NamedTuple):
    first: float


OTHERS = [
    *(0, 0.0, -0.0, False, 0j, -0j, np.float32(0), np.float64(0), np.float64(-0.0), np.int32(0), Fraction(0)),
    *((0,), (0.0,), (-0.0,), (False,), ((0,),), ((0.0,),), Pair(0.0), Pair(-0.0)),
    *(frozenset({0}), frozenset({0.0}), Config(0.0), Config(-0.0), Config(0)),
]


def test_constants_of_other_types_or_signs_have_other_keys():
    for one, other in itertools.combinations(OTHERS, 2):
        assert exact(one) != exact(other), (one, other)
        assert Params((("x", one),)) != Params((("x", other),)), (one, other)


def test_equal_constants_have_equal_keys_and_nan_is_one_of_them():
    for x in (*OTHERS, "text", None, (1, "a", None), len):
        assert {exact(x): 1}[exact(x)]
    assert exact((math.nan, 1)) == exact((float("nan"), 1))
    assert Params((("x", math.nan),)) == Params((("x", float("nan")),))
