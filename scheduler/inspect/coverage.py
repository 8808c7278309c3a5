"""What there is for each chip of the table: Pallas kernels, records that were measured or estimated, or XLA alone."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from scheduler.core.hardware import TABLE, Hardware
from scheduler.core.records import Keyed, preferred
from scheduler.inspect.example import EXTENT, example
from search_spaces import OPERATIONS, load
from search_spaces.jax_compat import NEEDS_JAX


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Of one chip.

    Attributes:
      kernels: backend -> the operations that have a Pallas kernel of it for this chip.
      verified: of these backends, those that answer there without a record.
      measured, estimated: how many problems have such a record.
      outdated: why kernels for this chip are not for the JAX that is here, where a newer one has them.
      compiled: its compiler runs on hosts without it, and estimates times (with the extra `tpu`).
    """

    hardware: Hardware
    kernels: Mapping[str, tuple[str, ...]]
    verified: frozenset[str]
    measured: int
    estimated: int
    compiled: bool
    outdated: tuple[str, ...] = ()

    @property
    def kernels_text(self) -> str:
        """The backends, in words."""
        return ", ".join(f"`{name}` ({len(of)} operation{'s' * (len(of) > 1)})" for name, of in self.kernels.items())

    @property
    def records_text(self) -> str:
        """How many there are of which kind; "" where there is none."""
        counts = {"measured": self.measured, "estimated": self.estimated}
        return ", ".join(f"{count} {how}" for how, count in counts.items() if count)

    @property
    def unasked_text(self) -> str:
        """What answers a call whose problem no record has."""
        if not self.kernels:
            return "XLA"
        return "the model's choice" if self.verified else "XLA"

    def __str__(self) -> str:
        if not self.kernels:
            return "; ".join(["XLA alone", *([self.records_text] if self.records_text else []), *self.outdated])
        return f"{self.kernels_text}; {self.records_text or 'no record'}; without a record, {self.unasked_text} answers"


def coverage(records: Iterable[Keyed]) -> list[Coverage]:
    """Of each chip of the table, a row; of a problem that several of `records` are of, one counts.

    Kernels are those of the operations that come with this package, asked about one problem each of no special kind.
    """
    counts: collections.Counter[tuple[str, bool]] = collections.Counter(
        (record.key.hardware, record.estimated) for record in preferred(records).values()
    )
    found = []
    for hardware in TABLE:
        kernels: dict[str, list[str]] = {}
        verified: set[str] = set()
        outdated: dict[str, None] = {}
        for name in OPERATIONS:
            operation = load(name)
            problem = example(operation, EXTENT)
            for kernel in operation.kernels if problem is not None else ():
                if kernel.library or kernel.vendor:
                    continue
                reason = kernel.supports(problem, hardware.target)
                if reason is not None and reason.startswith(NEEDS_JAX):
                    outdated[f"a kernel {reason}"] = None
                if reason is None:
                    kernels.setdefault(kernel.backend, []).append(name)
                    verified |= {kernel.backend} if hardware.architecture in kernel.verified_on else set()
        found.append(
            Coverage(
                hardware,
                {backend: tuple(names) for backend, names in kernels.items()},
                frozenset(verified),
                counts[hardware.id, False],
                counts[hardware.id, True],
                bool(hardware.topology) and hardware.static_cycles,
                tuple(outdated),
            )
        )
    return found
