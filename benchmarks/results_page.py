"""Writes docs/results.md, and the figures of the README, from benchmarks/results/ and the shipped records.

    python benchmarks/results_page.py

Needs no device. A test holds both documents to what this program writes.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from harness import RESULTS, ROOT, posed, told
from markdown_page import line, number, percent, spread, table, text
from problems import MATMULS, Product

from scheduler.core import codec, hardware
from scheduler.core.records import Record
from search_spaces import aliases, load
from search_spaces.matmul import MatmulProblem

# Problems that a result lacks.
MOST_NAMED = 8
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
# Whose schedules are compiled for its architecture, and for those that follow.
MMA_CHIPS = {"sm_80": "a100", "sm_86": "a40", "sm_89": "l40s"}
PLACE = re.compile(r"(?<=<!-- by benchmarks/results_page.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
H200 = hardware.find("NVIDIA H200")
Result = Mapping[str, Any]
Row = Mapping[str, Any]

EXAMPLES = {  # operation and problem, as rows name it: in words
    "matmul m=4096 n=4096 k=4096 dtype=bfloat16": "4096 x 4096 x 4096 in bfloat16",
    "matmul m=16 n=8192 k=8192 dtype=bfloat16": "16 x 8192 x 8192",
    "matmul m=1024 n=50257 k=768 dtype=bfloat16 transpose_b=True": "GPT-2's LM head (1024 x 50257 x 768)",
    "softmax rows=2048 columns=32768": "a softmax of 2,048 rows of 32,768",
}
RESIDENCIES = {"registers": "registers", "smem": "SMEM", "pipeline": "pipeline"}
STAGES = {"suspect": "implausible"}  # as older results spell them
# What benchmarks/faults.py calls them.
FAULTS = {
    "wrong": "wrong numbers",
    "nan": "an element left NaN",
    "shifted": "an index map that is off by one",
    "misshapen": "a result of another shape",
    "unpicklable": "an exception that cannot be pickled",
    "defect": "a bug of the kernel's code",
    "assertion": "a failed assertion without a message",
    "stuck": "a compiler that does not end",
    "hang": "a kernel that does not end",
    "exit": "the process exits",
    "abort": "the process aborts",
    "sticky": "a device that is lost for the whole process",
    "memory": "more memory than the device has",
    "zero": "a time of zero",
    "crowded": "more memory than a share of the device",
    "large": "a large problem",
    "killed": "a worker killed from outside",
    "full": "a device whose memory another process takes",
    "vandal": "a kernel that overwrites what others read",
    "kernel: out_of_bounds": "a Pallas kernel that stores out of bounds",
    "kernel: endless": "a Pallas kernel that does not end",
    "kernel: skips_a_tile": "a Pallas kernel that skips a tile",
}


def main() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    PAGE.write_text(page(results))
    README.write_text(with_headline(README.read_text(), results))
    print(f"{PAGE.relative_to(ROOT)}, {README.relative_to(ROOT)}: from {len(results)} files")


def with_headline(document: str, results: Mapping[str, Result]) -> str:
    """The README with today's figures in their place."""
    return PLACE.sub(lambda _: "\n".join(headline(results)), document)


