"""How much Python a call runs: what a clock would tell on an idle machine, and the same number on a busy one."""

import sys


def bytecodes(call):
    """How many bytecode instructions `call()` takes in this thread, with all that it calls.

    Whatever NumPy does to thousands of schedules at once is one of them; a loop over schedules is thousands.
    """
    count, before, here = 0, sys.gettrace(), sys._getframe()

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    here.f_trace_opcodes = (
        True  # Python 3.12 counts instructions only where a frame asks for them before tracing starts
    )
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        here.f_trace_opcodes = False
    return count
