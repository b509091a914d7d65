"""`tools/gpu_check.sh` goes on after a failure, says what failed and ends non-zero. What its steps do needs a device."""

from __future__ import annotations

import subprocess

import pytest

from server import ROOT


@pytest.mark.parametrize(("python", "code", "word"), [("/bin/false", 1, "FAIL"), ("/bin/true", 0, "ok")])
def test_every_step_is_tried_and_summed_up(python, code, word):
    """Every step runs a stand-in for the interpreter that fails, or that does nothing well."""
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--cpu"], env={"PYTHON": python, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    summary = done.stdout.partition("== summary")[2]
    for step in ("environment", "a random model, 2 layers", "memory plan", "torch engine"):
        assert any(line.startswith(word) and step in line for line in summary.splitlines()), summary
    assert "left out, it needs CUDA" in summary
