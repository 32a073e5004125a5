#!/usr/bin/env python3
"""`trader models add` from a checkout, through `scripts/run`. Takes the command's arguments."""

import os
import sys
from pathlib import Path

RUN = Path(__file__).resolve().with_name("run")

if __name__ == "__main__":
    os.execv(RUN, [str(RUN), "models", "add", *sys.argv[1:]])  # noqa: S606 - our own script
