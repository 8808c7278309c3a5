"""How good the model's choice is and how soon a search finds the best, judged on recorded sweeps: no device is needed.

Each recording is a shape whose whole space was measured. The model ranks it by its default constants, which no shape is
fitted to, and everything is compared with the fastest schedule that was recorded. Searches see recorded samples
drawn with replacement, a seed for each; after so many trials, the four fastest race, as the finalists of `tune` do: the
race is won by the one that the recording's first pass shows fastest. Where a recording has a second pass, which chose
nothing, times are those of that pass; where it has none, they are those of the only pass, which flatters whoever
chose by it.

The search is also given wrong models: upside down, and shuffled. Rivals: schedules drawn at random; Optuna's TPE,
CMA-ES and, where PyTorch is installed, GP, which know no model, and whose proposals become the nearest legal schedule
that was not tried; the model's ranking alone; and nvMatmulHeuristics where it is installed (nearest schedule of the
space; where several are equally near, their median time).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import RESULTS, ROOT, environment, write_result
from optuna.samplers import BaseSampler
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.records import Measurement, Sweep, Trial, point_of
from scheduler.measure import replay
from scheduler.model.calibration import Observed, observed
from scheduler.model.cost import Constants, CostModel
from scheduler.search.search import Search
from scheduler.search.task import SAMPLERS, sampler_of
from search_spaces import load
from search_spaces.kernel import Kernel

Array = npt.NDArray[np.float64]
Curve = list[int]  # whom a search would choose after each of its trials

SEEDS, TRIALS, FINALISTS = 30, 64, 4
STOPS = (4, 8, 16, 32, 64)
KEPT = 0.2
# Samplers of Optuna, with the most searches of each shape: those of GP take minutes.
RIVALS = {"tpe": 10, "cmaes": 10, "gp": 1}
# What the model would say without a term.
ABLATIONS: Mapping[str, Constants] = {
    "as it is": Constants(),
    "TMA rows are as fast as their bytes": Constants(tma_row_s=0.0),
    "out-of-bounds fill stops nothing": Constants(fill_row_s=0.0),
    "misaligned sectors are as fast as others": Constants(sector_misalignment=0.0),
    "clusters wait for nobody": Constants(cluster_sync_s=0.0),
    "no wgmma bubble": Constants(wgmma_bubble_s=0.0),
    "stages cost nothing to set up": Constants(stage_s=0.0),
    "steps cost nothing of their own": Constants(step_s=0.0),
    "power is no limit": Constants(e_power=1.0),
    "all of device memory's bandwidth": Constants(e_hbm=1.0),
    "empty launches as long as the chip's": Constants(launch_share=1.0),
}
# Wrong models that a search must overcome: the order of the model reversed, and its predictions dealt out at random.
WRONG: Mapping[str, Callable[[Array, int], Array]] = {
    "upside down": lambda predicted, seed: predicted.min() * predicted.max() / predicted,
    "shuffled": lambda predicted, seed: np.random.default_rng(seed).permutation(predicted),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recorded schedule as a search sees it."""

    backend: str
    schedule: Mapping[str, Any]
    predicted_s: float
    floor_s: float


