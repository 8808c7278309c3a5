"""Records as text: what is written is read again, and what is not a record is refused with the place and the reason."""

import dataclasses
import json
import subprocess

import pytest
import strategies
import values
from hypothesis import given

from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.records import Calibration, Failure, Key, Verdict
from scheduler.store import text_files


@given(strategies.records)
def test_any_record_survives_its_text(record):
    line = codec.record_to_text(record)
    assert codec.record_from_text(line) == record
    assert "\n" not in line
    assert line.isascii()


@given(strategies.trials)
def test_any_trial_survives_its_text(trial):
    assert codec.trial_from_text(codec.trial_to_text(trial)) == trial


@given(strategies.calibrations)
def test_any_calibration_survives_its_text(calibration):
    assert codec.calibration_from_text(codec.calibration_to_text(calibration)) == calibration


def test_calibrations_are_kept_by_chip_and_kernel_and_the_newer_one_replaces_the_older(tmp_path):
    def fitted(hardware, backend, error):
        return Calibration(hardware, "matmul", backend, 1, {"p": 5.0}, 7, 900, error, values.ENVIRONMENT)

    text_files.add_calibrations(tmp_path, [fitted("one", "xla", 0.1), fitted("one", "mosaic_gpu", 0.1)])
    text_files.add_calibrations(tmp_path, [fitted("one", "xla", 0.2), fitted("two", "xla", 0.3)])
    found = {(c.hardware, c.backend): c.error for c in text_files.read_calibrations(tmp_path)}
    assert found == {("one", "mosaic_gpu"): 0.1, ("one", "xla"): 0.2, ("two", "xla"): 0.3}
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "constants.json").write_text((tmp_path / "two" / "constants.json").read_text())
    with pytest.raises(StoreError, match="two matmul xla; keep one"):
        text_files.read_calibrations(tmp_path)
    (tmp_path / "three" / "constants.json").write_text("{}")
    with pytest.raises(StoreError, match="a list is wanted"):
        text_files.read_calibrations(tmp_path)


def test_a_failure_of_an_unknown_stage_is_refused():
    failed = values.trial(outcome=Failure("implausible", "takes 0 s"))
    text = codec.trial_to_text(failed)
    with pytest.raises(ValueError, match=r"stage: one of lower,.* is wanted, found 'guilty'"):
        codec.trial_from_text(text.replace("implausible", "guilty"))


def test_a_bool_and_a_number_of_a_schedule_stay_what_they_are():
    schedule = codec.record_from_text(codec.record_to_text(values.record())).winner.schedule
    assert {name: type(value) for name, value in schedule.items()} == {"tile_m": int, "split": str, "persistent": bool}


def test_the_text_of_a_record_does_not_depend_on_the_order_of_its_names():
    record = values.record()
    winner = dataclasses.replace(record.winner, schedule=dict(reversed(record.winner.schedule.items())))
    shuffled = dataclasses.replace(record, entries=(winner, *record.entries[1:]))
    assert list(winner.schedule) != list(record.winner.schedule)
    assert codec.record_to_text(shuffled) == codec.record_to_text(record)


def test_a_canonical_problem_is_written_as_an_object():
    assert json.loads(codec.record_to_text(values.record()))["problem"]["m"] == 256


