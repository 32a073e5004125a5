"""Schemathesis against the running service: it answers any request according to its OpenAPI document."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from support.process import ServiceProcess, serving
from support.run_profile import is_nightly

pytestmark = pytest.mark.processes

CONFIG = Path(__file__).with_name("schemathesis.toml")
TOKEN = "open-sesame-0123456789"
TIMEOUT_S = 300


async def run(folder: Path, service: ServiceProcess, *arguments: str) -> str:
    """Run schemathesis against the service and return its report; fail on any finding."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"),
        *(f"{service.url}/api/openapi.json", "--no-color", "--seed", "1", *arguments),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except BaseException:
        process.kill()
        raise
    report = output.decode()
    assert process.returncode == 0, report
    # Some requests are not even HTTP; the server refuses these itself, before the service sees them.
    assert [line for line in service.traceback().splitlines() if "BadHttpMessage" not in line] == []
    return report


def counted(report: str, pattern: str) -> int:
    match = re.search(pattern, report)
    assert match is not None, report
    return int(match[1])


async def test_schemathesis_finds_nothing(tmp_path: Path, dsn: str) -> None:
    """With a token, which the service must demand wherever its document says so."""
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0", API_TOKEN=TOKEN) as service:
        # An endless stream never ends its answer; the streams have separate tests.
        examples = ("--max-examples", "12") if is_nightly() else ()
        named = ("--exclude-path-regex", "^/api/events", "--header", f"Authorization: Bearer {TOKEN}")
        report = await run(tmp_path, service, *named, "--workers", "2", *examples)
        _, document = await service.get("/api/openapi.json")
        operations = [
            path for path, item in document["paths"].items() if not path.startswith("/api/events") for _ in item
        ]
        assert counted(report, r"Tested: (\d+)") == len(operations)
        assert counted(report, r"(\d+) generated") > 500
        assert (await service.get("/health"))[0] == 200
