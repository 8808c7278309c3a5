"""Every attack at its full length, or those that are named: ``python -m tests.hostile [NAME ...] [--seed N]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# Before JAX starts a device, as for the tests; processes that attacks start find what these find.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])


def main() -> None:
    from attacks import ATTACKS

    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(attack.name for attack in ATTACKS)}  [default: all]")
    parser.add_argument("--seed", type=int, default=1000, help="the first of the tries; a failure names its own")
    parser.add_argument("--tries", type=int, help="how often  [default: as the table has it]")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {attack.name for attack in ATTACKS}:
        parser.error(f"there is no attack {', '.join(sorted(unknown))}")
    failed = 0
    for attack in ATTACKS:
        if asked.names and attack.name not in asked.names:
            continue
        started = time.monotonic()
        tried = attack.run(asked.seed, asked.tries or attack.long)
        failed += len(tried.failures)
        notes = "".join(f"; {note}" for note in tried.notes)
        took_s = time.monotonic() - started
        print(f"{attack.name}: {tried.tries} tries, {len(tried.failures)} failures, {took_s:.0f} s{notes}", flush=True)
        for failure in tried.failures[:20]:
            print(f"  {failure}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