def headline(results: Mapping[str, Result]) -> list[str]:
    """The few figures to begin with."""
    s, fused, calls, time, quality = (
        results[f"{name}-nvidia-h200"]["summary"]
        for name in ("matmul", "fused", "call_overhead", "tuning_time", "search_quality")
    )
    rows = results["rows-nvidia-h200"]["rows"]
    ratios = [row["final_vs_xla"] for row in rows]
    attention = [row["final_vs_cudnn"] for row in results["attention-nvidia-h200"]["rows"] if row["final_vs_cudnn"]]
    products = results["matmul-nvidia-h200"]["rows"]
    measured = {f"{row.get('operation', 'matmul')} {row['problem']}": row for row in (*products, *rows)}
    return [
        *table("on an H200, the other's time over ours", "geomean", "worst", left=1),
        line(f"XLA / `tuned_matmul`, {s['problems']} problems", *_both(s, "final_vs_xla")),
        line("XLA / the best Pallas schedule alone", *_both(s, "pallas_vs_xla")),
        line(
            f"JAX's `hopper_matmul_mgpu` / the best Pallas schedule, {s['problems_with_jax_hopper']} problems",
            *_both(s, "pallas_vs_jax_hopper"),
        ),
        line(
            f"XLA / `tuned_matmul` with bias, activation or residual, {fused['problems']} problems",
            *_both(fused, "final_vs_written"),
        ),
        line(
            f"XLA / `tuned_softmax`, `tuned_rms_norm`, `tuned_silu_and_mul`, {len(ratios)} problems",
            f"{statistics.geometric_mean(ratios):.3f}",
            f"{min(ratios):.3f}",
        ),
        line(
            f"cuDNN / `tuned_flash_attention`, forward and backward, {len(attention)} problems",
            f"{statistics.geometric_mean(attention):.3f}",
            f"{min(attention):.3f}",
        ),
        "",
        *text(
            "For example, " + "; ".join(_example(measured[problem], words) for problem, words in EXAMPLES.items()) + "."
        ),
        *text(
            f"A search at 4096 x 4096 x 4096 took {time['trials']} trials and {time['seconds_64_trials']:.1f} s; with "
            f"the start of its workers, {time['seconds_with_startup']:.1f} s. Without measuring, the top "
            f"prediction comes to {percent(quality['first_choice_median'])} of the best schedule in the median of "
            f"{quality['shapes']} recorded sweeps, and to {percent(quality['first_choice_worst'])} at worst. "
            f"A cached eager call adds {calls['eager_overhead_us']:.1f} us to a jitted one."
        ),
    ]


def _example(row: Row, words: str) -> str:
    return f"{words} takes {row['final_us']:.1f} us, by XLA {row['xla_us']:.1f}"


def page(results: Mapping[str, Result]) -> str:
    """The whole of docs/results.md."""
    of = {name.removesuffix("-nvidia-h200"): result for name, result in results.items()}
    lines = [
        "# Results",
        "",
        *text(
            "Written by `python benchmarks/results_page.py` from `benchmarks/results/` and `records/`; do not edit. "
            "A ratio above 1 says that ours is faster. Times are microseconds of the kernels on the device, operands "
            "out of the cache unless the result file says `warm` ([how times are taken](measuring.md)). How each "
            "kernel is designed: [matmul](kernels/matmul-hopper.md), [rows](kernels/rows-hopper.md), "
            "[attention](kernels/flash-attention.md). What was tried: [experiments](experiments.md)."
        ),
        *headline(results)[:-1],
        *_matmul(of["matmul"]),
        *_fused(of["fused"]),
        *_rows(of["rows"]),
        *_unaligned(),
        *_quality(of["search_quality"]),
        *_times(of["tuning_time"], of["call_overhead"], of["call_overhead-cpu"]),
        *_attention(of["attention"]),
        *_layers(of["layer"]),
        *(line for name in sorted(of) if name.startswith("many_gpus") for line in _many_gpus(name, of[name])),
        *_sizes(of["sizes"]),
        *_faults(of["faults-cpu"], of["faults"]),
        *_compiled(results),
    ]
    return "\n".join(lines) + "\n"


