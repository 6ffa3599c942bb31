"""`python -m tests.simulation SEED` shows what happens in one plan; `--count N` runs many from there on."""

import argparse
import time

from .schedules import random_plan, run, shown, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="of the plan, or of the first one")
    parser.add_argument("--count", type=int, default=1, help="plans")
    parser.add_argument("--failures", type=int, default=1, help="end after so many that fail")
    parser.add_argument("--small", action="store_true", help="shrink the plan first")
    args = parser.parse_args()
    if args.count == 1:
        plan = random_plan(args.seed)
        plan = shrink(plan) if args.small else plan
        print(shown(plan))  # noqa: T201
        print(run(plan, print))  # noqa: T201
        return 0
    began, events, calls, failures = time.perf_counter(), 0, 0, 0
    number = 0
    for number in range(args.count):
        outcome = run(random_plan(args.seed + number))
        events, calls = events + outcome.num_events, calls + outcome.num_calls
        if outcome.failure is not None:
            failures += 1
            print(f"seed {args.seed + number}: {outcome.failure[-1500:]}", flush=True)  # noqa: T201
            if failures >= args.failures:
                break
    seconds = time.perf_counter() - began
    print(  # noqa: T201
        f"{number + 1} plans, {failures} fail, {events} events, {calls} calls completed, {seconds:.1f} s: "
        f"{(number + 1) / seconds:.0f} plans and {events / seconds:.0f} events a second"
    )
    return min(failures, 1)


if __name__ == "__main__":
    raise SystemExit(main())