@dataclasses.dataclass(frozen=True)
class Shape:
    """One recorded sweep.

    Attributes:
      seen: what the first pass measured, in the order of `trials`.
      judged_s: the time by which each schedule is judged: of the second pass where there is one.
      second_pass: how many schedules have such a time.
    """

    sweep: Sweep
    hardware: Hardware
    kernel: Kernel[Any, Any]
    trials: Sequence[Trial]
    seen: Observed
    judged_s: Array
    second_pass: int

    @property
    def name(self) -> str:
        return str(self.seen.problem)

    @functools.cached_property
    def schedules(self) -> list[dict[str, Any]]:
        """With every field of today's kernel."""
        assert self.seen.schedules is not None
        return [self.seen.schedules.row(index) for index in range(len(self.trials))]

    @functools.cached_property
    def samples(self) -> list[tuple[float, ...]]:
        return [trial.outcome.samples_s for trial in self.trials if isinstance(trial.outcome, Measurement)]

    def share(self, index: int) -> float:
        """How near a schedule comes to the best: 1 is the best."""
        return float(self.judged_s.min() / self.judged_s[index])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", type=Path, help="recordings of one chip  [default: sweeps/nvidia-h200]")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="searches of each shape and strategy")
    options = parser.parse_args(arguments)
    paths = options.sweeps or sorted((ROOT / "sweeps" / "nvidia-h200").glob("matmul-*.jsonl.gz"))
    shapes = [shape for path in paths for shape in read(path)]
    if not shapes:
        raise SystemExit(
            "no recording of today's kernels to judge by: on the chip, "
            "tile-scheduler sweep --job sweeps/matmul.toml --out sweeps/nvidia-h200"
        )
    operation = load(shapes[0].sweep.operation)

    rows, curves = [], {}
    for shape in shapes:
        row, found = judge(shape, options.seeds)
        rows.append(row)
        curves[shape.name] = found
        print(f"{shape.name}: first {row['first_choice']:.3f}, after 16 {row['search']['search']['16']['median']:.3f}")
    summary = summarise(rows)
    show(rows, summary)
    newest = max((shape.sweep.environment for shape in shapes), key=lambda environment: environment.date)
    path = write_result(
        "search_quality",
        shapes[0].hardware,
        summary=summary,
        rows=rows,
        environment=environment(newest, operation),
    )
    draw(curves, path.with_suffix(".svg"))


def read(path: Path) -> Iterator[Shape]:
    """The recording's schedules of each kernel beside the library's, as far as they ran."""
    sweep, trials = replay.read(path)
    again = {point_of(t.backend, t.schedule): t.outcome for t in replay.read_again(path)}
    operation = load(sweep.operation)
    problem = operation.problem.from_canonical(sweep.problem)
    chip = chips.swept(sweep)
    for kernel in operation.kernels:
        ran = [t for t in trials if t.backend == kernel.backend and isinstance(t.outcome, Measurement)]
        if kernel.library or not ran:
            continue
        if old := {t.version for t in ran} - {kernel.version}:
            words = ", ".join(map(str, sorted(old)))
            print(
                f"{path.name}: left out, recorded with version {words} of {kernel.backend}, today's is {kernel.version}"
            )
            continue
        seen = observed(kernel, problem, chip, ran)
        if seen is None or len(seen.seconds) < len(ran):
            lost = len(ran) - (0 if seen is None else len(seen.seconds))
            print(f"{path.name}: left out, {lost} of its schedules are no points of today's space, or of another clock")
            continue
        judged = seen.seconds.copy()
        timed = 0
        for index, trial in enumerate(ran):
            outcome = again.get(point_of(trial.backend, trial.schedule))
            if isinstance(outcome, Measurement):
                judged[index] = outcome.median_s
                timed += 1
        yield Shape(sweep, chip, kernel, ran, seen, judged, timed)


