"""``python -m tests.search JUDGE``, or ``all``: draw cases until one breaks a promise."""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from tests.search.common import DEVICE, table_of

JUDGES = {name: f"tests.search.{name}_search" for name in ("resume", "update", "ranks")}


def main():
    """Run one judge or all; the exit code is 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__)
    parser.add_argument("judge", choices=[*JUDGES, "all"])
    parser.add_argument("--seed", type=int, help="of the first case; default: the time, in millions")
    parser.add_argument("--cases", type=int, help="how many")
    parser.add_argument("--minutes", type=float, help="how long, for each judge")
    parser.add_argument("--case", type=int, help="run this case alone, as a failure names it")
    parser.add_argument("--simplify", action="store_true", help="of a resume --case: make plain what need not be drawn")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the resume judge at a time, default 2")
    parser.add_argument(
        "--device", choices=["fake", "cuda"], help="of the judges resume and update; fake: as tests/device"
    )
    options = parser.parse_args()
    if options.device is not None:
        if options.judge not in ("resume", "update"):
            parser.error("--device is of the judges resume and update.")
        _use(options.device)
    seed, cases, minutes = options.seed, options.cases, options.minutes
    if options.case is not None:
        seed, cases, minutes = options.case, 1, None
    elif cases is None and minutes is None:
        parser.error("give --cases, --minutes or --case.")
    if options.simplify and options.case is None:
        parser.error("--simplify needs a --case.")
    seed = int(time.time()) % 100_000 * 1_000_000 if seed is None else seed
    failed = False
    for name in JUDGES if options.judge == "all" else [options.judge]:
        judge = importlib.import_module(JUDGES[name])
        if options.case is not None and hasattr(judge, "show"):
            print(judge.show(seed), flush=True)
        if options.simplify and hasattr(judge, "simplified"):
            print(judge.simplified(seed), flush=True)
            continue
        result = judge.run(seed, cases, minutes, **({"jobs": options.jobs} if name == "resume" else {}))
        print(table_of(result), flush=True)
        failed = failed or bool(result.failures)
    return 1 if failed else 0


def _use(device):
    """Train on it, here and in the processes of the resume judge; before torch is imported."""
    os.environ[DEVICE] = "cuda"
    if device == "fake":
        from tests.device import fake

        os.environ[fake.VARIABLE] = "cuda"
        startup = str(Path(fake.__file__).parent / "startup")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH"))))
        fake.load("cuda")


if __name__ == "__main__":
    sys.exit(main())
