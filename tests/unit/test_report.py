"""What is said of a record in sentences and in one word."""

import dataclasses
import io
import math
import re

import jax
import pytest
from failures import failures
from own_kernels import sum_and_max
from rich.console import Console
from values import VERDICT, record

from scheduler.cli import record_report
from scheduler.cli.record_report import cost_text
from scheduler.core.hardware import CPU
from scheduler.core.records import Entry, Measurement, Trial, Verdict, key_of
from scheduler.core.text import faster_text, ratio_text, seconds_text
from scheduler.inspect import case as cases
from scheduler.inspect.verdict import compared, difference, gain_text, interval_text, order_note, standing, verdict
from scheduler.search.runoff import Contender, race
from scheduler.search.task import Baseline, Result, Task
from scheduler.store.store import shipped
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem

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
    rivals = [Contender(f"{name} {{}}", name == library, 0) for name in times]
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
@pytest.mark.parametrize("more", [0.0, 1e-9, 0.004, 3.6622, 621.8797])
def test_no_interval_has_a_negative_end_or_more_than_three_digits(low, more):
    text = interval_text(low, low + more)
    assert "-" not in text
    assert ("faster" in text or "as fast" in text) == (low < -5e-5 or low + more < 5e-5)
    assert ("slower" in text or "as slow" in text) == (low + more > 5e-5)
    assert not long_numbers(text)


def long_numbers(text):
    """The numbers of a text with more than three digits that say something."""
    return [n for n in re.findall(r"[\d.]+", text) if len(n.replace(".", "").lstrip("0")) > 3]


def test_a_time_many_times_as_long_is_a_ratio():
    assert interval_text(-0.8077, 47.9921) == "between 5.2 times as fast and 49 times as slow"
    assert interval_text(0.25, 620.8797) == "25% slower to 622 times as slow"
    assert interval_text(2.0, 620.8797) == "3 to 622 times as slow"
    assert interval_text(-0.9, -0.75) == "4 to 10 times as fast"
    assert interval_text(-0.3, 0.00001) == "up to 30% faster"
    assert interval_text(-0.00001, 0.30) == "up to 30% slower"


def key(record):
    return record.key


def test_what_is_said_of_a_shipped_record_agrees_with_itself():
    def check(one):
        told, gain = verdict(one), gain_text(one)
        assert " -" not in " ".join(told)
        assert ("the compiler's estimates" in told[0]) == one.estimated
        if one.estimated:
            told = told[1:]
        if one.winner.backend != "xla" and (xla := one.library_entry) is not None:
            assert ("times as fast as XLA" in told[0]) == gain.endswith("x")
            assert standing(one, xla).ratio > 0.99
        assert one.undecided == ("undecided" in told[-1])

    assert failures(check, SHIPPED, key) == []


def test_the_interval_of_a_run_off_follows_from_the_samples_that_its_record_keeps():
    def check(one):
        found, sure = standing(one, one.entries[1]), one.confidence
        assert math.isclose(found.low, sure.margin_low, abs_tol=1e-9)
        assert math.isclose(found.high, sure.margin_high, abs_tol=1e-9)

    assert failures(check, MEASURED, key) == []


def test_a_schedule_told_by_its_difference_can_be_put_together_again():
    base, other = {"a": 1, "b": True, "c": "m"}, {"a": 2, "b": True, "d": 3}
    assert difference(other, base) == "a=2 c=default d=3"
    assert difference(base, base) == "the same"


def test_of_each_backend_one_schedule_is_shown_in_full_and_the_others_by_what_differs():
    one, other = {"tile": 1, "stages": 4}, {"tile": 2, "stages": 4}
    shown = compared([("a", one), ("b", other), ("a", other), ("c", {}), ("a", one)])
    assert shown.texts == ["a stages=4 tile=1", "b stages=4 tile=2", "a tile=2", "c", "a the same"]
    assert shown.note == ["schedules are shown by their differences from the first of a"]
    shown = compared([("a", one), ("b", other)], {"a": ("the winner", other)})
    assert (shown.texts, shown.note) == (
        ["a tile=1", "b stages=4 tile=2"],
        ["schedules are shown by their differences from the winner"],
    )
    assert compared([("a", one), ("b", other)]).note == []


def test_schedules_of_several_operations_show_only_fields_of_their_own():
    tile, row = {"tile_m": 64, "stages": 4}, {"rows": 16}
    choices = [("gpu", tile), ("gpu", row), ("gpu", {"rows": 32}), ("gpu", tile | {"stages": 2})]
    shown = compared(choices, operations=["matmul", "softmax", "softmax", "matmul"])
    assert shown.texts == ["gpu stages=4 tile_m=64", "gpu rows=16", "gpu rows=32", "gpu stages=2"]
    assert shown.note == ["schedules are shown by their differences from the first of its operation and backend"]


def test_an_interval_of_one_value_is_that_value():
    assert interval_text(0.1198, 0.1198) == "12% slower"
    assert interval_text(-0.02, -0.020001) == "2% faster"
    assert interval_text(0.02, 0.03) == "2% to 3% slower"
    assert interval_text(-0.03, -0.02) == "2% to 3% faster"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (1e-3, "1.00 ms"), (9.996e-4, "1.00 ms"), (9.994e-4, "999 us"), (6.8e-5, "68.0 us"),
        (9.999e-5, "100 us"), (1.2e-8, "12.0 ns"), (4e-10, "0.400 ns"), (12.3456, "12.3 s"), (3600, "3600 s"),
    ],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(seconds, text):
    assert seconds_text(seconds) == text


