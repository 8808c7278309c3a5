"""Hypothesis strategies for any record, any trial and any sweep."""

import typing

import values
from hypothesis import strategies as st

from scheduler.core.records import (
    AllFailed,
    Calibration,
    Entry,
    Environment,
    Failure,
    Key,
    Measurement,
    Record,
    Stage,
    Sweep,
    Trial,
    Verdict,
)

_names = st.text(max_size=8)
_counts = st.integers(0, 2**63 - 1)
_times = st.floats(allow_nan=False, allow_infinity=False)
_schedules = st.dictionaries(_names, st.integers() | st.booleans() | st.text(max_size=8), max_size=3)
_problems = (
    st.sampled_from([values.KEY.problem, '{"eps":1e-06,"names":["\\u00e9"]}', '{"m": 1}', "[]", "m=4", ""]) | st.text()
)
_measurements = st.builds(
    Measurement,
    median_s=_times,
    samples_s=st.lists(_times, max_size=3).map(tuple),
    clock=st.sampled_from(["cupti", "wall"]),
    l2=st.sampled_from(["cold", "warm"]),
    worst_s=st.none() | _times,
)
_failures = st.builds(Failure, st.sampled_from(typing.get_args(Stage)), st.text())
_entries = st.builds(Entry, _names, _counts, _schedules, _measurements, _times)
_environments = st.builds(Environment, _names, _names, _names, _names)
_verdicts = st.builds(
    Verdict,
    rounds=_counts,
    tied=st.lists(_names, max_size=2).map(tuple),
    margin_low=st.none() | _times,
    margin_high=st.none() | _times,
    drift=_times,
    notes=st.lists(_names, max_size=2).map(tuple),
)

records = st.builds(
    Record,
    key=st.builds(Key, operation=_names, hardware=_names, problem=_problems),
    entries=st.lists(_entries, min_size=1, max_size=3).map(tuple),
    versions=st.dictionaries(_names, _counts, max_size=2),
    environment=_environments,
    budget=_counts,
    tried=_counts,
    space=_counts,
    confidence=_verdicts,
    excluded=_counts,
    stopped=_names,
    failed=st.lists(st.builds(AllFailed, _names, _counts, _failures, _counts), max_size=2).map(tuple),
    library=st.sampled_from(["xla", "cublas"]),
    legal=_names,
    notes=st.lists(_names, max_size=2).map(tuple),
)
trials = st.builds(Trial, _counts, _names, _counts, _schedules, _measurements | _failures, _times)
sweeps = st.builds(
    Sweep,
    operation=_names,
    problem=_problems,
    platform=_names,
    kind=_names,
    architecture=_names,
    cores=_counts,
    environment=_environments,
    versions=st.dictionaries(_names, _counts, max_size=2),
    refused=st.dictionaries(_names, _names, max_size=2),
    space=_counts,
    dropped=st.dictionaries(_names, _counts, max_size=2),
    legal=_counts,
    sample=st.none() | _counts,
    seed=_counts,
    repetitions=_counts,
    again=_counts,
    rounds=_counts,
    library=st.sampled_from(["xla", "cublas"]),
)
calibrations = st.builds(
    Calibration,
    hardware=_names,
    operation=_names,
    backend=_names,
    version=_counts,
    constants=st.dictionaries(_names, _times, max_size=3),
    problems=_counts,
    trials=_counts,
    error=_times,
    environment=_environments,
)
