"""What is said of a record in sentences and in one word."""

import dataclasses
import math

import pytest
from values import VERDICT, record

from scheduler.core.records import Entry, Measurement, Verdict
from scheduler.inspect.verdict import gain_text, interval_text, standing, verdict
from scheduler.inspect.wording import compared, difference
from scheduler.search.final_comparison import Rival, race
from scheduler.store.store import shipped

pytestmark = pytest.mark.one_jax

SHIPPED = list(shipped().records())
MEASURED = [one for one in SHIPPED if not one.estimated]


def timed(*samples_s):
    return Measurement(sorted(samples_s)[len(samples_s) // 2], samples_s, "cupti", "cold")


@pytest.mark.parametrize(
    ("pallas_s", "confidence", "said"),
    [
        (1.5e-4, Verdict(), "XLA wins; the best other schedule takes 1.5 times as long."),
        (1.015e-4, VERDICT, "A tie within 1 % goes to XLA; the best other schedule takes 1.01 times as long."),
        (0.995e-4, Verdict(), "A tie within 1 % goes to XLA; the best other schedule takes 0.995 times as long."),
    ],
)
def test_a_tie_that_goes_to_the_library_is_not_called_a_win(pallas_s, confidence, said):
    entries = tuple(Entry(name, 1, {}, timed(s), 1e-4) for name, s in (("xla", 1e-4), ("mosaic_gpu", pallas_s)))
    assert verdict(dataclasses.replace(record(confidence=confidence), entries=entries))[0] == said


def raced(times, library="xla"):
    """The record of a real run-off in which each of `times` takes what is written, round after round."""
    clocks = {name: iter(rounds * 3) for name, rounds in times.items()}
    rivals = [Rival(f"{name} {{}}", name == library, 0) for name in times]
    ended = race(rivals, lambda rival: timed(*[next(clocks[rival.label.split()[0]])] * 2))
    entries = tuple(Entry(label.split()[0], 1, {}, ended.times[label], 1e-4) for label in ended.order)
    return dataclasses.replace(record(confidence=ended.verdict), entries=entries)


STEADY = [1.0e-4, 1.001e-4, 0.999e-4, 1.0e-4] * 5
NOISY = [0.3e-4, 3e-4, 0.4e-4, 2.5e-4] * 5
CASES = {
    "ahead": (raced({"mosaic_gpu": STEADY, "xla": [1.2 * s for s in STEADY]}), "1.20x", "1.2 times as fast as XLA"),
    "behind": (raced({"xla": STEADY, "mosaic_gpu": [1.2 * s for s in STEADY]}), "1.00x", "XLA wins; "),
    "tie": (raced({"mosaic_gpu": STEADY, "xla": STEADY[1:] + STEADY[:1]}), "tie", "A tie within 1 % goes to XLA"),
    "noisy": (raced({"mosaic_gpu": NOISY, "xla": NOISY[::-1]}), "undecided", "ndecided"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_and_a_sentence_say_what_the_run_off_could_tell(case):
    found, gain, said = CASES[case]
    assert gain_text(found) == gain
    assert said in verdict(found)[0]
    assert found.undecided == (case == "noisy")
    assert ("ndecided" in " ".join(verdict(found))) == (case == "noisy")


@pytest.mark.parametrize("low", [-0.8094, -0.01, -1e-9, 0.0, 0.02])
@pytest.mark.parametrize("more", [0.0, 1e-9, 0.004, 3.6622])
def test_no_interval_has_a_negative_end(low, more):
    text = interval_text(low, low + more)
    assert "-" not in text
    assert ("faster" in text) == (low < -5e-5)
    assert ("slower" in text) == (low + more > 5e-5)


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: str(one.key))
def test_what_is_said_of_a_shipped_record_agrees_with_itself(one):
    told, gain = verdict(one), gain_text(one)
    assert " -" not in " ".join(told)
    assert ("the compiler's estimates" in told[0]) == one.estimated
    if one.estimated:
        told = told[1:]
    if one.winner.backend != "xla" and (xla := one.library_entry) is not None:
        assert ("times as fast as XLA" in told[0]) == gain.endswith("x")
        assert standing(one, xla).ratio > 0.99
    assert one.undecided == ("undecided" in told[-1])


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: str(one.key))
def test_the_interval_of_a_run_off_follows_from_the_samples_that_its_record_keeps(one):
    found, sure = standing(one, one.entries[1]), one.confidence
    assert math.isclose(found.low, sure.margin_low, abs_tol=1e-9)
    assert math.isclose(found.high, sure.margin_high, abs_tol=1e-9)


def test_a_schedule_told_by_its_difference_can_be_put_together_again():
    base, other = {"a": 1, "b": True, "c": "m"}, {"a": 2, "b": True, "d": 3}
    assert difference(other, base) == "a=2 c=default d=3"
    assert difference(base, base) == "the same"


def test_of_each_backend_one_schedule_is_shown_in_full_and_the_others_by_what_differs():
    one, other = {"tile": 1, "stages": 4}, {"tile": 2, "stages": 4}
    shown = compared([("a", one), ("b", other), ("a", other), ("c", {}), ("a", one)])
    assert shown.texts == ["a stages=4 tile=1", "b stages=4 tile=2", "a tile=2", "c", "a the same"]
    assert shown.note == ["schedules are shown by what differs from the first of a"]
    shown = compared([("a", one), ("b", other)], {"a": ("the winner", other)})
    assert (shown.texts, shown.note) == (
        ["a tile=1", "b stages=4 tile=2"],
        ["schedules are shown by what differs from the winner"],
    )
    assert compared([("a", one), ("b", other)]).note == []


def test_an_interval_of_one_value_is_that_value():
    assert interval_text(0.1198, 0.1198) == "11.98% slower"
    assert interval_text(-0.02, -0.020001) == "2.00% faster"
    assert interval_text(0.02, 0.03) == "2.00% to 3.00% slower"
    assert interval_text(-0.03, -0.02) == "2.00% to 3.00% faster"
