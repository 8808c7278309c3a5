"""Stores the decisions of `optimize`, so that later processes neither compare nor time the same function again."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from scheduler.core import hardware
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.several_processes import digest_of_code
from scheduler.dispatch.stored import Times
from scheduler.rewriting.decided import Decided
from scheduler.rewriting.in_place import FAILED
from scheduler.rewriting.interleaved import Seconds
from scheduler.rewriting.lowering import Lowered, Replaced
from search_spaces import load, load_known, lowering_compat
from search_spaces.space import as_choice

# Longer programs are not stored: they hold large constants, and are lowered again.
MOST_BYTES = 2**25


@dataclasses.dataclass(frozen=True)
class StoredDecision:
    """A stored decision.

    Attributes:
      kept, reason, date: The version that is used, why, and when it was decided.
      module: The program of the tuned version as base64 of compressed bytes; "" if it must be lowered again.
      refused: The keys of replacements that are not made in this version -> the reason.
      shown: As in `Decided`: "replaced", "dropped", "left", "changes", "groups" and what was measured.
    """

    kept: str
    reason: str
    date: str
    module: str
    refused: Mapping[str, str]
    shown: Mapping[str, Any]

    def load_kernels(self) -> None:
        """Imports the kernels, and with them the libraries that their compiled programs call."""
        for each in self.shown["replaced"]:
            load_known(each.operation).kernel(each.backend)

    def program(self) -> bytes:
        return zlib.decompress(base64.b64decode(self.module))


def key_of(lowered: Any, options: Iterable[Options], devices: Sequence[jax.Device], *others: object) -> str:
    """Returns the key of a decision: what the function computes, and all else on which its time or results depend.

    Args:
      lowered: The plain function (`jax.stages.Lowered`); its text has the shapes, shardings and donations.
      options: The options of its calls.
    """
    selected = [(each.on_miss, sorted(each.backends or ()), each.target, each.loss_per_gain) for each in options]
    chips = [hardware.detect(device).id for device in devices]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    records = dispatch.user_cache().ask(lambda store: store.state())  # of which the kernels are selected
    compiler_options = lowering_compat.compiler_options(lowered)
    rest = repr((selected, chips, flags, compiler_options, records, others, _code()))
    return hashlib.sha256(lowering_compat.program_bytes(lowered) + rest.encode()).hexdigest()


def find(key: str) -> StoredDecision | None:
    """Returns the stored decision; None if there is none, or one that was changed since."""
    digest, _, text = (dispatch.user_cache().decision(key) or "").partition(" ")
    if digest != _digest(key, text):
        return None
    found = StoredDecision(**json.loads(text))
    shown = dict(found.shown)
    shown |= {name: Seconds(tuple(shown[name])) for name in ("plain", "tuned") if shown.get(name)}
    shown |= {name: tuple(shown[name]) for name in ("changes", "groups")}
    try:
        shown |= {name: tuple(map(_replaced, shown[name])) for name in ("replaced", "dropped")}
    except ValueError:  # an operation that is code, which text must not run
        return None
    return dataclasses.replace(found, shown=shown)


def put(key: str, lowered: Lowered, plain: Any, decision: Decided) -> None:
    """Stores a decision about a lowered version. A store that cannot be written is a warning.

    Nothing is stored about kernels from elsewhere, because the key does not contain their code. Nothing is stored if a
    kernel failed: memory may have been short.
    """
    if any(reason.startswith(FAILED) for reason in lowered.refused.values()):
        return
    kernels = [load(each.operation).kernel(each.backend) for each in lowered.replaced]
    if any(not type(kernel).__module__.startswith("search_spaces.") for kernel in kernels):
        return
    module = lowering_compat.module_bytes(lowered.lowered, plain) if decision.kept == "tuned" else None
    names = [f"{version}{what}" for version in ("plain", "tuned") for what in ("", "_bytes", "_exchanged")]
    shown = {name: getattr(decision, name) for name in (*names, "left", "changes", "groups")}
    shown |= {name: x.samples_s for name, x in shown.items() if isinstance(x, Seconds)}
    stored = StoredDecision(
        decision.kept,
        decision.reason,
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        base64.b64encode(zlib.compress(module, 1)).decode() if module and len(module) <= MOST_BYTES else "",
        lowered.refused,
        shown | {name: [*map(_replaced_fields, getattr(decision, name))] for name in ("replaced", "dropped")},
    )
    text = json.dumps(dataclasses.asdict(stored))
    dispatch.user_cache().put_decision(key, f"{_digest(key, text)} {text}")


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()


# The fields of `Replaced` that are stored as they are.
_FIELDS = ("operation", "backend", "schedule", "reason", "line", "times", "keys")


def _replaced_fields(replaced: Replaced) -> dict[str, Any]:
    own = {name: getattr(replaced, name) for name in _FIELDS}
    alone = replaced.alone and [replaced.alone.kernel_s, replaced.alone.library_s]
    return {**own, "problem": replaced.problem.canonical(), "alone": alone}


def _replaced(fields: Mapping[str, Any]) -> Replaced:
    problem = load_known(fields["operation"]).problem.from_canonical(fields["problem"])
    own = {name: as_choice(value) for name, value in fields.items()}
    return Replaced(**{**own, "problem": problem, "alone": fields["alone"] and Times(*fields["alone"])})


@functools.cache
def _code() -> str:
    return digest_of_code() + importlib.metadata.version("jaxlib")
