"""Layers that XLA divides over devices: their local problems as a job, or their wall times; a process for many_gpus.py.

    python benchmarks/sharded_layers.py local tensor_parallel_64 4 --small
    python benchmarks/sharded_layers.py timed tensor_parallel_64 4 --small
    python benchmarks/sharded_layers.py timed data_parallel_step 2 --small  # of `scheduler.optimize`; local has none

Prints JSON, a part of the result each line. It holds the devices while it runs: no search can run beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from harness import told
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_models import Case, Jnp, Mlp, Tuned
from plain_steps import GPT, Shape, language, training
from whole_functions import Run, distances, kernel_times, wall_times, worst

import scheduler
from scheduler.core import hardware
from scheduler.dispatch import dispatch
from scheduler.measure.runner import environment
from scheduler.rewriting.decided import collectives
from search_spaces import load

# Rows of one of `tokens` are divided over the first axis of a mesh, columns of the hidden layer over the second.
AXES = ("data", "model")
# Of rounds for each version, in a rehearsal.
SMALL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A model and how many devices its tokens, and its columns, are divided over."""

    case: Case
    data: int
    model: int

    @property
    def name(self) -> str:
        return self.case.name

    def mesh(self) -> Mesh:
        """Of the first devices that are here.

        Raises:
          SystemExit: they are too few.
        """
        count = self.data * self.model
        if len(jax.devices()) < count:
            raise SystemExit(f"{self.name} is divided over {count} devices, and {len(jax.devices())} are here")
        devices = np.array(jax.devices()[:count]).reshape(self.data, self.model)
        return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def shardings(self) -> tuple[Any, Any]:
        """Of the tokens and the parameters: columns of the first products, and rows of the last (arXiv:1909.08053)."""
        on = functools.partial(NamedSharding, self.mesh())
        columns, rows = on(P(None, "model")), on(P("model", None))
        weights = {"gate": columns, "up": columns, "down": rows}
        return on(P("data", None)), tuple(dict(weights) for _ in range(self.case.model.layers))

    def jitted(self, ops: Any) -> Callable[..., Any]:
        given = self.shardings()
        return jax.jit(self.case.function(ops), in_shardings=given, out_shardings=given[0])