def test_what_is_much_faster_is_so_many_times_as_fast():
    assert faster_text(0.2) == "20% faster"
    assert faster_text(2.0512) == "3.05 times as fast"


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.9876, "0.99x"), (1, "1.00x"), (9.996, "10.0x"), (97.34, "97.3x"), (621.8, "622x")]
)
def test_ratios_have_three_digits(ratio, text):
    assert ratio_text(ratio) == text


# The winner is ahead in each round. Its median is longer: the other ran in the faster rounds alone.
DRIFTING = {"mosaic_gpu": [1e-4, 1e-4, 3e-4, 3e-4] * 5, "xla": [1.1e-4, 1.1e-4, 3.3e-4, 3.3e-4] * 5}


def test_where_the_order_is_not_that_of_the_medians_it_is_said_why():
    found = raced(DRIFTING)
    winner, other = found.entries
    assert winner.backend == "mosaic_gpu"
    assert order_note(found) == ""
    early = dataclasses.replace(other.measurement, median_s=0.9 * winner.measurement.median_s)
    turned = dataclasses.replace(found, entries=(winner, dataclasses.replace(other, measurement=early)))
    assert order_note(turned).startswith("Rows are in the order of the run-off, not of the medians")
    assert standing(turned, turned.entries[1]).ratio == pytest.approx(1.1)
    table = printed(turned)
    assert re.search(r"runner-up +xla +\S+ us +1\.10x", table)
    assert "the median round" in table
    unraced = dataclasses.replace(turned, confidence=Verdict())
    assert order_note(unraced) == (
        "Rows are not in the order of their times: a tie goes to XLA, then to the schedule with less on-chip memory."
    )


def printed(found, problem=None, hardware=None, width=120):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    for part in record_report.entries(found, problem, hardware, width):
        console.print(part)
    return console.file.getvalue()


def test_the_table_of_a_record_breaks_no_word_at_80_columns():
    def check(one):
        case = cases.of_record(one)
        table = printed(one, case.problem, case.hardware, 80).partition("\n\n")[0]
        rows = table.splitlines()
        assert len(rows) == 2 + len(one.entries)
        for entry, row in zip(one.entries, rows[2:], strict=True):
            assert entry.backend in row.split()
            assert not [n for n in re.findall(r"\d+\.\d+", row) if len(n.replace(".", "").lstrip("0")) > 3]

    assert failures(check, SHIPPED[::7], key) == []


def test_a_kernel_without_a_footprint_has_no_prediction():
    operation = load("own_kernels:sum_and_max")
    problem = sum_and_max.problem(jax.ShapeDtypeStruct((8, 16), "float32"))
    entries = tuple(Entry(name, 1, of, timed(1e-4), 1e-3) for name, of in (("pallas", {"tile": 4}), ("xla", {})))
    found = dataclasses.replace(record(key_of(operation, problem, CPU)), entries=entries)
    rows = printed(found, problem, CPU).splitlines()[2:4]
    assert [row.split()[-1] for row in rows] == ["-", "ms"]
    trials = [Trial(number, e.backend, 1, e.schedule, e.measurement, 1e-3) for number, e in enumerate(entries)]
    shown = Console(width=80, file=io.StringIO(), highlight=False)
    for part in record_report.trials_table(trials, found, 80):
        shown.print(part)
    assert [line.split()[-1] for line in shown.file.getvalue().splitlines()[-2:]] == ["-", "ms"]


def searched(case, used, elapsed_s=3.0, measured=True, count=1):
    """The result of a search that ended with the record of a case, where calls used the backend `used` before."""
    found = CASES[case][0]
    (before,) = [entry for entry in found.entries if entry.backend == used]
    baseline = Baseline(used, before.schedule, before.measurement.median_s, measured)
    task = Task(MATMUL, MatmulProblem(8, 8, 8), count=count)
    return Result(task, "tuned", record=found, entry=found.winner, before=baseline, elapsed_s=elapsed_s)


def test_what_a_search_costs_is_said_with_the_calls_that_repay_it():
    gained, same, tied = searched("ahead", "xla"), searched("ahead", "mosaic_gpu"), searched("tie", "xla")
    assert record_report.saved_s(gained) == pytest.approx(0.2e-4, rel=0.01)
    calls = math.ceil(3.0 / record_report.saved_s(gained))
    (said,) = re.findall(r"took 3.00 s and saves 20.0 us per call: repaid after ([0-9,]+) calls", cost_text([gained]))
    assert int(said.replace(",", "")) == pytest.approx(calls, rel=0.01)
    for nothing in (same, tied):
        assert cost_text([nothing]) == "The search took 3.00 s and gains nothing: calls are as fast without it."
    assert "The gain is unknown" in cost_text([searched("ahead", "xla", measured=False)])
    assert cost_text([dataclasses.replace(gained, state="known")]) == ""
    several = cost_text([searched("ahead", "xla", count=5), same, dataclasses.replace(tied, state="known")])
    assert several.startswith("The searches took 6.00 s and save 100 us per round: repaid after ")
    assert cost_text([same, tied]) == "The searches took 6.00 s and gain nothing: calls are as fast without them."
