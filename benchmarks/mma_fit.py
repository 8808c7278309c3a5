"""Schedules that the model calls legal, compiled for GPUs that are not here: do they spill, what do they ask for?

``python benchmarks/mma_fit.py matmul "NVIDIA L40S" --count 200`` draws problems and legal schedules of the kernels for
GPUs before Hopper, and writes a line of JSON for each to standard output, then a summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import absent_gpu

# That of GPUs before Hopper.
BACKENDS = {"matmul": "mosaic_gpu_mma"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation")
    parser.add_argument("hardware")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--also", nargs="*", default=[], help="newer chips, for which ptxas compiles the same PTX")
    parser.add_argument(
        "--registers", type=int, default=0, help="only schedules of so many predicted registers or more"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        absent_gpu.prepare(Path(folder))
        rows = []
        for row in measured(
            options.operation,
            options.hardware,
            options.count,
            options.seed,
            options.registers,
            options.also,
            Path(folder),
        ):
            print(json.dumps(row), flush=True)
            rows.append(row)
    print(json.dumps({"summary": summary(rows)}))


def measured(
    operation: str, kind: str, count: int, seed: int, least: int, also: Sequence[str], folder: Path
) -> Iterator[dict[str, Any]]:
    """One row for each of so many legal schedules, of as many drawn problems."""
    from scheduler.core import hardware
    from scheduler.model import pruning
    from search_spaces import load
    from search_spaces.space import Columns

    chip, rng = hardware.find(kind), random.Random(seed)
    kernel = load(operation).kernel(BACKENDS.get(operation, "mosaic_gpu"))
    for number in range(count):
        problem, schedule = legal(operation, kernel, chip, rng, least)
        footprint = kernel.footprint(problem, Columns.of([schedule]), chip.target)
        row = {
            "number": number,
            "problem": json.loads(problem.canonical()),
            "schedule": dataclasses.asdict(schedule),
            "predicted": {
                "onchip_bytes": int(footprint.onchip_bytes[0]),
                "registers": int(_first(footprint.registers)),
            },
        }
        run = lambda *args, p=problem, s=schedule: kernel.run(p, s, chip.target, *args)  # noqa: E731
        try:
            found = absent_gpu.compiled(run, problem.operands(), chip, folder)
        except Exception as error:  # whatever a compiler raises is the finding
            yield row | {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        row |= {"registers": found.registers, "spilled_bytes": found.spilled_bytes, "onchip_bytes": found.onchip_bytes}
        for other in map(hardware.find, also):
            if pruning.illegal(kernel, problem, other, dataclasses.asdict(schedule)) is None:
                registers, spilled = absent_gpu.assembled(found.ptx, other.architecture)
                row[other.architecture] = {"registers": registers, "spilled_bytes": spilled}
        found.ptx.unlink()
        yield row


def legal(operation: str, kernel: Any, chip: Any, rng: random.Random, least: int = 0) -> tuple[Any, Any]:
    """A drawn problem that the kernel supports on this chip, and one of its schedules that fit."""
    from search_spaces import load

    while True:
        problem = load(operation).problem(**_DRAWS[operation](rng))
        if kernel.supports(problem, chip.target):
            continue
        space = kernel.space(problem, chip.target)
        columns, _ = space.legal()
        footprint = kernel.footprint(problem, columns, chip.target)
        fits = (footprint.onchip_bytes <= chip.onchip_bytes) & (footprint.registers <= chip.registers_per_thread)
        fits &= footprint.registers >= least
        if len(places := [int(at) for at in fits.nonzero()[0]]):
            chosen = next(iter(space.schedules(columns.take([rng.choice(places)]))))
            return problem, chosen


def product(rng: random.Random) -> dict[str, Any]:
    """Extents from 1 to 8,192, ragged half of the time; every dtype, layout and epilogue."""

    def extent() -> int:
        size = int(2 ** rng.uniform(0, 13))
        return size if rng.random() < 0.5 else max(16, -(-size // 16) * 16)

    dtype = rng.choice(["bfloat16", "bfloat16", "float16", "int8", "float8_e4m3fn"])
    fields: dict[str, Any] = {"m": extent(), "n": extent(), "k": extent(), "dtype": dtype}
    fields["batch"] = rng.choice([1, 1, 1, 3])
    if dtype in ("bfloat16", "float16"):
        fields |= {"transpose_a": rng.random() < 0.5, "transpose_b": rng.random() < 0.5}
        fields["out_dtype"] = rng.choice(["", "", "float32"])
        added = ["", "", "bfloat16", "float32"]
        fields |= {
            "bias": rng.choice(added),
            "residual": rng.choice(added),
            "activation": rng.choice(["", "", "relu", "gelu", "silu"]),
        }
    else:
        fields |= {"transpose_b": True, "out_dtype": rng.choice(["float32", "bfloat16"])}
    if not fields.get("residual") and fields["n"] > 2 and rng.random() < 0.1:
        first = rng.randrange(1, fields["n"])
        fields["split_sizes"] = f"{first}+{fields['n'] - first}"
    return fields


def row_wise(rng: random.Random) -> dict[str, Any]:
    """Rows of 32 to 32,768 elements, ragged half of the time."""
    columns = int(2 ** rng.uniform(5, 15))
    columns = columns if rng.random() < 0.5 else -(-columns // 64) * 64
    return {"rows": int(2 ** rng.uniform(2, 14)), "columns": columns, "dtype": rng.choice(["bfloat16", "float32"])}


_DRAWS = {"matmul": product} | dict.fromkeys(
    ("softmax", "rms_norm", "add_rms_norm", "silu_and_mul", "silu_and_mul_backward"), row_wise
)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many were refused, spilled, asked for other than was predicted, or took more registers."""
    built = [row for row in rows if "error" not in row]
    others = {name for row in built for name in row if name.startswith("sm_")}
    return {
        "schedules": len(rows),
        "refused": len(rows) - len(built),
        "spilled": sum(row["spilled_bytes"] > 0 for row in built),
        "other_onchip_bytes": sum(row["onchip_bytes"] != row["predicted"]["onchip_bytes"] for row in built),
        "more_registers": sum(row["registers"] > row["predicted"]["registers"] for row in built),
        "most_registers": max((row["registers"] for row in built), default=0),
        **{
            name: {
                "schedules": sum(name in row for row in built),
                "spilled": sum(row[name]["spilled_bytes"] > 0 for row in built if name in row),
            }
            for name in sorted(others)
        },
    }


def _first(value: Any) -> Any:
    return value if getattr(value, "ndim", 0) == 0 else value[0]


if __name__ == "__main__":
    main()
