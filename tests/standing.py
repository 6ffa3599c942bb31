"""A process that stands still, without a signal: the tests' own threads go on."""

import functools
import time
from types import SimpleNamespace

import pytest

from hf_cocodc.net import awake


def standing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Raise `s` of what is returned by the seconds for which this process is to have stood still, all at once."""
    stood = SimpleNamespace(s=0.0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood.s, sleep=time.sleep)
    monkeypatch.setattr(awake, "time", clock)
    # other tests keep theirs
    monkeypatch.setattr(awake, "_shared", functools.cache(awake._shared.__wrapped__))
    return stood
