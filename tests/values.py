"""A record and a trial that tests start from."""

from scheduler.core.records import Entry, Environment, Key, Measurement, Record, Trial, Verdict

KEY = Key("matmul", "NVIDIA H200 (132 cores, 140 GiB)", '{"dtype":"bfloat16","k":512,"m":256,"n":256}')
ENVIRONMENT = Environment("0.11.2", "0.11.2", "580.95", "2026-03-01T12:00:00Z")
FAST = Measurement(1e-4, (1e-4, 1.1e-4, 0.9e-4), "cupti", "cold")
SLOW = Measurement(2e-4, (2e-4,), "cupti", "cold")
NO_VERDICT = Verdict()
VERDICT = Verdict(8, ("mosaic_gpu {}", "xla {}"), -0.002, 0.004, 0.01, ("one other process was on the device",))
SCHEDULE = {"tile_m": 128, "split": "m", "persistent": True}


def record(key=KEY, measurement=FAST, environment=ENVIRONMENT, confidence=NO_VERDICT):
    entries = (Entry("mosaic_gpu", 3, SCHEDULE, measurement, 1.2e-4), Entry("xla", 1, {}, SLOW, 2.1e-4))
    return Record(
        key, entries, {"mosaic_gpu": 3, "xla": 1}, environment, budget=64, tried=60, space=3000, confidence=confidence
    )


def trial(number=0, outcome=FAST):
    return Trial(number, "mosaic_gpu", 3, SCHEDULE, outcome, 1.2e-4)
