"""Describes an exception of a candidate: its type, its message, and its location in the kernel source."""

from __future__ import annotations

import os

from scheduler.core.frames import calls


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if the message is empty."""
    try:
        text = str(error).strip()
    except BaseException:  # `__str__` of a user-defined exception may raise anything
        text = ""
    return (text or type(error).__name__).splitlines()[0][:300]


def blamed(error: BaseException) -> str:
    """Describes an exception of a candidate in one line: its type, message, and location in the kernel source."""
    name, said = type(error).__name__, first_line(error)
    place = _place(error)
    return (name if said == name else f"{name}: {said}") + (f" ({place})" if place else "")


def _place(error: BaseException | None) -> str:
    """Returns ``file:line`` of the innermost call in a kernel; "" if there is none."""
    asked: list[BaseException] = []
    while error is not None and not any(error is other for other in asked):  # causes may form a cycle
        for call in calls(error):
            if call.owner != "scheduler":
                return f"{_from_here(call.file)}:{call.line}"
        asked.append(error)
        # JAX gives the location of an error in lowering in a separate exception (`JaxStackTraceBeforeTransformation`).
        error = error.__cause__ or error.__context__
    return ""


def _from_here(file: str) -> str:
    try:
        below = os.path.relpath(file)
    except OSError:  # the working directory was removed
        return file
    return file if below.startswith(os.pardir) else below
