"""A process that stands still, without a signal: the tests' own threads go on."""

import functools
import time
from types import SimpleNamespace

import pytest

from hf_cocodc.net import awake


def standing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Raise `s` of what is returned by the seconds for which this process is to have stood still, all at once."""
    stood, monotonic = SimpleNamespace(s=0.0), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + stood.s)
    # the clock of other tests goes on as it did
    monkeypatch.setattr(awake, "_shared", functools.cache(awake._shared.__wrapped__))
    return stood
