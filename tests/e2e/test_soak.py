"""The short form of tools/soak.py: every temper of client at once, then nothing is left and nothing has drifted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from server import ROOT


@pytest.mark.timeout(400)
def test_two_minutes_of_mixed_load_leave_nothing_behind(model_path, tmp_path):
    """Under a ulimit of the plan's size. The figures are kept beside the test's other files."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "soak.py"), "--minutes", "2", "--eat", "0", "--clients", "6"],
        capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    (tmp_path / "soak.json").write_text(done.stdout)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == [] and done.returncode == 0
    assert report["capped"] and report["private_bytes"] <= report["plan_bytes"]
    assert report["answers"]["short 200"] > 3 and report["answers"]["malformed 400"] > 3
