"""What is said of an exception that a candidate raised: its type, its words, and where in the kernel's source."""

from __future__ import annotations

import os

from scheduler.core.frames import calls


def first_line(error: BaseException) -> str:
    """What an exception says first, its type where it says nothing."""
    try:
        text = str(error).strip()
    except BaseException:  # an exception of a kernel's author may fail to say itself, in whatever way
        text = ""
    return (text or type(error).__name__).splitlines()[0][:300]


def blamed(error: BaseException) -> str:
    """What a candidate raised, in a line: its type, what it says first, and where in the kernel's source that was."""
    name, said = type(error).__name__, first_line(error)
    place = _place(error)
    return (name if said == name else f"{name}: {said}") + (f" ({place})" if place else "")


def _place(error: BaseException | None) -> str:
    """``file:line`` of the innermost call of a kernel; "" where there is none."""
    asked: list[BaseException] = []
    while error is not None and not any(error is other for other in asked):  # a cause may lead back to itself
        for call in calls(error):
            if call.owner != "scheduler":
                return f"{_from_here(call.file)}:{call.line}"
        asked.append(error)
        # Of what it lowers JAX tells the place in an exception of its own (`JaxStackTraceBeforeTransformation`).
        error = error.__cause__ or error.__context__
    return ""


def _from_here(file: str) -> str:
    try:
        below = os.path.relpath(file)
    except OSError:  # the working directory is gone
        return file
    return file if below.startswith(os.pardir) else below
