"""The streams under load and abuse, for two minutes of simulated time; benchmarks/stream_load.py does the long run."""

import subprocess
import sys
from pathlib import Path


def test_abuse_of_the_streams_costs_the_others_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.stream_load", "2", "--shared"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSED" not in done.stdout