def _matmul(result: Result) -> Iterator[str]:
    yield from _section("Matrix products", "matmul-nvidia-h200", result)
    yield from text(
        "The roofline is the larger of flops / peak rate (989 TFLOP/s in bfloat16) and bytes / bandwidth (4.8 "
        "TB/s), each operand read and the result written once; no kernel can be faster. *Answer* is what "
        "`tuned_matmul` runs: the faster of XLA's program and the best Pallas schedule of a search of up to 64 "
        "trials. *JAX's* is the best of a random draw of 64 schedules of `hopper_matmul_mgpu`; empty where that "
        "kernel cannot do the problem."
    )
    measured = {posed(MatmulProblem, row["problem"]): row for row in result["rows"]}
    yield from table(
        "problem",
        "from",
        "roofline",
        "bound by",
        "XLA",
        "JAX's",
        "Pallas",
        "answer",
        "XLA / Pallas",
        "JAX's / Pallas",
        "XLA / answer",
        "Pallas tile",
        left=2,
    )
    for product in MATMULS:
        yield _product(product, measured.get(product.problem, {}))


def _product(product: Product, row: Row) -> str:
    problem = product.problem
    arithmetic_s = problem.flops / H200.peak(problem.arithmetic)
    memory_s = problem.bytes_moved / H200.hbm_bytes_per_s
    times = ("xla_us", "jax_hopper_us", "pallas_us", "final_us")
    ratios = ("pallas_vs_xla", "pallas_vs_jax_hopper", "final_vs_xla")
    return line(
        str(problem),
        product.origin,
        f"{max(arithmetic_s, memory_s) * 1e6:.1f}",
        "flops" if arithmetic_s > memory_s else "bytes",
        *(number(row.get(name), 1) for name in times),
        *(number(row.get(name), 3) for name in ratios),
        _tile(row.get("pallas_schedule")),
    )


def _fused(result: Result) -> Iterator[str]:
    yield from _section("Bias, activation and residual", "fused-nvidia-h200", result)
    yield from text(
        "In the epilogue of the product, against XLA's program for what people write, `activation(a @ b + bias) + "
        "residual` in bfloat16, which rounds at each step."
    )
    titles = ("problem", "from", "as written", "XLA in float32", "Pallas", "as written / Pallas", "as written / answer")
    yield from table(*titles, left=2)
    for row in result["rows"]:
        times = (row.get(name) for name in ("as_written_us", "xla_us", "pallas_us"))
        ratios = (row.get(name) for name in ("pallas_vs_written", "final_vs_written"))
        cells = (*(number(time, 1) for time in times), *(number(ratio, 3) for ratio in ratios))
        yield line(row["problem"], row["origin"], *cells)


def _rows(result: Result) -> Iterator[str]:
    yield from _section("Rows: softmax, RMS norm, SiLU-and-mul", "rows-nvidia-h200", result)
    yield from text(
        "Bytes are each operand read once and each result written once; XLA is its program for the formula in "
        "float32. *Schedule* says where the best Pallas schedule keeps a row ([rows on "
        "Hopper](kernels/rows-hopper.md))."
    )
    titles = ("operation", "problem", "MiB", "schedule", "XLA", "Pallas", "TB/s", "XLA / Pallas", "XLA / answer")
    yield from table(*titles, left=2)
    for row in result["rows"]:
        yield line(
            row["operation"],
            row["problem"],
            f"{row['bytes'] / 2**20:,.3g}" if row["bytes"] < 1000 * 2**20 else f"{row['bytes'] / 2**20:,.0f}",
            _residency(row.get("pallas_schedule") or {}),
            *(number(row.get(name), 1) for name in ("xla_us", "pallas_us")),
            number(row.get("pallas_tb_per_s"), 2),
            *(number(row.get(name), 3) for name in ("pallas_vs_xla", "final_vs_xla")),
        )