def judge(shape: Shape, seeds: int) -> tuple[dict[str, Any], dict[str, list[Curve]]]:
    """A row of results, and what each search would choose after each trial."""
    footprint = shape.kernel.footprint(shape.seen.problem, shape.seen.schedules, shape.hardware.target)
    model = CostModel(shape.hardware, Constants())
    predicted, floor = model.seconds(footprint), model.floor(footprint)
    ranked = np.argsort(predicted, kind="stable")
    measured = shape.seen.seconds
    strategies: dict[str, Callable[[int], list[int]]] = {
        "search": lambda seed: searched(shape, predicted, floor, seed),
        **{
            f"search, model {name}": lambda seed, wrong=wrong: searched(shape, wrong(predicted, seed), floor, seed)
            for name, wrong in WRONG.items()
        },
        "model alone": lambda seed: ranked[:TRIALS].tolist(),
        "random": lambda seed: random.Random(seed).sample(range(len(measured)), min(TRIALS, len(measured))),
        **{
            f"Optuna {name}": lambda seed, name=name: proposed(shape, name, seed)
            for name in RIVALS
            if importlib.util.find_spec(SAMPLERS[name][1]) is not None
        },
    }
    most = {f"Optuna {name}": count for name, count in RIVALS.items()}
    curves = {
        name: [chosen_after(shape, asked(seed), seed) for seed in range(min(seeds, most.get(name, seeds)))]
        for name, asked in strategies.items()
    }
    picks = heuristics(shape)
    best = int(np.argmin(measured))
    row = {
        "problem": shape.name,
        "schedules": len(measured),
        "within_2_percent": int((shape.judged_s <= 1.02 * shape.judged_s.min()).sum()),
        "best_us": float(shape.judged_s.min() * 1e6),
        "second_pass": shape.second_pass,
        # What a chooser that knew the first pass would score in the second; without one, what a chooser that knew the
        # first three samples would score by the others.
        "noise_ceiling": shape.share(best) if shape.second_pass else split_ceiling(shape),
        "first_choice": shape.share(int(ranked[0])),
        **{f"model_first_{k}": shape.share(least(shape, ranked[:k])) for k in (4, 8, 16)},
        "prune20": shape.share(least(shape, ranked[: kept(ranked)])),
        "rank_of_best": int(np.flatnonzero(ranked == best)[0]) + 1,
        **taus(predicted, measured),
        "median_error": float(np.median(np.abs(np.log(predicted / measured)))),
        "bound_excludes": float((floor > measured.min()).mean()),
        "nvmatmulheuristics": None if picks is None else {str(k): max(picks[:k], default=0.0) for k in (1, 8, 16)},
        "search": {
            name: {str(k): spread([shape.share(curve[min(k, len(curve)) - 1]) for curve in found]) for k in STOPS}
            for name, found in curves.items()
        },
        "ablations": {},
    }
    for name, constants in ABLATIONS.items():
        times = CostModel(shape.hardware, constants).seconds(footprint)
        order = np.argsort(times, kind="stable")
        row["ablations"][name] = {
            "first_choice": shape.share(int(order[0])),
            "model_first_16": shape.share(least(shape, order[:16])),
            "prune20": shape.share(least(shape, order[: kept(order)])),
            "tau": taus(times, measured)["tau"],
        }
    return row, {name: [[shape.share(index) for index in curve] for curve in found] for name, found in curves.items()}


def kept(ranked: Array) -> int:
    """How many of a ranking are its best `KEPT`."""
    return max(1, int(np.ceil(KEPT * len(ranked))))


def searched(shape: Shape, predicted: Array, floor: Array, seed: int, sampler: BaseSampler | None = None) -> list[int]:
    """The schedules that the search of this package asks for, given a model that predicts so."""
    candidates = [
        Candidate(shape.kernel.backend, schedule, float(p), float(f))
        for schedule, p, f in zip(shape.schedules, predicted, floor, strict=True)
    ]
    search = Search(candidates, budget=TRIALS, seed=seed, sampler=sampler)
    draw, asked = random.Random(seed), []
    while (index := search.ask()) is not None:
        asked.append(index)
        search.tell(index, resampled(shape, index, draw))
    return asked


def proposed(shape: Shape, name: str, seed: int) -> list[int]:
    """The schedules that a sampler of Optuna asks for: its proposals become the nearest legal schedule, untried."""
    nothing = np.ones(len(shape.trials))  # the sampler knows no model
    return searched(shape, nothing, np.zeros_like(nothing), seed, sampler=sampler_of(name, seed))


def chosen_after(shape: Shape, asked: Sequence[int], seed: int) -> Curve:
    """Whom the race of the four fastest would choose after each trial."""
    draw, told, curve = random.Random(f"{seed} race"), [], []
    for index in asked:
        told.append((resampled(shape, index, draw), index))
        curve.append(least(shape, [index for _, index in sorted(told)[:FINALISTS]]))
    return curve


def least(shape: Shape, indices: Any) -> int:
    """The one of these that the first pass shows fastest."""
    return int(min(indices, key=lambda index: shape.seen.seconds[index]))


def resampled(shape: Shape, index: int, draw: random.Random) -> float:
    samples = shape.samples[index]
    return statistics.median(draw.choices(samples, k=len(samples)))


