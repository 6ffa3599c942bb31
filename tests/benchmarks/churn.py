"""Random mishaps in real runs, with what must hold afterwards: `python -m tests.benchmarks.churn`.

Each seed is a run of two to four regions and a coordinator, all processes of their own: any method and codec, settings and
mishaps drawn from the seed. With `--storage` they meet in one instead, and whoever serves there is killed or frozen in the
coordinator's place. A seed does not fix the moment of everything: it repeats what is done, not each interleaving. The
folder of a seed that fails is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_cocodc import OuterConfig
from hf_cocodc.coordinator.messages import AskLeave
from hf_cocodc.errors import CocodcError, InputError
from hf_cocodc.resolve import from_config
from hf_cocodc.settings.outer import METHODS
from hf_cocodc.settings.regions import LINKS
from tests.coordinator.regions import ask
from tests.net.storages import REACHES, buckets, folder_url
from tests.processes.coming_worker import HURRY, step_of
from tests.processes.forks import fork, rank_env, torch_master

from .churn_checks import Checks
from .churn_processes import Coordinator, InStorage, Life
from .churn_region import Setting, live

TIMEOUT_S, FAR_TIMEOUT_S = 5.0, 15.0
"""`regions.timeout_s`; also where each message takes seconds, in a bucket."""
FROZEN = {"short": 0.3, "long": 1.8}
"""For how many times as long a region stands still."""
BOUND_S, FAR_BOUND_S = 90.0, 300.0
"""After the last mishap somebody makes a step within so many seconds, until everything has ended; also in a bucket."""
STANDS_S = 3.0
"""Where no region makes a step for so long, the next mishap comes: it may be what the others wait for."""
STORAGES = {"folder": 0.0, "faults": 0.05, "s3": 0.0, "s3-faults": 0.02}
"""Where regions may meet, and which share of the requests goes wrong there."""
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "fp4", "topk", "lowrank")


def draw(rng: random.Random, steps: int) -> tuple[Setting, int]:
    """A setting and its number of regions."""
    while True:
        method, interval = rng.choice(METHODS), rng.choice((4, 6, 10))
        outer: dict[str, Any] = {"method": method, "sync_interval": interval, "digest_interval": 1}
        if rng.random() < 0.5:
            outer["codec"] = rng.choice(CODECS)
        if method in ("streaming", "eager", "cocodc"):
            outer["num_fragments"] = 2
        if "lowrank" in (outer.get("codec"), *(["lowrank"] if method == "dilocox" else [])):
            outer["rank"] = 2
        with contextlib.suppress(InputError):  # this method takes no such codec
            from_config(OuterConfig(**outer))
            break
    count = rng.randint(2, 4)
    regions: dict[str, object] = {}
    if rng.random() < 0.85:
        regions |= {"min": rng.choice((1, 1, 2)), "max": count + 1, "wait_s": 20.0}
        regions["when_one_ends"] = rng.choice(("auto", "continue"))
        if rng.random() < 0.3:
            regions["grace_s"] = rng.choice((4.0, "auto"))
    evals = rng.choice((0, 0, 10))
    return Setting(
        steps=steps, step_s=rng.uniform(0.03, 0.08), evals=evals, outer=outer, regions=regions
    ), count


class Churn:
    """The run of one seed.

    Attributes:
        wrong: what should not be.
        story: the mishaps, in words.
    """

    def __init__(
        self, seed: int, steps: int, folder: Path, link: str, url: str = "", faults: float = 0.0
    ) -> None:
        self._rng = random.Random(seed)
        self._folder, (self.setting, self._count) = folder, draw(self._rng, steps)
        is_far = url.startswith("s3:")
        self._timeout_s = FAR_TIMEOUT_S if is_far else TIMEOUT_S
        self.setting.regions.update(link=link, timeout_s=self._timeout_s)
        if isinstance(grace_s := self.setting.regions.get("grace_s"), float):
            self.setting.regions["grace_s"] = grace_s * self._timeout_s / TIMEOUT_S
        self.setting = replace(self.setting, faults=faults)
        self._checks = Checks(folder, self.setting, in_storage=bool(url))
        self.wrong = self._checks.wrong
        self.story: list[str] = []
        self._lives: list[Life] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._is_there, self._loses, self._stops = True, False, False
        self._anchor = self._rng.randrange(
            self._count
        )  # it is never killed, and does not leave: the run goes on
        self._crash = self._rng.random() < 0.15
        self._began = time.monotonic()
        self._bound_s = FAR_BOUND_S if is_far else BOUND_S
        self.coordinator: Coordinator | InStorage = InStorage(url) if url else Coordinator(folder)

    @property
    def is_elastic(self) -> bool:
        return "min" in self.setting.regions

    def __call__(self) -> None:
        """Let it happen, and note in `wrong` what should not be."""
        try:
            for region in range(self._count):
                self._start(region, 90.0, is_first=True)
            self._disturb()
            if self._crash:
                self._kill_everybody()
            self._end()
            self._checks.ends(self._lives, self.is_elastic, not self._crash, self._loses, self._stops)
            if self._crash or self._stops and any(3 in life.codes for life in self._lives):
                self._resume()
            self._checks.journals()
        finally:
            for life in self._lives:
                life.send(signal.SIGKILL)
            if (code := self.coordinator.end()) != 0:
                self.wrong.append(f"the coordinator ends with {code} at SIGTERM")

    # -- what happens

    def _disturb(self) -> None:
        rng, steps = self._rng, self.setting.steps
        at = sorted(rng.randrange(1, steps) for _ in range(rng.randint(3, 8)))
        at += [steps - rng.randint(1, 10)] if rng.random() < 0.5 else []
        mishaps = self._mishaps()
        plan = [
            (step, rng.choices(list(mishaps), [weight for weight, _ in mishaps.values()])[0]) for step in at
        ]
        seen, moved_at = -1, time.monotonic() + 60.0
        while plan and any(life.lives for life in self._lives):
            step = max(step_of(self._folder, life.region) for life in self._lives)
            if step != seen:
                seen, moved_at = step, max(moved_at, time.monotonic()) if step < 0 else time.monotonic()
            if step >= plan[0][0] or time.monotonic() - moved_at > STANDS_S:
                mishaps[plan.pop(0)[1]][1]()
                moved_at = time.monotonic()
            self._what_is_due()

    def _mishaps(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """By name: how often, and what happens."""
        fixed = {
            "coordinator dies": (2, self._coordinator_dies),
            "coordinator freezes": (2, self._coordinator_freezes),
            "short freeze": (2, lambda: self._freeze("short")),
            "term": (1, self._term),
            "kill": (1, self._kill),
        }
        elastic = {
            "kill": (4, self._kill),
            "long freeze": (2, lambda: self._freeze("long")),
            "leave": (2, self._leave),
            "join": (2, lambda: self._come(self._count)),
        }
        return {**fixed, **(elastic if self.is_elastic else {})}

    @property
    def _serving(self) -> Life | None:
        """The region that serves, unless it is to live on."""
        assert isinstance(self.coordinator, InStorage)
        pid = self.coordinator.serves
        alive = [life for life in self._lives if life.lives and life.region != self._anchor]
        return next((life for life in alive if pid in [each.pid for each in life.processes]), None)

    def _kill(self, chosen: Life | None = None) -> None:
        life = chosen or self._victim()
        if life is not None:
            one = len(life.processes) > 1 and self._rng.random() < 0.3
            self._note("kills one rank of" if one else "kills", life)
            life.done.add("kill one rank" if one else "kill")
            self._loses = True
            life.send(signal.SIGKILL, 1 if one else None)
            if self._rng.random() < 0.8 and self.is_elastic:
                self._later(self._rng.choice((0.0, 1.0, 4.0)), lambda: self._come(life.region))

    def _freeze(self, how: str, chosen: Life | None = None) -> None:
        life = chosen or self._victim(also_anchor=how == "short")
        if life is not None:
            self._note(f"freezes ({how})", life)
            life.done.add("freeze")
            self._loses |= how == "long"
            life.send(signal.SIGSTOP)
            self._later(FROZEN[how] * self._timeout_s, lambda: life.send(signal.SIGCONT))

    def _leave(self) -> None:
        life = self._victim()
        if life is not None:
            self._note("asks to leave:", life)
            life.done.add("leave")
            asked = (self.coordinator.address, "churn", AskLeave(region=life.region), 10.0)
            threading.Thread(target=_suppressed(ask), args=asked, daemon=True).start()

    def _come(self, region: int) -> None:
        """A lost region, or a new one, comes."""
        if not any(life.region == region and life.lives for life in self._lives):
            self._start(region, 20.0, is_first=False)
            self._note("starts", self._lives[-1])

    def _term(self) -> None:
        continues = self.setting.regions.get("when_one_ends") == "continue"
        life = self._victim(also_anchor=not continues)
        if life is not None:
            self._note("SIGTERM to", life)
            life.done.add("term")
            self._stops |= not continues
            life.send(signal.SIGTERM)

    def _coordinator_dies(self) -> None:
        if isinstance(self.coordinator, InStorage):
            self._note("kills who serves")
            self._kill(self._serving)
        elif self._is_there:
            self._note("kills the coordinator")
            self._is_there = False
            coordinator = self.coordinator
            coordinator.kill()

            def back() -> None:
                self._note("starts the coordinator")
                coordinator.begin()
                self._is_there = True

            self._later(self._rng.choice((0.0, 0.5, 3.0)), back)

    def _coordinator_freezes(self) -> None:
        if isinstance(self.coordinator, InStorage):
            self._note("freezes who serves")
            self._freeze(self._rng.choice(("short", "long")) if self.is_elastic else "short", self._serving)
        elif self._is_there:
            self._note("freezes the coordinator")
            coordinator = self.coordinator
            coordinator.send(signal.SIGSTOP)
            self._is_there = False

            def thaw() -> None:
                coordinator.send(signal.SIGCONT)
                self._is_there = True

            self._later(self._rng.choice((1.0, 4.0)), thaw)

    def _kill_everybody(self) -> None:
        self._note("kills everybody")
        for life in self._lives:
            life.done.add("kill")
            life.send(signal.SIGKILL)

    def _end(self) -> None:
        """Nothing happens any more: everything ends within a bound."""
        self._note("nothing more happens")
        while self._due:
            self._what_is_due()
        (self._folder / HURRY).touch()
        self._wait_for_all()

    # -- what must hold

    def _resume(self) -> None:
        """A run that has stopped, or that was killed, goes on."""
        self._note("resumes")
        before = len(self._lives)
        for region in range(self._count):
            self._start(region, 60.0, is_first=True, resume=True)
        self._wait_for_all()
        for life in self._lives[before:]:
            if set(life.codes) != {0}:
                self.wrong.append(f"resumed {life.name} ends with {life.codes}")
        self._checks.equal("-resumed")

    # -- helpers

    def _wait_for_all(self) -> None:
        """Until all have ended, as long as they make steps: on a busy machine a transfer may take 15 s."""
        steps, until = [-1], 0.0
        while any(life.lives for life in self._lives):
            before, steps = steps, [step_of(self._folder, life.region) for life in self._lives]
            if steps != before:
                until = time.monotonic() + self._bound_s
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        stays = [life.name for life in self._lives if life.lives]
        self.wrong += [
            f"{name} lives on, and nobody has made a step for {self._bound_s:g} s" for name in stays
        ]

    def _start(self, region: int, start_timeout_s: float, is_first: bool, resume: bool = False) -> None:
        ranks = 2 if is_first and not resume and self._rng.random() < 0.1 else 1
        name, master = (
            f"life{'-resumed' if resume else ''}-{len(self._lives)}-region-{region}",
            torch_master(),
        )
        numbers = {"REGION": region, "REGIONS": self._count, "COORDINATOR": self.coordinator.address}
        env = {f"HF_COCODC_{key}": str(value) for key, value in numbers.items()}
        env |= {key: os.environ[key] for key in REACHES if key in os.environ}
        if region >= self._count:
            env["HF_COCODC_JOIN"] = "1"
        whole = (live, str(self._folder), name, self.setting, start_timeout_s, resume)
        log = self._folder / f"log-{region}.txt"
        processes = [
            fork(*whole, log=log, **env, **rank_env(master, rank, ranks))  # type: ignore[arg-type,misc]
            for rank in range(ranks)
        ]
        self._lives.append(Life(region, name, processes, master, is_first))

    def _victim(self, also_anchor: bool = False) -> Life | None:
        alive = [life for life in self._lives if life.lives and (also_anchor or life.region != self._anchor)]
        return self._rng.choice(alive) if alive else None

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, do))

    def _what_is_due(self) -> None:
        for due in [each for each in self._due if each[0] <= time.monotonic()]:
            self._due.remove(due)
            due[1]()
        time.sleep(0.02)

    def _note(self, what: str, life: Life | None = None) -> None:
        steps = [step_of(self._folder, life.region) for life in self._lives]
        at, seconds = max(steps, default=0), time.monotonic() - self._began
        self.story.append(
            f"{time.strftime('%X')} {seconds:5.1f} s, step {at}: {what} {life.name if life else ''}"
        )


def _suppressed(call: Callable[..., object]) -> Callable[..., None]:
    def do(*args: object) -> None:
        with contextlib.suppress(CocodcError):
            call(*args)

    return do


def meeting_in(kind: str | None, folder: Path, seed: int) -> AbstractContextManager[str]:
    """The URL of an empty storage of this kind; empty for none."""
    if kind is None:
        return nullcontext("")
    return (
        buckets(STORAGES[kind], seed)
        if kind.startswith("s3")
        else nullcontext(folder_url(folder / "storage"))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="how many (default: 10)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="(default: 0)")
    parser.add_argument("--steps", type=int, default=100, help="inner steps of each run (default: 100)")
    parser.add_argument(
        "--link", choices=LINKS, default="auto", help="regions.link (default: auto, on one machine gloo)"
    )
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        help="regions meet there: in a folder, in a bucket of a server of moto's (pip install 'moto[server]' s3fs), or in either "
        "with requests that fail, and answers that are lost, late, torn or old: of a folder in the regions' own process, of a "
        "bucket at its server",
    )
    options = parser.parse_args()
    if options.storage and options.link != "auto":
        parser.error("--storage takes --link auto: regions that meet in a storage are linked through it")
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        folder, began = Path(tempfile.mkdtemp(prefix=f"churn-{seed}-")), time.monotonic()
        with meeting_in(options.storage, folder, seed) as url:
            churn = Churn(
                seed,
                options.steps,
                folder,
                options.link,
                url,
                STORAGES["faults"] * (options.storage == "faults"),
            )
            churn()
        outer = churn.setting.outer
        kind = f"{outer['method']} {outer.get('codec', '')}, {'elastic' if churn.is_elastic else 'fixed'}"
        sys.stdout.write(
            f"seed {seed}: {'FAILED' if churn.wrong else 'good'}, {kind}, {len(churn.story)} mishaps, "
            f"{time.monotonic() - began:.0f} s\n"
        )
        if churn.wrong:
            failed.append(seed)
            lines = [f"folder: {folder}", str(asdict(churn.setting)), *churn.story, *churn.wrong]
            sys.stdout.write("".join(f"    {line}\n" for line in lines))
        else:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
    sys.stdout.write(f"{options.seeds} seeds, {len(failed)} failed{': ' if failed else ''}{failed or ''}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