def _unaligned() -> Iterator[str]:
    yield from ("", "### Rows that start anywhere, and float32 weights", "")
    yield from text(
        "By the final comparisons of the shipped records (`records/`). XLA is the faster of its two programs: the "
        "formula in float32, and what people write."
    )
    yield from table("operation", "problem", "schedule", "XLA", "Pallas", "TB/s", "XLA / Pallas", left=2)
    for name, record in _shipped("softmax", "rms_norm"):
        problem = load(name).problem.from_canonical(record.key.problem)
        best = {entry.backend: entry for entry in reversed(record.entries)}
        unaligned = problem.columns * problem.operands()[0].dtype.itemsize % 16
        mixed = getattr(problem, "weight_dtype", "") not in ("", problem.dtype)
        if (unaligned or mixed) and {"xla", "mosaic_gpu"} <= best.keys():
            xla_s, pallas_s = (best[backend].measurement.median_s for backend in ("xla", "mosaic_gpu"))
            yield line(
                name,
                told(problem),
                _residency(best["mosaic_gpu"].schedule),
                *(f"{seconds * 1e6:.1f}" for seconds in (xla_s, pallas_s)),
                f"{problem.bytes_moved / pallas_s / 1e12:.2f}",
                f"{xla_s / pallas_s:.3f}",
            )


def _shipped(*operations: str) -> Iterator[tuple[str, Record]]:
    """The shipped records of these operations on an H200, in the order of their files."""
    for name in operations:
        for path in sorted((ROOT / "records").glob(f"nvidia-h200*/{name}.jsonl")):
            yield from ((name, codec.record_from_text(text)) for text in path.read_text().splitlines())


def _quality(result: Result) -> Iterator[str]:
    rows, s = result["rows"], result["summary"]
    yield from _section("The model and the search", "search_quality-nvidia-h200", result)
    yield from text(
        f"On recorded sweeps of {s['shapes']} matmuls. Shares are of the fastest schedule of the sweep's second pass, "
        "1 is the best; a shape's figure is the median of its seeds, the table's are the median and the worst of the "
        "shapes ([what they say, and what not](search-and-model.md#how-it-is-judged-and-what-the-figures-do-not-say)). "
        f"Whoever knew the first pass of each sweep would reach {s['noise_ceiling_worst']:.3f} at worst."
    )
    yield from table("", "median", "worst", left=1)
    columns = {
        "the top prediction": "first_choice",
        "the best of the top 8 predictions": "model_first_8",
        "the best of the top 20 % of predictions": "prune20",
        "Kendall's tau": "tau",
        "Kendall's tau among the fastest tenth": "tau_best_tenth",
    }
    for title, name in columns.items():
        yield line(title, *spread(row[name] for row in rows))
    for strategy in rows[0]["search"]:
        for trials in rows[0]["search"][strategy]:
            found = [row["search"][strategy][trials]["median"] for row in rows]
            yield line(f"{trials} trials, {strategy}", *spread(found))
    picks = [row["nvmatmulheuristics"] for row in rows if row["nvmatmulheuristics"]]
    for count in ("1", "8", "16") if picks else ():
        title = f"nvMatmulHeuristics, best of {count} ({len(picks)} shapes)"
        yield line(title, *spread(one[count] for one in picks))
    yield from ("", "![best so far against trials](../benchmarks/results/search_quality-nvidia-h200.svg)", "")
    yield from ("What each term is worth, one change at a time:", "")
    worst = {"model_first_8": "best of 8", "model_first_16": "best of 16", "prune20": "best 20 %"}
    worst = {name: title for name, title in worst.items() if all(name in one for one in rows[0]["ablations"].values())}
    titles = [f"{title}, worst" for title in worst.values()]
    yield from table("", "top prediction, median", "worst", *titles, "tau, median", left=1)
    for change in rows[0]["ablations"]:
        found = [row["ablations"][change] for row in rows]
        yield line(
            change,
            *spread(one["first_choice"] for one in found),
            *(f"{min(one[name] for one in found):.3f}" for name in worst),
            f"{statistics.median(one['tau'] for one in found):.2f}",
        )


