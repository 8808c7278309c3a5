"""Writes docs/results.md, and the figures of the README and of docs/reproduce.md, from benchmarks/results/.

    python benchmarks/results_page.py

Needs no device. A test compares both documents with what this program writes.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness import RESULTS, ROOT
from headline import card, compared, costs, files, losses, ratios, repeated
from markdown_page import in_place, line, number, percent, spread, table, text
from rows import FORWARD, of_floor

MOST_NAMED = 8  # problems that a result lacks
LOSS = 0.98  # a table has every row whose ratio is below
PAGE, REPEATED, README = ROOT / "docs" / "results.md", ROOT / "docs" / "reproduce.md", ROOT / "README.md"
TRIALS = ("4", "16", "64")
Result = Mapping[str, Any]
Row = Mapping[str, Any]


def main() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    PAGE.write_text(page(results))
    for document in (README, REPEATED):
        document.write_text(with_figures(document.read_text(), results))
    print(f"{', '.join(str(each.relative_to(ROOT)) for each in (PAGE, README, REPEATED))}: from {len(results)} files")


def with_figures(document: str, results: Mapping[str, Result]) -> str:
    """A document with today's figures in their places."""
    for place, lines in (("ratios", ratios), ("costs", costs), ("repeated", repeated)):
        document = in_place(document, f"results_page.py: {place}", list(lines(results)))
    return document


