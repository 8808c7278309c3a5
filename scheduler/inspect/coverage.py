"""Lists the support for each known chip: Pallas kernels, measured or estimated records, or XLA only."""

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
    """The support for one chip.

    Attributes:
      kernels: Backend -> the operations that have a Pallas kernel of it for this chip.
      verified: Backends that are used on this chip without a record.
      measured, estimated: Number of problems with a measured or an estimated record.
      compiled: Whether the chip's compiler runs on hosts without the chip and estimates times (with the extra `tpu`).
      outdated: Why kernels for this chip need a newer JAX than the installed one.
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
        """The backends, and the number of operations of each."""
        return ", ".join(f"`{name}` ({len(of)} operation{'s' * (len(of) > 1)})" for name, of in self.kernels.items())

    @property
    def records_text(self) -> str:
        """The number of records of each kind; "" if there are none."""
        counts = {"measured": self.measured, "estimated": self.estimated}
        return ", ".join(f"{count} {how}" for how, count in counts.items() if count)

    @property
    def unasked_text(self) -> str:
        """The fallback for a call without a record."""
        if not self.kernels:
            return "XLA"
        return "the model's choice" if self.verified else "XLA"

    def __str__(self) -> str:
        if not self.kernels:
            return "; ".join(["XLA alone", *([self.records_text] if self.records_text else []), *self.outdated])
        return f"{self.kernels_text}; {self.records_text or 'no record'}; without a record, {self.unasked_text} answers"


def coverage(records: Iterable[Keyed]) -> list[Coverage]:
    """Returns one row for each chip of the table. Several records of the same problem count once.

    Kernels are those of the package's own operations, checked with one typical problem per operation.
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