def _times(tuning: Result, calls: Result, calls_cpu: Result) -> Iterator[str]:
    yield from _section("What a search takes", "tuning_time-nvidia-h200", tuning)
    s = tuning["summary"]
    yield from text(
        f"4096 x 4096 x 4096: {s['trials']} trials in {s['seconds_64_trials']:.1f} s on {s['workers']} workers, "
        f"{s['seconds_with_startup']:.1f} s with their start. The winners of two searches with different seeds "
        f"differ by {percent(s['winner_disagreement_worst'])} at most, on {s['problems']} problems."
    )
    if "seconds_a_problem_of_a_job" in s:
        yield from text(
            f"A job of these problems takes {s['seconds_a_problem_of_a_job']:.1f} s a problem, and `verify` "
            f"{s['verify_seconds_a_record']:.1f} s a record."
        )
    yield from _section("What a cached eager call adds to a jitted one", "call_overhead-nvidia-h200", calls)
    yield from _source("call_overhead-cpu", calls_cpu)
    yield from table("call", "H200: tuned, us", "jitted, us", "overhead, us", "CPU: overhead, us", left=1)
    for row, on_cpu in zip(calls["rows"], calls_cpu["rows"], strict=True):
        times = (row["tuned_us"], row["direct_us"], row["overhead_us"], on_cpu["overhead_us"])
        yield line(f"`{row['call']}`", *(f"{time_us:.1f}" for time_us in times))


def _attention(result: Result) -> Iterator[str]:
    s, missing = result["summary"], result["environment"].get("missing", ())
    yield from _section("Attention", "attention-nvidia-h200", result)
    yield from text(
        "*Pallas* is the best schedule of a search of up to 12 trials, *model* what the cost model picks without any, "
        "all timed in turns, by a process that chose none. Rates are TFLOP/s of the products that visible pairs of "
        "queries and keys need, and TB/s where there is one query (decoding). The geometric mean against cuDNN is "
        f"{s['pallas_vs_cudnn_geomean']:.3f} forward ({s['causal_vs_cudnn_geomean']:.3f} causal), "
        f"{s['backward_vs_cudnn_geomean']:.3f} backward; the worst are {s['pallas_vs_cudnn_worst']:.3f}, "
        f"{s['backward_vs_cudnn_worst']:.3f}, and {s['decode_vs_cudnn_worst']:.3f} decoding; against tokamax' kernel, "
        f"forward without decoding, {s['pallas_vs_tokamax_geomean']:.3f}, at worst {s['pallas_vs_tokamax_worst']:.3f}. "
        f"{len(result['rows'])} of {len(result['rows']) + len(missing)} points have been timed."
    )
    yield from table("", "cuDNN", "JAX's kernel", "tokamax", "Pallas", "rate", "vs cuDNN", "model vs Pallas", left=1)
    for row in result["rows"]:
        rate = row["pallas_tb_per_s"] if row["kind"] == "decode" else row["pallas_tflops"]
        # Of decoding what tokamax has for it was not timed (benchmarks/results/README.md).
        tokamax_us = None if row["kind"] == "decode" else row["tokamax_us"]
        times = (row["cudnn_us"], row["jax_us"], tokamax_us, row["pallas_us"])
        microseconds = (number(time_us, 1) for time_us in times)
        ratios = (f"{row[name]:.3f}" for name in ("pallas_vs_cudnn", "model_vs_pallas"))
        yield line(row["point"], *microseconds, number(rate, 2 if row["kind"] == "decode" else 0), *ratios)


def _layers(result: Result) -> Iterator[str]:
    yield from _section("Whole layers", "layer-nvidia-h200", result)
    yield from text(
        "Wall time of a layer, microseconds, under sustained load, in turns: plain jnp with cuDNN's attention; tuned "
        "calls under a plan that was decided in context; all of them as their records say; and `optimize` of the plain "
        "code. *Error* is the plan's distance from the same model in float32, over that of jnp."
    )
    ratios = ("plan", "tuned", "optimize")
    yield from table(
        "", "jnp", "plan", "tuned calls", "`optimize`", *(f"jnp / {name}" for name in ratios), "error", left=1
    )
    for row in result["rows"]:
        times = (number(row[f"{name}_us"], 1) for name in ("jnp", "plan", "tuned", "optimize"))
        what = f"{row['case']}: {row['model']}"
        over = (f"{row[f'{name}_vs_jnp']:.3f}" for name in ratios)
        yield line(what, *times, *over, f"{row['error_vs_jnp']['plan']:.3f}")