def test_export_sorts_and_import_restores():
    records = [values.record(Key(o, h, "{}")) for o, h in (("b", "x"), ("a", "y"), ("a", "x"))]
    exported = text_files.export_text(records)
    assert text_files.import_text(exported) == [records[2], records[1], records[0]]
    assert text_files.export_text(reversed(records)) == exported


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("format",), 2, "this version reads format 1, found format 2"),
        (("entries",), [], "entries: at least the winner is wanted"),
        (("entries", 0, "measurement", "median_s"), "fast", "entries: item 0: measurement: median_s: a finite number"),
        (("entries", 0, "measurement", "median_s"), float("nan"), "a finite number of seconds is wanted, found nan"),
        (("entries", 0, "measurement", "samples_s", 1), True, "samples_s: item 1: a finite number"),
        (
            ("entries", 0, "measurement", "clock"),
            "sundial",
            "clock: one of cupti, wall, static is wanted, found 'sundial'",
        ),
        (("entries", 0, "measurement", "clock"), ["cupti"], "clock: one of cupti, wall"),
        (("entries", 1, "schedule"), {"tile_m": {"of": 1}}, "entries: item 1: schedule: tile_m: "),
        (("versions",), {"xla": True}, "versions: xla: an integer"),
        (("environment",), None, "environment: a JSON object is wanted, found None"),
        (("budget",), -1, "budget: an integer"),
        (("problem",), 7, "problem: text is wanted"),
        (("confidence", "drift"), None, "confidence: drift: a finite number is wanted, found None"),
        (("confidence", "margin_low"), "1 %", "confidence: margin_low: a finite number or null is wanted"),
        (("confidence", "notes"), "a drift", "confidence: notes: a list is wanted"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path, value, reason):
    fields = json.loads(codec.record_to_text(values.record(confidence=values.VERDICT)))
    place = fields
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below, and holds brackets
        codec.record_from_text(json.dumps(fields))
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["format", "operation", "hardware", "problem", "entries", "versions", "environment"])
def test_a_missing_value_is_named(name):
    fields = json.loads(codec.record_to_text(values.record()))
    del fields[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        codec.record_from_text(json.dumps(fields))


@pytest.mark.parametrize("library", ["xla", "another"])
def test_the_library_is_named_where_it_is_another_than_that_of_older_text(library):
    record = dataclasses.replace(values.record(), library=library)
    line = codec.record_to_text(record)
    assert ('"library"' in line) == (library != "xla")
    assert codec.record_from_text(line) == record


def test_a_record_from_before_its_confidence_was_kept_says_nothing_of_it():
    fields = json.loads(codec.record_to_text(values.record(confidence=values.VERDICT)))
    del fields["confidence"]
    older = codec.record_from_text(json.dumps(fields))
    assert older.confidence == Verdict()
    assert "confidence" not in json.loads(codec.record_to_text(older))


@pytest.mark.parametrize("line", ["", "{", "[" * 100_000, "7", "null", '"record"', "__import__('os')"])
def test_what_is_no_record_is_refused_as_text(line):
    with pytest.raises(ValueError, match="JSON"):
        codec.record_from_text(line)


def test_a_time_that_is_not_finite_is_never_written():
    with pytest.raises(ValueError, match="JSON compliant"):
        codec.trial_to_text(dataclasses.replace(values.trial(), predicted_s=float("inf")))


def test_import_has_a_sentence_for_every_bad_line():
    good = codec.record_to_text(values.record())
    with pytest.raises(StoreError) as caught:
        text_files.import_text(f"{good}\n\nnonsense\n{good}\n{{}}\n", source="mine.jsonl")
    message = str(caught.value)
    assert "mine.jsonl" in message
    assert "line 3: invalid JSON" in message
    assert "line 4: a second record of matmul" in message
    assert "line 5: format is missing" in message


def test_records_are_filed_by_hardware_and_operation_and_replace_older_ones(tmp_path):
    old, other = values.record(), values.record(Key("softmax", values.KEY.hardware, "{}"))
    new = values.record(measurement=values.SLOW)
    text_files.add_records(tmp_path, [old, other])
    files = text_files.add_records(tmp_path, [new])
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["nvidia-h200-132-cores-140-gib/matmul.jsonl"]
    assert text_files.read_records(tmp_path) == [new, other]


def test_one_key_in_two_files_is_refused(tmp_path):
    [file] = text_files.add_records(tmp_path, [values.record()])
    (file.parent / "copy.jsonl").write_bytes(file.read_bytes())
    with pytest.raises(StoreError, match="both have matmul"):
        text_files.read_records(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"nonsense\n"])
def test_a_damaged_file_of_records_is_named(tmp_path, content):
    [file] = text_files.add_records(tmp_path, [values.record()])
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"matmul\.jsonl"):
        text_files.read_records(tmp_path)


def test_records_that_two_branches_add_merge_by_the_line(tmp_path):
    base, *sides = (tmp_path / name for name in ("base", "ours", "theirs"))
    keys = [Key("matmul", "chip", f'{{"m":{m}}}') for m in range(4)]
    text_files.add_records(base, [values.record(keys[0])])
    for side, key in zip(sides, keys[1:3], strict=True):
        text_files.add_records(side, [values.record(keys[0]), values.record(key)])
    files = [str(side / "chip" / "matmul.jsonl") for side in (sides[0], base, sides[1])]
    merged = subprocess.run(["git", "merge-file", "-p", "--union", *files], capture_output=True, text=True, check=True)
    assert text_files.import_text(merged.stdout) == [values.record(key) for key in keys[:3]]
