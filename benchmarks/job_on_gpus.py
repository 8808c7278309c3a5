"""A job tuned on some of a host's GPUs by the command line: how long it took, what became of it, how busy they were."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from harness import ROOT

from scheduler.core.hardware import CPU
from scheduler.measure.gpu import Gpu
from scheduler.rewriting.equations import ProblemCount
from scheduler.rewriting.problems import job_text
from scheduler.search.jobs import Task
from scheduler.store.database import CACHE_VARIABLE

# Between two looks at how busy the GPUs are, and what a command may take to end once it is interrupted.
BUSY_EVERY_MS, ENDING_S = 500, 60.0


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a job came to.

    Attributes:
      seconds: wall time of the command, with the start and the end of its workers.
      results: as ``tile-scheduler tune --json`` prints them, in the order of the job, of the problems that ended.
      cut_off: it was interrupted because its time was up.
      busy: of each GPU, the share of the time in which any kernel ran; () where the driver does not tell.
    """

    seconds: float
    results: Sequence[Mapping[str, Any]]
    cut_off: bool
    busy: Sequence[float]

    @property
    def failed(self) -> list[str]:
        return [f"{one['task']}: {one['reason']}" for one in self.results if one["state"] == "failed"]


def job_of(tasks: Sequence[Task]) -> str:
    """The tasks as a job's text."""
    rows = tuple(ProblemCount(task.operation, task.problem, task.count, (), 0.0) for task in tasks)
    return job_text(rows, "Problems that were drawn")


def limited(job: str, budget: int, seconds: float | None = None) -> str:
    """The job, whose searches have so many trials each, and propose none after so many seconds."""
    return f"budget = {budget}\n" + (f"seconds = {seconds:.1f}\n" if seconds else "") + job


def visible(gpus: Sequence[Gpu], **more: str) -> dict[str, str]:
    """The environment of a process that sees these GPUs alone; a CPU where there are none."""
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.index for gpu in gpus)} if gpus else {"JAX_PLATFORMS": CPU.platform}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **seen, "PYTHONPATH": os.pathsep.join(paths), **more}


def tune(job: str, gpus: Sequence[Gpu], cache: str, most_s: float, cores: Collection[int] | None = None) -> Ran:
    """Runs ``tile-scheduler tune-job`` with `job` on all of `gpus`, and interrupts it after so many seconds.

    Args:
      cores: the CPU cores that it may use; None for all.

    Raises:
      SystemExit: it ended without a result.
    """
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job.toml"
        file.write_text(job)
        command = [sys.executable, "-m", "scheduler", "tune-job", str(file), "--devices", "all", "--json"]
        began = time.perf_counter()
        with _watched(gpus) as busy:
            environment = visible(gpus, **{CACHE_VARIABLE: cache})
            with _on(cores):
                process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            told, cut_off = _told(process, most_s)
        seconds = time.perf_counter() - began
    if cut_off and not told:  # before any problem was tuned
        return Ran(seconds, [], cut_off, busy)
    try:
        results = json.loads(told)["results"]
    except (ValueError, KeyError):
        raise SystemExit(f"the job ended with {process.returncode} and no result: {told[-500:]!r}") from None
    return Ran(seconds, results, cut_off, busy)


def verify(gpus: Sequence[Gpu], cache: str, cores: Collection[int]) -> dict[str, Any]:
    """Runs ``tile-scheduler verify`` on the first of `gpus`.

    Returns:
      ``verify_seconds``, the wall time of the command, and ``verdicts``, the state of each record.
    """
    command = [sys.executable, "-m", "scheduler", "verify", "--json"]
    began = time.perf_counter()
    with _on(cores):
        ran = subprocess.run(
            command, env=visible(gpus, **{CACHE_VARIABLE: cache}), stdout=subprocess.PIPE, text=True, check=False
        )
    seconds = time.perf_counter() - began
    return {"verify_seconds": seconds, "verdicts": [one["state"] for one in json.loads(ran.stdout)]}


@contextlib.contextmanager
def _on(cores: Collection[int] | None) -> Iterator[None]:
    """What is started within it runs on these cores."""
    if cores is None:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _told(process: subprocess.Popen[str], most_s: float) -> tuple[str, bool]:
    """All that it says, and whether it had to be interrupted."""
    try:
        return process.communicate(timeout=most_s)[0], False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it says what it has come to, and ends its workers
    try:
        return process.communicate(timeout=ENDING_S)[0], True
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], True


@contextlib.contextmanager
def _watched(gpus: Sequence[Gpu]) -> Iterator[list[float]]:
    """Fills the list, at the end, with the share of the time in which each GPU was busy."""
    shares: list[float] = []
    smi = shutil.which("nvidia-smi")
    if not gpus or smi is None:
        yield shares
        return
    command = [
        smi,
        f"--id={','.join(gpu.uuid for gpu in gpus)}",
        "--query-gpu=uuid,utilization.gpu",
        "--format=csv,noheader,nounits",
        f"--loop-ms={BUSY_EVERY_MS}",
    ]
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield shares
        finally:
            process.terminate()
            process.wait()
            shares += shares_of(file, [gpu.uuid for gpu in gpus])


def shares_of(file: IO[str], uuids: Sequence[str]) -> list[float]:
    """Means of what the driver said of each GPU, from lines of a GPU's name and a percentage; [] where it said none."""
    said: dict[str, list[float]] = {uuid: [] for uuid in uuids}
    file.seek(0)
    for line in file:
        uuid, _, percent = line.partition(",")
        if uuid.strip() in said and percent.strip().isdecimal():
            said[uuid.strip()].append(float(percent) / 100)
    return [statistics.fmean(each) for each in said.values()] if all(said.values()) else []