def _many_gpus(name: str, result: Result) -> Iterator[str]:
    """Of the chip that all results are of, or of another, which `name` then ends with."""
    layers, own = [row for row in result["rows"] if "tuned_vs_jnp" in row], name == "many_gpus"
    chip = result["environment"]["device"].partition(" (")[0]
    title = "Several GPUs of one host" if own else f"Several GPUs of one host: {chip}"
    yield from _section(title, "many_gpus-nvidia-h200" if own else name, result)
    if layers:
        alike = "the same" if all(row["same_collectives"] for row in layers) else "not the same"
        yield from text(
            "MLPs of Llama 3 70B, divided over GPUs (tokens x columns) by the shardings of their arguments: wall time "
            "of a layer, microseconds, under sustained load, in turns. *Error* is the distance from float32, over that "
            f"of jnp. Both have {alike} collectives, whose results on a GPU are so large."
        )
        yield from table("", "GPUs", "jnp", "tuned calls", "jnp / tuned", "error", "MB, jnp", "MB, tuned", left=2)
        for row in layers:
            times = (number(row[f"{name}_us"], 1) for name in ("jnp", "tuned"))
            ratios = (number(row[name], 3) for name in ("tuned_vs_jnp", "error_vs_jnp"))
            bytes_of = (sum(each["bytes"] for each in row["collectives"][name].values()) for name in ("jnp", "tuned"))
            mesh = f"{row['mesh']['data']} x {row['mesh']['model']}"
            yield line(row["case"], mesh, *times, *ratios, *(number(size / 1e6, 1) for size in bytes_of))
        yield ""
    if jobs := [row for row in result["rows"] if row not in layers]:
        yield from text(
            "A job of problems that were drawn from what public models ask for, from an empty cache. *Busy* is the "
            "share of the time in which any kernel ran."
        )
        yield from table("GPUs", "problems", "trials of each", "seconds", "busy", left=0)
        for row in jobs:
            busy = percent(statistics.fmean(row["busy"])) if row["busy"] else ""
            told = f"{len(row['results'])} of {len(row['problems'])}"
            yield line(str(row["gpus"]), told, str(row["budget"]), number(row["seconds"], 0), busy)


def _sizes(result: Result) -> Iterator[str]:
    rows, s = result["rows"], result["summary"]
    yield from _section("A job of large and small problems", "sizes-nvidia-h200", result)
    failed = [row["problem"] for row in rows if row["state"] != "tuned"]
    yield from text(
        f"{s['large']} products with results of up to {s['largest_result_gb']:.0f} GB and "
        f"{len(rows) - s['large']} small problems in turns: {len(rows) - len(failed)} of {len(rows)} tuned, "
        f"{s['trials_failed']} of {s['trials']} trials failed{'; not tuned: ' * bool(failed)}{', '.join(failed)}."
    )


def _faults(cpu: Result, gpu: Result) -> Iterator[str]:
    kinds = {row["fault"]: row for row in cpu["rows"]}
    devices = {row["fault"]: row for row in gpu["rows"]}
    yield from _section("Injected faults", "faults-cpu", cpu)
    yield from _source("faults-nvidia-h200", gpu)
    each_time = all(row["right_one_won"] for row in (*cpu["rows"], *gpu["rows"]))
    yield from text(
        "Each fault is injected into searches among right candidates. *Lost* are trials that ended neither as a "
        "measurement nor as a failure; *blamed* are right candidates that failed, or faults taken for another "
        "kind. Where candidates are right, the fault is in what surrounds them. The right candidate won "
        f"{'each time' if each_time else 'not each time'}."
    )
    yield from table("fault", "CPU: caught as", "lost", "blamed", "H200: caught as", "lost", "blamed", left=1)
    for fault in dict.fromkeys((*kinds, *devices)):
        cells = [cell for where in (kinds, devices) for cell in _caught(where.get(fault))]
        yield line(FAULTS.get(fault, fault), *cells)