def cases(devices: int, small: bool) -> list[Sharded]:
    """What can be measured on so many devices."""
    models = {tokens: Mlp(tokens, layers=2, width=32, hidden=64) if small else Mlp(tokens) for tokens in (4096, 64)}
    if small:
        models[4096] = dataclasses.replace(models[4096], tokens=128)
    divided = [("tensor_parallel", 1, devices)]
    if devices >= 4 and devices % 2 == 0:
        divided.append(("data_and_tensor_parallel", 2, devices // 2))
    return [
        Sharded(Case(f"{how}_{tokens}", model), data, parts)
        for how, data, parts in divided
        for tokens, model in models.items()
    ]


def local(one: Sharded) -> Iterator[dict[str, Any]]:
    """The problems of a device as a job; nothing is computed."""
    arrays = jax.eval_shape(one.case.arguments)
    found = scheduler.problems(one.jitted(Tuned()), *_placed(arrays, one.shardings()))
    yield {"job": found.job(), "problems": [f"{row.operation.name} {told(row.problem)}" for row in found]}


def _placed(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), arrays, shardings)


def timed(one: Sharded, seconds: float = 0.0) -> Iterator[dict[str, Any]]:
    """A row in parts: microseconds a layer, who answered the local problems, what the devices tell each other."""
    args = jax.jit(one.case.arguments, out_shardings=one.shardings())()
    layers, chip = one.case.model.layers, hardware.detect()
    asked = _Asked()
    compiled = {"jnp": one.jitted(Jnp()).lower(*args).compile()}
    with asked:
        compiled["tuned"] = one.jitted(Tuned()).lower(*args).compile()
    runs: dict[str, Run] = {name: functools.partial(each, *args) for name, each in compiled.items()}
    off = distances(one.jitted(Jnp()), args, {name: run() for name, run in runs.items()})
    line: dict[str, Any] = {
        "case": one.name,
        "model": str(one.case.model),
        "mesh": {"data": one.data, "model": one.model},
        "gpus": one.data * one.model,
        **wall_times(runs, layers, jax.devices()[: one.data * one.model], seconds),
        "error": {name: max(each) for name, each in off.items()},
        "error_vs_jnp": worst(off["tuned"], off["jnp"]),
        "collectives": {name: collectives(each.as_text()) for name, each in compiled.items()},
        "answers": asked.answers(chip.platform),
        "hardware": chip.id,
        "environment": dataclasses.asdict(environment("")),
    }
    counts = [{kind: each["count"] for kind, each in line["collectives"][name].items()} for name in compiled]
    yield line | {"same_collectives": counts[0] == counts[1]}
    for name, run in runs.items():  # of all devices together
        yield {f"{name}_kernels_us": kernel_times(run, layers)}


# A training step of GPT-2 with AdamW, whose batch is divided over the devices -> the spec of parameters.
STEPS = {"data_parallel_step": P(), "sharded_parameters_step": P("data")}


def timed_step(name: str, devices: int, small: bool, seconds: float = 0.0) -> dict[str, Any]:
    """A row: microseconds a layer in plain JAX and by `scheduler.optimize`, and what that decided."""
    extents = (1, 2 * devices, 128, 256, 512, 4, 4, 1024) if small else (6, 8 * devices, 1024, 768, 3072, 12, 12, 50304)
    shape = Shape(*extents)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))

    def place(x: Any, spec: P) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec if x.ndim and x.shape[0] % devices == 0 else P()))

    built = training(language(GPT), shape, small=False, gated=False)
    weights, state, *batch = built.arguments()
    weights, state = (jax.tree.map(lambda x: place(x, STEPS[name]), each) for each in (weights, state))
    args = (weights, state, *(place(x, P("data")) for x in batch))
    plain = built.function
    optimized = scheduler.optimize(plain, **({"backends": ("interpret", "xla")} if small else {}))
    jax.block_until_ready(optimized(*args))
    (decision,) = optimized.decisions
    runs = {"jnp": lambda: plain(*args), "optimize": lambda: optimized(*args)}
    return {
        "case": name,
        "gpus": devices,
        **wall_times(runs, shape.layers, jax.devices()[:devices], seconds),
        "kept": decision.kept,
        "reason": decision.reason,
        "exchanged_bytes": {"jnp": decision.plain_exchanged, "optimize": decision.tuned_exchanged},
        "replaced": [str(each) for each in decision.replaced],
        "left": dict(decision.left),
        "hardware": hardware.detect().id,
    }


class _Asked(logging.Handler):
    """Within, it hears of every problem for which an answer is chosen, as the look-ups tell their logger."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.problems: dict[tuple[str, Any], str] = {}
        self._logger = logging.getLogger("scheduler")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        args = getattr(record, "raw_args", record.args)
        if record.name == "scheduler" and isinstance(args, tuple) and len(args) == 5:
            operation, problem, _, _, reason = args
            self.problems[str(operation), problem] = str(reason)

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def answers(self, platform: str) -> list[dict[str, Any]]:
        """Who answered each problem, and from which place."""
        found = []
        for (name, problem), reason in self.problems.items():
            operation = load(name)
            decision = dispatch.decide(operation, problem, platform, dispatch.options(operation))
            space = decision.kernel.space(problem, decision.target)
            schedule = dict(space.encode(vars(decision.schedule)))
            answer = {"backend": decision.kernel.backend, "schedule": schedule, "from": reason}
            found.append({"problem": f"{name} {told(problem)}", **answer, "recorded": decision.missed is None})
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("local", "timed"))
    parser.add_argument("case")
    parser.add_argument("devices", type=int)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    of: Mapping[str, Sharded] = {one.name: one for one in cases(options.devices, options.small)}
    if options.case in STEPS and options.what == "timed":
        found = timed_step(options.case, options.devices, options.small, SMALL_SECONDS * options.small)
        print(json.dumps(found), flush=True)
        return
    if options.case not in of:
        parser.error(f"no case {options.case} on {options.devices} devices; there are {', '.join(of)}")
    one = of[options.case]
    for part in local(one) if options.what == "local" else timed(one, SMALL_SECONDS * options.small):
        print(json.dumps(part), flush=True)


if __name__ == "__main__":
    main()
