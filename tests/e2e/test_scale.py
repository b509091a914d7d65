"""Two routers, two engine hosts, a cut cable and a killed router, as tools/scale_demo.py shows it, in short."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from server import ROOT


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_no_request_without_a_byte_fails_when_a_host_is_cut_off_and_a_router_killed_and_sessions_stay():
    """(cases 14, 40) In network namespaces where they can be made, else on loopback addresses."""
    command = [sys.executable, str(ROOT / "tools" / "scale_demo.py"), "--json", "--clients", "8", "--seconds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == 0 and found["sessions_kept_their_backend"], found
    assert set(found["sessions_at_first"]) == {"e1", "e2"} and found["outcomes"]["whole"] > 50, found
    assert done.returncode == 0