def _caught(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    caught = ", ".join(f"{count} {STAGES.get(stage, stage)}" for stage, count in row["caught_as"].items())
    return caught, str(row["lost"]), str(row["innocent_blamed"])


def _compiled(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("", "## Kernels for chips that are not here, by their compilers", "")
    yield from text(
        "Schedules drawn at random and from the top of the model's ranking, ragged problems included. *Accepted "
        "falsely* is what the model calls legal and the compiler refuses, *rejected falsely* the reverse; *to the "
        "byte* are programs whose on-chip memory is what was predicted, of those that were compiled; tau is Kendall's, "
        "between the model's times and the compiler's estimates, the median over problems. "
        "`benchmarks/results/tpu_fit-*.json`, by `benchmarks/tpu_fit.py`:"
    )
    yield from table("TPU", "schedules", "accepted falsely", "rejected falsely", "to the byte", "tau", left=1)
    for name, of in sorted(results.items()):
        if name.startswith("tpu_fit"):
            s = of["summary"]
            exact = f"{s['bytes_equal']} of {s['bytes_compared']}"
            wrong = str(s["false_accepts"]), str(s["false_rejects"])
            tau = number(s["tau_median"], 2) if s["tau_median"] is not None else "no estimates"
            yield line(of["environment"]["device"], str(s["schedules"]), *wrong, exact, tau)
    yield ""
    yield from text(
        "Matmuls by warp-level MMA, by ptxas, for each architecture: `benchmarks/results/mma_fit-*.json`, by "
        "`benchmarks/mma_fit.py`:"
    )
    yield from table("", "schedules", "refused", "spilled", "other on-chip bytes", left=1)
    mma = [results[f"mma_fit-nvidia-{chip}"]["summary"] for chip in MMA_CHIPS.values()]
    for architecture, of_own in zip(MMA_CHIPS, mma, strict=True):
        others = [s[architecture] for s in mma if architecture in s]
        schedules, spilled = (sum(s[name] for s in (of_own, *others)) for name in ("schedules", "spilled"))
        yield line(architecture, *map(str, (schedules, of_own["refused"], spilled, of_own["other_onchip_bytes"])))


def _section(title: str, name: str, result: Result) -> Iterator[str]:
    """A heading, and where the figures come from."""
    yield from ("", f"## {title}", "")
    yield from _source(name, result)


def _source(name: str, result: Result) -> Iterator[str]:
    made = result["environment"]
    when = f", {made['date'][:10]}" if made.get("date") else ""
    commits = ", ".join(f"`{commit.strip()[:7]}`" for commit in made["commit"].split(","))
    yield f"`benchmarks/results/{name}.json`: {made['device']}, jax {made['jax']}{when}, commit {commits}."
    if missing := made.get("missing"):
        many = len(missing) > MOST_NAMED
        yield f"Not measured: {f'{len(missing)} others, which the file names' if many else ', '.join(missing)}."
    yield ""


def _residency(schedule: Mapping[str, Any]) -> str:
    today = aliases.schedule(schedule)
    cluster = today.get("cluster", 1)
    where = RESIDENCIES[str(today.get("residency", "registers"))]
    return where + (f", cluster of {cluster}" if cluster != 1 else "")


def _tile(schedule: Mapping[str, Any] | None) -> str:
    return " x ".join(str(schedule[name]) for name in ("tile_m", "tile_n", "tile_k")) if schedule else ""


def _both(summary: Mapping[str, Any], name: str) -> tuple[str, str]:
    return f"{summary[f'{name}_geomean']:.3f}", f"{summary[f'{name}_worst']:.3f}"


if __name__ == "__main__":
    main()
