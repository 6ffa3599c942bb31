"""Signals that ask a region to stop."""

from __future__ import annotations

import os
import signal

import pytest

from hf_cocodc.trainer import leaving
from hf_cocodc.trainer.leaving import first_signal


def test_two_sigterms_at_once_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals a rank, and so do its launcher and our command. A later one has its usual effect."""
    heard: list[str] = []
    usual: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: usual.append(number))
    try:
        with first_signal(heard.append):
            os.kill(os.getpid(), signal.SIGTERM)
            assert (heard, usual) == (["SIGTERM"], [signal.SIGTERM])  # an existing handler is called too
            os.kill(os.getpid(), signal.SIGTERM)
            assert (heard, usual) == (["SIGTERM"], [signal.SIGTERM])
            monkeypatch.setattr(leaving, "TOGETHER_S", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (heard, usual) == (["SIGTERM"], [signal.SIGTERM] * 2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_ctrl_c_counts_at_once() -> None:
    """Whoever presses it means it."""
    heard: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with first_signal(heard.append):
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ["SIGTERM"]
