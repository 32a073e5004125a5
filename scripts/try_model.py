#!/usr/bin/env python3
"""`trader models try` from a checkout: creates the environment if it is missing. Takes the command's arguments."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("trader") is None:  # this Python lacks the service: switch to its environment
    subprocess.run([ROOT / "scripts" / "make_environment", "run"], check=True)  # noqa: S603 - our own script
    python = ROOT / ".venv" / "bin" / "python"
    os.execv(python, [str(python), __file__, *sys.argv[1:]])  # noqa: S606 - as above

# ruff: noqa: E402 - the service cannot be imported before its environment exists
from trader.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["models", "try", *sys.argv[1:]]))