def taus(predicted: Array, measured: Array) -> dict[str, float]:
    """Kendall's tau-b over all schedules, and within the fastest tenth."""
    tenth = np.argsort(measured, kind="stable")[: max(3, len(measured) // 10)]
    return {
        "tau": float(kendalltau(predicted, measured).statistic),
        "tau_best_tenth": float(np.nan_to_num(kendalltau(predicted[tenth], measured[tenth]).statistic)),
    }


def split_ceiling(shape: Shape) -> float:
    """What knowing the first three samples of each schedule would score by its other samples."""
    chosen = min(range(len(shape.samples)), key=lambda i: statistics.median(shape.samples[i][:3]))
    rest = [statistics.median(samples[3:] or samples) for samples in shape.samples]
    return min(rest) / rest[chosen]


def heuristics(shape: Shape) -> list[float] | None:
    """The shares of nvMatmulHeuristics' picks in its order, or None where it is not installed or knows no such chip."""
    fields = json.loads(shape.sweep.problem)
    if shape.sweep.kind != "NVIDIA H200" or fields.keys() != {"m", "n", "k"}:
        return None
    # In a process of its own: its library may end the one that loads it.
    ran = subprocess.run([sys.executable, "-c", _ASK, json.dumps(fields)], capture_output=True, text=True, check=False)
    line = next((line for line in ran.stdout.splitlines() if line.startswith("[")), None)
    if line is None:
        return None
    shares = []
    for pick in json.loads(line):
        far = [distance(pick, schedule) for schedule in shape.schedules]
        near = [shape.judged_s[i] for i, value in enumerate(far) if value <= min(far) + 1e-9]
        shares.append(float(shape.judged_s.min() / statistics.median(near)))
    return shares


def distance(pick: Mapping[str, int], schedule: Mapping[str, Any]) -> float:
    """How far a pick is from a schedule: doublings of the tile, then of the depth, then the cluster."""
    tile = sum(abs(np.log2(pick[name] / schedule[name])) for name in ("tile_m", "tile_n"))
    depth = abs(np.log2(pick["tile_k"] / schedule["tile_k"])) + abs(np.log2(pick["stages"] / schedule["stages"]))
    cluster = "m" if pick["cluster_m"] > 1 else "n" if pick["cluster_n"] > 1 else "none"
    return float(tile + 0.25 * depth + 0.25 * (cluster != schedule["cluster"]))


_ASK = """
import json, sys
from nvMatmulHeuristics import nvMatmulHeuristics as nv
fields = json.loads(sys.argv[1])
asked = nv.NvMatmulHeuristicsInterface(nv.NvMatmulHeuristicsTarget.CUTLASS3, "HSH")
chip = asked.createHardwareDescriptor()
asked.setHardwarePredefinedGpu(chip, nv.NvMatmulHeuristicsNvidiaGpu.H200_SXM)
layout = nv.NvMatmulHeuristicsMatmulLayout.NN_ROW_MAJOR
asked.loadInternalDiscoverySet(layout, chip)
picks = asked.get_with_mnk(fields["m"], fields["n"], fields["k"], layout, 16, chip)
picks.sort(key=lambda pick: float(pick["runtime"]))
print(json.dumps([
    {"tile_m": k.cta_tile_m, "tile_n": k.cta_tile_n, "tile_k": k.cta_tile_k, "stages": k.stages,
     "cluster_m": k.cluster_m, "cluster_n": k.cluster_n}
    for k in (pick["kernel"] for pick in picks)
]), flush=True)
"""


def spread(shares: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(shares), "worst": min(shares)}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that matter: over shapes, of each shape's median over seeds."""

    def after(trials: int, search: str = "search") -> list[float]:
        return [row["search"][search][str(trials)]["median"] for row in rows]

    first = [row["first_choice"] for row in rows]
    return {
        "first_choice_median": statistics.median(first),
        "first_choice_worst": min(first),
        **{
            f"{name.removeprefix('Optuna ')}_after{trials}_{what}": of(after(trials, name))
            for name in rows[0]["search"]
            if name.startswith("Optuna ")
            for trials in (16, 64)
            for what, of in (("median", statistics.median), ("worst", min))
        },
        "after8_median": statistics.median(after(8)),
        "after16_median": statistics.median(after(16)),
        "after16_worst": min(after(16)),
        "after32_worst": min(after(32)),
        "after64_worst": min(after(64)),
        **{
            f"{name.replace(' ', '_')}_after32_{what}": of(after(32, f"search, model {name}"))
            for name in WRONG
            for what, of in (("median", statistics.median), ("worst", min))
        },
        "prune20_worst": min(row["prune20"] for row in rows),
        "tau_median": statistics.median(row["tau"] for row in rows),
        "noise_ceiling_worst": min(row["noise_ceiling"] for row in rows),
        "shapes": len(rows),
        "shapes_with_second_pass": sum(row["second_pass"] > 0 for row in rows),
    }


def show(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Three tables: the model, the searches, and what each term is worth."""
    console = Console(width=150)
    model = Table(title="the model: share of the best")
    for column in (
        "problem",
        "schedules",
        "in 2 %",
        "ceiling",
        "first",
        "of 8",
        "best 20 %",
        "rank",
        "tau",
        "tau 10 %",
    ):
        model.add_column(column, justify="left" if column == "problem" else "right")
    model.add_column("error", justify="right")
    for row in rows:
        shares = (row[name] for name in ("noise_ceiling", "first_choice", "model_first_8", "prune20"))
        model.add_row(
            row["problem"] + ("" if row["second_pass"] else " (one pass)"),
            str(row["schedules"]),
            str(row["within_2_percent"]),
            *(f"{share:.3f}" for share in shares),
            str(row["rank_of_best"]),
            f"{row['tau']:.2f}",
            f"{row['tau_best_tenth']:.2f}",
            f"{row['median_error']:.1%}",
        )
    console.print(model)
    searches = Table(title="after so many trials: median of the seeds (worst seed)")
    searches.add_column("problem")
    names = [(name, k) for name in rows[0]["search"] for k in STOPS]
    for name, k in names:
        searches.add_column(f"{name} {k}", justify="right")
    searches.add_column("nvMMH 1 / 8", justify="right")
    for row in rows:
        picks = row["nvmatmulheuristics"]
        cells = [row["search"][name][str(k)] for name, k in names]
        said = "" if picks is None else f"{picks['1']:.2f} / {picks['8']:.2f}"
        searches.add_row(row["problem"], *(f"{c['median']:.3f} ({c['worst']:.2f})" for c in cells), said)
    console.print(searches)
    terms = Table(title="what each term is worth: median / worst of the shapes")
    terms.add_column("")
    terms.add_column("first choice", justify="right")
    terms.add_column("of 16", justify="right")
    terms.add_column("best 20 %", justify="right")
    terms.add_column("tau", justify="right")
    for name in ABLATIONS:
        found = [row["ablations"][name] for row in rows]
        first, sixteen = ([one[what] for one in found] for what in ("first_choice", "model_first_16"))
        terms.add_row(
            name,
            f"{statistics.median(first):.3f} / {min(first):.3f}",
            f"{statistics.median(sixteen):.3f} / {min(sixteen):.3f}",
            f"{min(one['prune20'] for one in found):.3f}",
            f"{statistics.median(one['tau'] for one in found):.2f}",
        )
    console.print(terms)
    console.print(dict(summary))


def draw(curves: Mapping[str, Mapping[str, list[list[float]]]], path: Path) -> None:
    """Best so far against trials: the median shape of each strategy, and its worst shape, by the median seed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "search_quality"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for color, strategy in zip(
        ("C0", "C1", "C4", "C2", "C7", "C3", "C5", "C6"), next(iter(curves.values())), strict=False
    ):
        shapes = np.array([np.median([padded(c) for c in found[strategy]], axis=0) for found in curves.values()])
        trials = np.arange(1, TRIALS + 1)
        axes.plot(trials, np.median(shapes, axis=0), color=color, label=f"{strategy}: median shape")
        axes.plot(trials, shapes.min(axis=0), color=color, linestyle=":", label=f"{strategy}: worst shape")
    axes.set(xlabel="trials", ylabel="share of the exhaustive best", xlim=(1, TRIALS), ylim=(0.7, 1.005))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path.relative_to(RESULTS.parents[1])}")


def padded(curve: Sequence[float]) -> list[float]:
    """A search that ended early keeps what it had."""
    return [*curve, *[curve[-1]] * (TRIALS - len(curve))]


if __name__ == "__main__":
    main()