def page(results: Mapping[str, Result]) -> str:
    """The whole of docs/results.md."""
    of = {name.removesuffix("-nvidia-h200"): result for name, result in results.items()}
    lines = [
        "# Results",
        "",
        *text(
            "Written by `python benchmarks/results_page.py`; do not edit. Each section names its files in "
            "`benchmarks/results/` (all rows, command, environment) by program and chip, with JAX, date and commit. "
            f"Tables show the worst row, others below {LOSS}, the median and the best. "
            "A ratio above 1 means that ours is faster. Times are microseconds on the device, operands out of the "
            "cache unless the file says `warm` ([measuring](measuring.md)). Summary: [README](../README.md)."
        ),
        *_cards(results),
        *losses(results),
        *_matmul(of["matmul"]),
        *_fused(of["fused"]),
        *_rows(files(results, "rows")),
        *_quality(of["search_quality"]),
        *_drawn(of["no_search_drawn"]),
        *_search_times(files(results, "tuning_time")),
        *_external_clock(of["external_clock"]),
        *_call_times(of["call_overhead"], of["call_overhead-cpu"]),
        *_attention(of["attention"]),
        *_grouped(files(results, "grouped")),
        *_models(files(results, "models")),
        *_many_gpus(files(results, "many_gpus")),
        *_sizes(of["sizes"]),
        *_faults(files(results, "faults")),
        *_compiled(results),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _cards(results: Mapping[str, Result]) -> Iterator[str]:
    """A table of the comparisons of each card."""
    for name in sorted({card(result) for _, result, _ in compared(results)}, reverse=True):
        yield from ("", f"## {name}", "", *ratios(results, name))


def notable(rows: Sequence[Row], ratio: str) -> list[Row]:
    """The worst row, all others below `LOSS`, the median (the lower of two) and the best, in this order."""
    ranked = sorted((row for row in rows if row.get(ratio)), key=lambda row: row[ratio])
    losses = sum(row[ratio] < LOSS for row in ranked)
    last = len(ranked) - 1
    return [ranked[place] for place in sorted({*range(max(losses, 1)), last // 2, last})]


def _matmul(result: Result) -> Iterator[str]:
    rows = result["rows"]
    yield from _section("Matrix products", "matmul-nvidia-h200", result)
    yield from text(
        "*Roofline*: the larger of flops / 989 TFLOP/s and bytes / 4.8 TB/s. *Pallas*: the best schedule of up to 64 "
        "trials. *Answer*: the faster of XLA and Pallas, which `tuned_matmul` runs. *JAX's*: the best of 64 random "
        "schedules of `hopper_matmul_mgpu`, empty where it cannot run. Pallas alone is slower than XLA on "
        f"{sum((row['pallas_vs_xla'] or 1) < 1 for row in rows)} of {len(rows)} problems. bfloat16 unless named."
    )
    titles = ("problem", "from", "roofline", "XLA", "JAX's", "Pallas", "answer", "XLA / Pallas", "XLA / answer")
    yield from table(*titles, left=2)
    for row in notable(rows, "pallas_vs_xla"):
        times = (number(row[f"{name}_us"], 1) for name in ("bound", "xla", "jax_hopper", "pallas", "final"))
        ratios = (number(row[name], 3) for name in ("pallas_vs_xla", "final_vs_xla"))
        yield line(row["problem"].removesuffix(" dtype=bfloat16"), row["origin"], *times, *ratios)


def _fused(result: Result) -> Iterator[str]:
    yield from _section("Bias, activation and residual", "fused-nvidia-h200", result)
    yield from text(
        "Against XLA's program for `activation(a @ b + bias) + residual` in bfloat16, which rounds at each step."
    )
    titles = ("problem", "from", "as written", "XLA in float32", "Pallas", "as written / Pallas")
    yield from table(*titles, left=2)
    for row in notable(result["rows"], "pallas_vs_written"):
        times = (number(row[f"{name}_us"], 1) for name in ("as_written", "xla", "pallas"))
        yield line(row["problem"], row["origin"], *times, number(row["pallas_vs_written"], 3))


def _rows(results: Mapping[str, Result]) -> Iterator[str]:
    name = "rows-nvidia-h200"
    yield from _section("Rows: softmax, RMS norm, SiLU-and-mul", name, results[name])
    yield from text("XLA computes the formula in float32. TB/s count each operand and each result once.")
    yield from _table_of_rows([row for row in results[name]["rows"] if row["operation"] in FORWARD])
    yield from ("", "## Backward passes, losses and quantization of rows", "")
    yield from text(
        "*Floor*: each operand and result once, at the rate of the best copy. *XLA*: of a backward pass, `jax.vjp` "
        "from inputs and cotangents. *torch*: the faster of eager and compiled. Rows above 1.02 of the floor, and the "
        "best."
    )
    for name, result in results.items():
        yield from _source(name, result)
        rows = [row for row in result["rows"] if row["operation"] not in FORWARD]
        yield from _table_of_others(rows, result["summary"]["copy_tb_per_s"])


def _table_of_rows(rows: Sequence[Row]) -> Iterator[str]:
    yield from table("operation", "problem", "XLA", "Pallas", "TB/s", "XLA / Pallas", left=2)
    for operation in dict.fromkeys(row["operation"] for row in rows):
        for row in notable([row for row in rows if row["operation"] == operation], "pallas_vs_xla"):
            times = (number(row[f"{name}_us"], 1) for name in ("xla", "pallas"))
            rates = (number(row["pallas_tb_per_s"], 2), number(row["pallas_vs_xla"], 3))
            yield line(operation, row["problem"].removesuffix(" dtype=bfloat16"), *times, *rates)


def _table_of_others(rows: Sequence[Row], rate: float) -> Iterator[str]:
    floor = f"answer / floor at {number(rate, 2)} TB/s"
    yield from table("operation", "problem", "XLA", "torch", "answer", floor, left=2)
    for row in notable_of_floor(rows, rate):
        times = (number(row[f"{name}_us"], 1) for name in ("xla", "torch", "final"))
        problem = row["problem"].removesuffix(" dtype=bfloat16")
        yield line(row["operation"], problem, *times, number(of_floor([row], rate), 2))


def notable_of_floor(rows: Sequence[Row], rate: float) -> list[Row]:
    """Returns the rows that take more than 2 % above the floor, and the one nearest to it."""
    nearest = min(rows, key=lambda row: of_floor([row], rate) or math.inf)
    return [row for row in rows if row is nearest or (of_floor([row], rate) or math.inf) > 1.02]


def _quality(result: Result) -> Iterator[str]:
    rows, s = result["rows"], result["summary"]
    yield from _section("The model and the search", "search_quality-nvidia-h200", result)
    yield from text(
        f"From sweeps of {s['shapes']} matmuls ([limits]"
        "(search-and-model.md#how-it-is-judged-and-what-the-figures-do-not-say)): shares of the speed of the fastest "
        "schedule in the second pass, median over seeds, then median and worst shape. The best schedule of the first "
        f"pass reaches {s['noise_ceiling_worst']:.3f} at worst."
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
    yield ""
    yield from table("strategy", *(f"{n} trials{of}" for n in TRIALS for of in ("", ", worst")), left=1)
    for strategy in rows[0]["search"]:
        found = (spread(row["search"][strategy][n]["median"] for row in rows) for n in TRIALS)
        yield line(strategy, *(figure for pair in found for figure in pair))
    yield from ("", "![best so far against trials](../benchmarks/results/search_quality-nvidia-h200.svg)", "")
    whole, *changes = rows[0]["ablations"]
    worst = {change: min(row["ablations"][change]["first_choice"] for row in rows) for change in (whole, *changes)}
    harmful = [change for change in changes if worst[change] < worst[whole]]
    yield from text(
        f"Of {len(changes)} changes that remove a term of the model, these {len(harmful)} lower the worst top "
        "prediction:"
    )
    yield from table("", "top prediction, median", "worst", "tau, median", left=1)
    for change in (whole, *harmful):
        found = [row["ablations"][change] for row in rows]
        tau = statistics.median(one["tau"] for one in found)
        yield line(change, *spread(one["first_choice"] for one in found), number(tau, 2))


def _drawn(result: Result) -> Iterator[str]:
    """Drawn problems without a search: the share of the gain of the model's first three schedules, and losses."""
    s, known = result["summary"], [row for row in result["rows"] if row["answer_us"] and row["library_us"]]
    slow = [row for row in known if row["library_us"] < 0.97 * row["answer_us"]]
    exact = sum(row["answer"]["backend"] == "xla" for row in slow)
    yield from _section("Drawn problems without a search", "no_search_drawn-nvidia-h200", result)
    yield from text(
        "Without records of unaligned rows. *Gain taken*: of what the fastest of three predicted schedules gains over "
        f"the fastest library (log time). *Worst*: library / answer. {len(slow)} answers lose over 3 %, {exact} by "
        "XLA's exact program."
    )
    yield from table("operation", "problems", "gain taken", "worst", left=1)
    for name, one in s["by_operation"].items():
        if one["problems"] >= 5:
            gain = "" if one["gain_taken"] is None else number(one["gain_taken"], 2)
            yield line(name, str(one["problems"]), gain, number(one["worst"], 3))
    yield line("all", str(s["problems"]), number(s["drawn_gain_taken"], 2), number(s["drawn_worst"], 3))


def _search_times(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("", "## What a search takes", "")
    for name, result in results.items():
        yield from _source(name, result)
    yield from text(
        "*Search*: 4096 x 4096 x 4096, with the start of its processes. *Difference*: between the winners of two "
        "seeds, at worst. A row without a job precedes separate compile processes."
    )
    titles = ("search, s", "trials", "problems", "job, s a problem", "`verify`, s a record", "difference")
    yield from table("", *titles, left=1)
    for result in results.values():
        s = result["summary"]
        job = (number(s.get(name), 1) for name in ("seconds_a_problem_of_a_job", "verify_seconds_a_record"))
        one = (number(s["seconds_with_startup"], 1), str(s["trials"]), str(s["problems"]))
        yield line(card(result), *one, *job, percent(s["winner_disagreement_worst"]))


def _external_clock(result: Result) -> Iterator[str]:
    summary = result["summary"]
    deviations = sorted(abs(row["winner_deviation"]) for row in result["rows"])
    yield from _section("An external clock", "external_clock-nvidia-h200", result)
    yield from text(
        f"{summary['problems']} problems drawn at random, of which no record is shipped. Three fresh processes time "
        "the stored winner and the library in programs of several calls. *Deviation*: a winner's time there over its "
        "stored time, less one. "
        f"{summary['agree']} winners deviate by at most {percent(summary['within'])}, all by at most "
        f"{percent(deviations[-1])}; median {percent(summary['deviation_median'])}. Winners that are "
        f"slower than the library there: {summary['library_is_faster']}, by at most "
        f"{percent(1 - summary['final_vs_library_worst'])}. The table has "
        f"deviations above {percent(summary['within'])}."
    )
    yield from table("problem", "backend", "stored", "in programs", "deviation", left=2)
    for row in sorted(result["rows"], key=lambda row: row["winner_deviation"]):
        if abs(row["winner_deviation"]) > summary["within"]:
            problem = f"{row['operation']} {row['problem']}".removesuffix(" dtype=bfloat16")
            times = (number(row[f"winner_{name}"], 1) for name in ("stored_us", "us"))
            yield line(problem, row["backend"], *times, percent(row["winner_deviation"]))


def _call_times(calls: Result, calls_cpu: Result) -> Iterator[str]:
    yield from _section("What a cached eager call adds to a jitted one", "call_overhead-nvidia-h200", calls)
    yield from _source("call_overhead-cpu", calls_cpu)
    yield from table("call", "H200: tuned, us", "jitted, us", "overhead, us", "CPU: overhead, us", left=1)
    for row, on_cpu in zip(calls["rows"], calls_cpu["rows"], strict=True):
        times = (row["tuned_us"], row["direct_us"], row["overhead_us"], on_cpu["overhead_us"])
        yield line(f"`{row['call']}`", *(f"{time_us:.1f}" for time_us in times))


def _attention(result: Result) -> Iterator[str]:
    rows, s = result["rows"], result["summary"]
    yield from _section("Attention", "attention-nvidia-h200", result)
    yield from text(
        "*Pallas*: the best schedule of up to 12 trials. *Model*: the cost model's first choice. A process that chose "
        "none timed all. Rates: TFLOP/s of visible pairs, TB/s in decoding (one query). Against cuDNN: "
        f"{s['pallas_vs_cudnn_geomean']:.3f} forward ({s['causal_vs_cudnn_geomean']:.3f} causal), "
        f"{s['backward_vs_cudnn_geomean']:.3f} backward in the geometric mean; at worst "
        f"{s['pallas_vs_cudnn_worst']:.3f} forward, "
        f"{s['backward_vs_cudnn_worst']:.3f} backward, {s['decode_vs_cudnn_worst']:.3f} decoding. Against tokamax, "
        f"forward without decoding: {s['pallas_vs_tokamax_geomean']:.3f}, at worst "
        f"{s['pallas_vs_tokamax_worst']:.3f}. {len(rows)} points, bfloat16 unless named."
    )
    yield from table("", "cuDNN", "tokamax", "Pallas", "rate", "cuDNN / Pallas", "Pallas / model", left=1)
    for decode, backward in ((False, False), (True, False), (False, True)):
        kind = [row for row in rows if (row["kind"] == "decode", row["backward"]) == (decode, backward)]
        for row in notable(kind, "pallas_vs_cudnn"):
            # The decoding kernel of tokamax was not timed (benchmarks/results/README.md).
            times = (row["cudnn_us"], None if decode else row["tokamax_us"], row["pallas_us"])
            rate = number(row["pallas_tb_per_s"], 2) if decode else number(row["pallas_tflops"], 0)
            ratios = (number(row[name], 3) for name in ("pallas_vs_cudnn", "model_vs_pallas"))
            yield line(
                row["point"].removesuffix(" dtype=bfloat16"), *(number(time_us, 1) for time_us in times), rate, *ratios
            )


def _grouped(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("", "## Grouped products", "")
    for name, result in results.items():
        yield from _source(name, result)
        timed = [row for row in result["rows"] if "pallas_us" in row]
        layers = [row for row in result["rows"] if "jit_us" in row]
        if timed:
            s = result["summary"]
            yield from text(
                "Microseconds. A dense matmul's rate, with 256 rows or more in each group: "
                f"{s['fwd_of_dense_rate']:.3f} forward, {s['dx_of_dense_rate']:.3f} gradient of rows, "
                f"{s['dw_of_dense_rate']:.3f} of matrices. {len(timed)} points."
            )
            yield from table("", "XLA", "JAX's", "tokamax", "torch", "Pallas", left=1)
        for row in notable(timed, "pallas_vs_tokamax") if timed else ():
            times = (row[f"{of}_us"] for of in ("xla", "jax", "tokamax", "torch", "pallas"))
            yield line(row["point"], *(number(time_us, 1) for time_us in times))
        if layers:
            yield from text("A layer of experts in plain JAX, by `optimize` without a search.")
            yield from table("", "`jit`", "`optimize`", "ratio", left=1)
        for row in layers:
            times = (number(row[f"{of}_us"], 0) for of in ("jit", "optimize"))
            yield line(row["point"], *times, number(row["optimize_vs_jit"], 1))


def _models(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("", "## Unmodified models", "")
    yield from text(
        "Wall time of a function as its framework jits it over that of `optimize` with an empty cache; in parentheses "
        "the least of the runs. *MiB*: peak memory of both. *Masked*: training, and the mask depends on an argument. "
        "[Keys](../benchmarks/results/README.md)."
    )
    for name, result in results.items():
        yield from _source(name, result)
    chips = [card(result).split()[1] for result in results.values()]
    rows = [{row["model"]: row for row in result["rows"] if "ratios" in row} for result in results.values()]
    kinds = {name: row["kind"] for of in rows for name, row in of.items()}
    yield from table("", "kind", *chips, *(f"{chip}: MiB" for chip in chips), left=2)
    for name in sorted(kinds, key=kinds.__getitem__, reverse=True):
        found = [of.get(name) for of in rows]
        ratios = (f"{row['optimize_vs_jnp']:.3f} ({min(row['ratios']):.3f})" if row else "" for row in found)
        memory = (row and [row[f"{of}_bytes"] for of in ("jnp", "optimize")] for row in found)
        mib = ("→".join(f"{n / 2**20:.0f}" for n in of) if of and all(of) else "" for of in memory)
        yield line(name, kinds[name], *ratios, *mib)
    yield from ("", *table("", *chips, left=1))
    overheads = ("overhead_us_2", "overhead_200", "overhead_nnx")
    for key in ("training_geomean", "optimize_worst", *overheads, "second_process", "decide_s"):
        yield line(f"`{key}`", *(number(result["summary"][key], 3) for result in results.values()))


def _many_gpus(results: Mapping[str, Result]) -> Iterator[str]:
    if not results:
        return
    yield from ("", "## Several GPUs of one host", "")
    yield from text(
        "MLPs of Llama 3 70B, divided over GPUs (tokens x columns), wall times under sustained load, in turns. "
        "*MB*: results of the collectives on a GPU. A job tunes problems of public models, from an empty cache. "
        "*Busy*: share of the time in which a kernel ran."
    )
    for name, result in results.items():
        yield from _source(name, result)
        layers = [row for row in result["rows"] if "tuned_vs_jnp" in row]
        steps = [row for row in result["rows"] if "optimize_vs_jnp" in row]
        jobs = [row for row in result["rows"] if "busy" in row]
        if layers:
            yield from table("", "GPUs", "jnp", "tuned calls", "jnp / tuned", "error", "MB, jnp", "MB, tuned", left=2)
        for row in layers:
            times = (number(row[f"{of}_us"], 1) for of in ("jnp", "tuned"))
            ratios = (number(row[of], 3) for of in ("tuned_vs_jnp", "error_vs_jnp"))
            bytes_of = (sum(each["bytes"] for each in row["collectives"][of].values()) for of in ("jnp", "tuned"))
            mesh = f"{row['mesh']['data']} x {row['mesh']['model']}"
            yield line(row["case"], mesh, *times, *ratios, *(number(size / 1e6, 1) for size in bytes_of))
        yield ""
        if steps:
            yield from table("", "GPUs", "jnp, µs a layer", "`optimize`", "jnp / `optimize`", left=1)
        for row in steps:
            times = (number(row[f"{of}_us"], 1) for of in ("jnp", "optimize"))
            yield line(row["case"], str(row["gpus"]), *times, number(row["optimize_vs_jnp"], 3))
        if steps:
            yield ""
        if jobs:
            yield from table("GPUs", "problems", "trials of each", "seconds", "busy", "`verify`, s a record", left=0)
        for row in jobs:
            busy = percent(statistics.fmean(row["busy"])) if row["busy"] else ""
            done = f"{len(row['results'])} of {len(row['problems'])}"
            verify_s = row["verify_seconds"] / len(row["verdicts"]) if row.get("verdicts") else None
            times = (number(row["seconds"], 0), busy, number(verify_s, 1))
            yield line(str(row["gpus"]), done, str(row["budget"]), *times)
        yield ""


def _sizes(result: Result) -> Iterator[str]:
    rows, s = result["rows"], result["summary"]
    yield from _section("A job of large and small problems", "sizes-nvidia-h200", result)
    failed = [row["problem"] for row in rows if row["state"] != "tuned"]
    yield from text(
        f"{s['large']} products with results of up to {s['largest_result_gb']:.0f} GB and "
        f"{len(rows) - s['large']} small problems in turns: {len(rows) - len(failed)} of {len(rows)} tuned, "
        f"{s['trials_failed']} of {s['trials']} trials failed{'; not tuned: ' * bool(failed)}{', '.join(failed)}."
    )


def _faults(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("", "## Injected faults", "")
    for name, result in results.items():
        yield from _source(name, result)
    rows = [row for result in results.values() for row in result["rows"]]
    injected, lost, blamed = (sum(row[name] for row in rows) for name in ("injected", "lost", "innocent_blamed"))
    won = "each time" if all(row["right_one_won"] for row in rows) else "not each time"
    yield from text(
        f"{injected} faults injected into searches: {lost} lost (neither a measurement nor a failure), {blamed} "
        f"wrongly blamed (right candidates that failed, or faults taken for another kind). The right "
        f"candidate won {won}."
    )
    caught: dict[str, dict[str, None]] = {}
    for row in rows:
        for stage in row["caught_as"]:
            caught.setdefault("nothing: right candidates pass" if stage == "right" else stage, {})[
                f"`{row['fault']}`"
            ] = None
    yield from table("caught as", "faults", left=2)
    for stage, faults in caught.items():
        yield line(stage, ", ".join(faults))


def _compiled(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("", "## Kernels for chips that are not here, by their compilers", "")
    yield from text(
        "`benchmarks/tpu_fit.py` draws schedules, also from the top of the model's ranking "
        "(`benchmarks/results/tpu_fit-*.json`). *Accepted falsely*: legal for the model, refused by the compiler; "
        "*rejected falsely*: the reverse. *To the byte*: on-chip memory as predicted. *Tau*: Kendall's, between the "
        "model's times and the compiler's estimates, median over problems."
    )
    yield from table("chip", "schedules", "accepted falsely", "rejected falsely", "to the byte", "tau", left=1)
    for name, of in sorted(results.items()):
        if name.startswith("tpu_fit"):
            s = of["summary"]
            exact = f"{s['bytes_equal']} of {s['bytes_compared']}"
            counts = (str(s[count]) for count in ("schedules", "false_accepts", "false_rejects"))
            tau = number(s["tau_median"], 2) if s["tau_median"] is not None else "no estimates"
            yield line(card(of), *counts, exact, tau)
    yield ""
    chips = [of["summary"] for name, of in results.items() if name.startswith("mma_fit")]
    ways = [s for chip in chips for s in (chip, *(s for name, s in chip.items() if name.startswith("sm_")))]
    yield from text(
        "`benchmarks/mma_fit.py` compiles warp-level MMA matmuls by ptxas for sm_80, sm_86 and sm_89 "
        f"(`benchmarks/results/mma_fit-*.json`): {sum(s['schedules'] for s in ways)} compilations, "
        f"{sum(s['refused'] for s in chips)} refused, {sum(s['spilled'] for s in ways)} with spills, "
        f"{sum(s['other_onchip_bytes'] for s in chips)} with other on-chip bytes than predicted."
    )


def _section(title: str, name: str, result: Result) -> Iterator[str]:
    """A heading, and where the figures come from."""
    yield from ("", f"## {title}", "")
    yield from _source(name, result)


def _source(name: str, result: Result) -> Iterator[str]:
    made = result["environment"]
    when = f", {made['date'][:10]}" if made.get("date") else ""
    commits = ", ".join(f"`{commit.strip()[:7]}`" for commit in made["commit"].split(","))
    yield ""
    yield f"`{name}.json`: jax {made['jax']}{when}, {commits}."
    if missing := made.get("missing"):
        many = len(missing) > MOST_NAMED
        yield f"Not measured: {f'{len(missing)} others, which the file names' if many else ', '.join(missing)}."
    yield ""


if __name__ == "__main__":
    main()
