"""What is said of a record in sentences."""

import dataclasses

import pytest
from values import VERDICT, record

from scheduler.record import Entry, Measurement, Verdict
from scheduler.report import verdict


@pytest.mark.parametrize(
    ("pallas_s", "confidence", "said"),
    [
        (1.5e-4, Verdict(), "XLA wins; the best Pallas schedule takes 1.5 times as long."),
        (1.015e-4, VERDICT, "A tie within 1 % goes to XLA; the best Pallas schedule takes 1.01 times as long."),
        (0.995e-4, Verdict(), "A tie within 1 % goes to XLA; the best Pallas schedule takes 0.995 times as long."),
    ],
)
def test_a_tie_that_goes_to_the_library_is_not_called_a_win(pallas_s, confidence, said):
    entries = tuple(
        Entry(backend, 1, {}, Measurement(time_s, (time_s,), "cupti", "cold"), 1e-4)
        for backend, time_s in (("xla", 1e-4), ("mosaic_gpu", pallas_s))
    )
    assert verdict(dataclasses.replace(record(confidence=confidence), entries=entries))[0] == said
