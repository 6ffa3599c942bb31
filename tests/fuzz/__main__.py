"""The full run: `python -m tests.fuzz`; one kind: `python -m tests.fuzz sets`; one case: `python -m tests.fuzz sets --case 17`.

A case is made from its kind and its number alone. The program prints each fault with the case that made it.
"""

import argparse
import sys
import time

from tests.fuzz.harness import run
from tests.fuzz.inputs import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS, help="the kind of input (default: all)")
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--count", type=int, help="number of cases (default: the full number of the kind)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    options = parser.parse_args()
    total = 0
    for kind in [options.kind] if options.kind else KINDS:
        cases, full = KINDS[kind]
        numbers = range(options.first, options.first + (options.count or full))
        began = time.monotonic()
        faults = run(cases, [options.case] if options.case is not None else numbers)
        for number, fault in faults.items():
            print(f"--- python -m tests.fuzz {kind} --case {number}\n{fault}")  # noqa: T201
        count = 1 if options.case is not None else len(numbers)
        print(f"{kind}: {count} cases, {len(faults)} faults, {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
        total += len(faults)
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main())
