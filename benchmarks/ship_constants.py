"""Fits the shipped constants of a chip to all that was measured on it: records, library costs and drawn problems.

    python benchmarks/ship_constants.py --kind 'NVIDIA H200'     # then: tile-scheduler build-cache

`tile-scheduler calibrate` fits the records of one operation alone. Here the times of library_costs.py and of
no_search_drawn.py by the seeds 0 and 1 are evidence, too; its other seeds judge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import ROOT, posed, result_file
from rich.console import Console

from scheduler.cli.record_report import calibrations_table
from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.records import Environment, Measurement, Trial
from scheduler.model.calibration import calibrate
from scheduler.search.sweep import Measured, merged_measurements, stored_measurements
from scheduler.store import text_files
from scheduler.store.store import shipped
from search_spaces import Operation, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="NVIDIA H200", help="the chip")
    parser.add_argument("--records", type=Path, default=ROOT / "records", help="where the constants are written")
    options = parser.parse_args()
    hardware, store = chips.find(options.kind), shipped()
    files = (result_file(name, hardware, dirty=False) for name in ("library_costs", "drawn_evidence"))
    results = [json.loads(file.read_text()) for file in files]
    for name in sorted({record.key.operation for record in store.records(hardware=hardware.id)}):
        operation = load(name)
        parts = [measured(operation, hardware, result) for result in results]
        found = merged_measurements([stored_measurements(operation, hardware, store), *parts])
        made = calibrate(operation, hardware, found.trials, found.environments)
        text_files.add_calibrations(options.records, made)
        Console(width=140).print(name, calibrations_table(made))


def measured(operation: Operation[Any], hardware: Hardware, result: Mapping[str, Any]) -> Measured:
    """Returns the times of a result as trials."""
    trials = {}
    for row in result["rows"]:
        if row["operation"] == operation.name:
            text = row["problem"]
            canonical = text.startswith("{")
            problem = operation.problem.from_canonical(text) if canonical else posed(operation.problem, text)
            trials[problem] = list(_trials(operation, row))
    fields = {name: result["environment"][name] for name in ("jax", "jaxlib", "driver", "date")}
    return Measured(hardware, trials, [Environment(**fields)])


def _trials(operation: Operation[Any], row: Mapping[str, Any]) -> Iterator[Trial]:
    backends = {kernel.backend: kernel for kernel in operation.kernels}
    for number, (name, us) in enumerate((row.get("microseconds") or row["us"]).items()):
        candidate = row.get("candidates", {}).get(name, {"backend": name.partition("/")[0], "schedule": {}})
        kernel = backends[candidate["backend"]]
        outcome = Measurement(us * 1e-6, (us * 1e-6,), "cupti", "cold")
        yield Trial(number, kernel.backend, kernel.version, candidate["schedule"], outcome, 0.0)


if __name__ == "__main__":
    main()
