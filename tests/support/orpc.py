"""The real oRPC client from npm, called as a program."""

import asyncio
import fcntl
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "api" / "client"


def installed_packages(folder: Path = FOLDER) -> Path:
    """The folder of the npm packages, installed once from the lock file. Skips without npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    with (folder / "package-lock.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "node_modules" / f".installed-{hashlib.sha256(lock.read()).hexdigest()[:16]}"
        if not stamp.exists():
            install = ["npm", "ci", "--no-audit", "--no-fund"]
            done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
            if done.returncode != 0:
                pytest.skip(f"npm cannot install the packages: {done.stderr.strip()[-300:]}")
            stamp.touch()
    return folder / "node_modules"


def installed_client() -> Path:
    """The script that makes calls with the client."""
    installed_packages()
    return FOLDER / "calls.mjs"


async def run_client(script: Path, url: str, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the calls of each group concurrently with a separate client, against the RPC address `url`."""
    process = await asyncio.create_subprocess_exec(
        "node", str(script), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await asyncio.wait_for(process.communicate(json.dumps({"url": url, "groups": groups}).encode()), 60)
    results = json.loads(stdout)
    assert isinstance(results, list)
    return results
