"""What the environment says holds for calls that say nothing themselves, and what it can't say is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import composattn as ca
from composattn import backends, settings
from composattn.errors import UnsupportedOption

ROOT = Path(__file__).parents[2]
CALL = "import torch, composattn as ca; q = torch.ones(1, 1, 4, 8); "


def said(code: str, **settings: str) -> str:
    """What a new process prints, errors too."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSATTN_")}
    environment = {**plain, "PYTHONPATH": str(ROOT), **settings}
    command = [sys.executable, "-c", CALL + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_each_setting_stands_for_what_a_call_leaves_out() -> None:
    code = (
        "options = ca.Attention().options; print(options.backend, options.deterministic, ca.debug_checks);"
        "mine = ca.Attention(backend='streaming', deterministic=False).options;"
        "print(mine.backend, mine.deterministic, ca.call.checks.are_on);"
        "import logging; logging.getLogger('composattn').info('a word')"
    )
    lines = said(
        code,
        COMPOSATTN_BACKEND="reference",
        COMPOSATTN_DETERMINISTIC="1",
        COMPOSATTN_DEBUG_CHECKS="1",
        COMPOSATTN_LOG="info",
    ).splitlines()
    assert lines[0].startswith("reference True")
    assert lines[1:] == ["streaming False True", "a word"]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("", ["a word"]),
        ("logging.basicConfig();", ["INFO:composattn:a word"]),
        ("log.addHandler(logging.StreamHandler());", ["a word"]),
    ],
)
def test_a_line_of_the_log_is_written_once(code: str, lines: list[str]) -> None:
    log = "import logging; log = logging.getLogger('composattn');"
    assert said(f"{log}{code}log.info('a word')", COMPOSATTN_LOG="INFO").splitlines() == lines


def test_a_call_runs_on_the_backend_that_the_environment_names() -> None:
    assert "backend     reference" in said("print(ca.Attention().explain(q, q, q))", COMPOSATTN_BACKEND="reference")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"COMPOSATTN_BACKEND": "hoper"}, "COMPOSATTN_BACKEND: no backend 'hoper'; there are"),
        ({"COMPOSATTN_DETERMINISTIC": "yes"}, "COMPOSATTN_DETERMINISTIC='yes'; it must be 0 or 1"),
        ({"COMPOSATTN_LOG": "loud"}, "COMPOSATTN_LOG='LOUD'; it must be one of DEBUG, INFO, WARNING, ERROR"),
        ({"COMPOSATTN_BACKEND": "hopper"}, "COMPOSATTN_BACKEND: backend 'hopper' can't serve this call: q lies on cpu"),
    ],
)
def test_what_a_setting_can_not_be_is_refused(setting: dict[str, str], words: str) -> None:
    assert words in said("ca.attention(q, q, q)", **setting)


@pytest.mark.parametrize("words", ["abc", "nan", "-1"])
def test_a_limit_that_is_no_number_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSATTN_EMULATOR_SECONDS", words)
    with pytest.raises(UnsupportedOption, match=f"COMPOSATTN_EMULATOR_SECONDS='{words}'; it must be a number above 0"):
        settings.number("COMPOSATTN_EMULATOR_SECONDS", 600.0)
    monkeypatch.setenv("COMPOSATTN_EMULATOR_SECONDS", "")
    assert settings.number("COMPOSATTN_EMULATOR_SECONDS", 600.0) == 600.0


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_queries_of_8_bits_go_as_the_backend_of_the_environment_takes_them(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as the kernels of the GPU would, which multiply them as they are."""
    made = ca.quantize(*(torch.randn(1, 2, 70, 64, dtype=torch.bfloat16) for _ in range(3)))
    wanted = ca.attention(*made, backend=backend)
    monkeypatch.setattr(backends, "default_for", lambda device: "hopper")
    monkeypatch.setattr(settings, "BACKEND", backend)
    assert torch.equal(ca.attention(*made), wanted)
