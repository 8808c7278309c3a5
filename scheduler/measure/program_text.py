"""What tells a compiled program from another of the same function: its text, less where it comes from."""

from __future__ import annotations

import contextlib
import hashlib
import re

import jax

# What says from which lines of Python it comes: tables, and what names their rows.
_SOURCE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*|,? ?metadata=\{[^}]*\}", re.MULTILINE
)


def lowered_digest(lowered: jax.stages.Lowered) -> str:
    """Of what JAX has lowered, less where it comes from."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def digest(program: jax.stages.Compiled) -> str:
    """Of the program's text, which names the algorithms that XLA chose; "" where its backend has no text."""
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
        if text := program.as_text():
            return hashlib.sha256(_SOURCE.sub("", text).encode()).hexdigest()
    return ""
