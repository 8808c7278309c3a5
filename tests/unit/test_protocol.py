"""Messages between a pool and its workers: what is said is what is heard, on one line each."""

import re

import pytest

from scheduler.core.records import Failure, Measurement
from scheduler.measure import protocol
from scheduler.measure.conversation import reply_of
from scheduler.measure.protocol import Caution, decode, encode
from search_spaces.target import Target

MESSAGES = [
    protocol.Init("GPU-1", "cuda"),
    protocol.Ready(Target("cuda", "NVIDIA H200", "sm_90", 132)),
    protocol.InitFailed("no device\nat all"),
    protocol.Request("measure", "m:OP", '{"n":8}', "xla", {}, 10, "cold", None, False),
    protocol.Request("again", "m:OP", "{}", "mosaic_gpu", {"m": 1, "swap": True, "by": "n"}, 3, "warm", 1e-6, True),
    protocol.Request("measure", "m:OP", "{}", "mosaic_gpu", {"tiles": (64, (8, 16))}, 3, "warm", None, True),
    protocol.StepStarted("compile"),
    protocol.Answer(None),
    protocol.Answer(Measurement(0.1 + 0.2, (0.1, 1e-9), "cupti", "cold")),
    protocol.Answer(Failure("memory", 'all "gone"'), retryable=True, fatal="no memory"),
    protocol.Answer(Caution("differs for infinities")),
    protocol.Raised("it", "Traceback:\n  ..."),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_line(message):
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    heard = decode(line)
    assert heard == message
    assert type(heard) is type(message)
    if isinstance(message, protocol.Request):
        assert {name: type(value) for name, value in heard.schedule.items()} == {
            name: type(value) for name, value in message.schedule.items()
        }


def test_every_message_is_among_those():
    assert {type(message) for message in MESSAGES} == set(protocol.Message.__args__)


def test_what_is_no_message_is_refused():
    lines = ['{"$type": "Rumour"}', '{"$type": "StepStarted", "loud": true}', '{"$type": "Answer", "outcome": 7}']
    for line in [*lines, "7", "hello", "", "[" * 100_000]:
        with pytest.raises(ValueError, match="no message"):
            decode(line)


def test_an_error_in_a_declared_function_costs_its_candidate_and_no_process():
    def answer():
        raise ValueError("these inputs cannot be drawn")

    reply = reply_of(answer, raising=False)
    assert (reply.outcome.stage, reply.retryable, reply.fatal) == ("worker", False, "")
    assert re.fullmatch(
        r"ValueError: these inputs cannot be drawn \(tests/unit/test_protocol.py:\d+\)", reply.outcome.detail
    )
    assert "Traceback" in reply_of(answer, raising=True).trace
