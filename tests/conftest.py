"""Switches of the test run."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import settings

# Before torch is loaded: on models this small its threads, which wait for each other by spinning, cost a quarter of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch asks the name server for the name of 127.0.0.1 at every connection to a store. A lost question would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# No test asserts seconds. A case that failed can be made again on another machine.
settings.register_profile("here", settings(deadline=None, print_blob=True))
settings.load_profile("here")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test cuts the power. On a busy disk, tests that save often would wait for it most of the time.
os.fsync = lambda handle: None


gc.disable()  # until all modules are loaded: they make no garbage


def pytest_collection_finish() -> None:
    """All modules are loaded. Trainer collects garbage whenever it trains, and would look through all of them each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Coordinators that tests start leave no state file in the home of whoever runs them, and read none there."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_state_of_others() -> Iterator[None]:
    """Accelerate keeps one state a process, which refuses another precision, and Trainer sets variables of the environment for
    good, which processes that are started later would have: each test begins without.
    """
    with mock.patch.dict(os.environ):
        yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    if "torch" in sys.modules:
        sys.modules["torch"].use_deterministic_algorithms(False)


@pytest.fixture
def fresh_workers() -> Iterator[None]:
    """Data loaders' workers start anew: forked from a process with threads they may wait for a lock for ever, or die."""
    from tests.processes.forks import PRELOADED

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(PRELOADED)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="rewrite tests/golden/*.json (when: docs/internals/testing.md); write kept checkpoints that are missing",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Three processes share the tests where all are asked for: many wait, and leave a core idle. `-n` says otherwise."""
    is_all = config.args == config.getini("testpaths") and not config.option.usepdb
    is_worker = hasattr(config, "workerinput")
    if is_all and not is_worker and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = 3
        config.option.dist = "worksteal"
