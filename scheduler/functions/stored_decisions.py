"""Stores the decisions of `optimize`, so that later processes neither compare nor time the same function again."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from scheduler.core import hardware
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.several_processes import digest_of_code
from scheduler.functions.ablation import Lowered
from scheduler.functions.decided import Decided
from scheduler.functions.interleaved import Seconds


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored decision.

    Attributes:
      tuned_text: Digest of the lowered version with kernels. It differs for other kernels or schedules.
      refused: The keys of replacements that are not made in this version -> the reason.
      groups: As in `Decided`.
      kept, reason, date: The version that is used, why, and when it was decided.
      measured: "plain" and "tuned" -> the `Seconds`; "plain_bytes" and "tuned_bytes" -> peak memory;
        "plain_exchanged" and "tuned_exchanged" -> bytes of collectives.
    """

    tuned_text: str
    refused: Mapping[str, str]
    groups: tuple[str, ...]
    kept: str
    reason: str
    date: str
    measured: Mapping[str, Any]


def digest(*texts: str) -> str:
    joined = hashlib.sha256()
    for text in texts:
        joined.update(f"{len(text)} {text}".encode())
    return joined.hexdigest()


def key_of(lowered: Any, options: Iterable[Options], devices: Sequence[jax.Device], *others: object) -> str | None:
    """Returns the key of a decision: what the function computes, and all else on which its time or results depend.

    None stands for a function under a plan, which decides in place of the store.

    Args:
      lowered: The plain function (`jax.stages.Lowered`), whose text has the shapes, shardings and donations.
      options: The options of its calls.
    """
    selected = []
    for each in options:
        if each.plan is not None:
            return None
        selected.append((each.on_miss, sorted(each.backends or ()), each.target, each.loss_per_gain))
    chips = [hardware.detect(device).id for device in devices]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    return digest(lowered.as_text(), repr((selected, chips, flags, others)), _code())


def find(key: str) -> Stored | None:
    """Returns the stored decision; None if there is none, or one of another form."""
    text = dispatch.user_cache().decision(key)
    try:
        found = Stored(**json.loads(text or ""))
        times = {name: Seconds(tuple(found.measured[name])) for name in ("plain", "tuned") if found.measured.get(name)}
        return dataclasses.replace(found, groups=tuple(found.groups), measured={**found.measured, **times})
    except (TypeError, ValueError):
        return None


def put(key: str, lowered: Lowered, decision: Decided) -> None:
    """Stores a decision about a lowered version. A store that cannot be written is a warning."""
    names = [f"{version}{what}" for version in ("plain", "tuned") for what in ("", "_bytes", "_exchanged")]
    measured = {name: x for name in names if (x := getattr(decision, name)) is not None}
    stored = Stored(
        digest(lowered.lowered.as_text()),
        lowered.refused,
        decision.groups,
        decision.kept,
        decision.reason,
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        {name: x.samples_s if isinstance(x, Seconds) else x for name, x in measured.items()},
    )
    dispatch.user_cache().put_decision(key, json.dumps(dataclasses.asdict(stored)))


@functools.cache
def _code() -> str:
    return digest_of_code() + importlib.metadata.version("jaxlib")
