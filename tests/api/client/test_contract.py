"""The TypeScript contract and its clients: compiled with tsc, and run against the service."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from support.orpc import FOLDER, installed_packages, run_client
from support.process import ROOT, serving

from trader.api.dashboard.reports import ReportKind

pytestmark = pytest.mark.processes

CONTRACT = (ROOT / "trader" / "api" / "reference" / "contract.d.ts").read_text(encoding="utf-8")
_ERROR = re.compile(r"^([\w./@-]+)\((\d+),\d+\): error (TS\d+)", re.MULTILINE)


@pytest.fixture(scope="session")
def packages() -> Path:
    return installed_packages()


@pytest.fixture
def project(tmp_path: Path, packages: Path) -> Path:
    """A frontend's folder: the packages, the contract, and a file that uses it."""
    (tmp_path / "node_modules").symlink_to(packages)
    for source in (*(FOLDER / "types").iterdir(), Path(__file__).parents[3] / "docs" / "examples" / "agent_orpc.ts"):
        (tmp_path / source.name).write_text(source.read_text())
    (tmp_path / "trader.d.ts").write_text(CONTRACT)
    return tmp_path


def compile_project(project: Path) -> set[tuple[str, int]]:
    """The locations of the compiler's errors, except within the packages."""
    compiler = project / "node_modules" / ".bin" / "tsc"
    done = subprocess.run(
        [compiler, "-p", project, "--pretty", "false"],
        cwd=project, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    places = {(file, int(line)) for file, line, _ in _ERROR.findall(done.stdout)}
    assert places or done.returncode == 0, done.stdout + done.stderr
    return {
        (file, line) for file, line in places if not file.startswith("node_modules/") and "/node_modules/" not in file
    }


def test_correct_use_compiles_and_wrong_use_does_not(project: Path) -> None:
    lines = (project / "wrong.ts").read_text().splitlines()
    wrong = {("wrong.ts", number) for number, line in enumerate(lines, start=1) if line.endswith("// wrong")}
    assert len(wrong) > 15
    # Errors in the contract itself are found too, not skipped as in an unused declaration.
    contract = project / "trader.d.ts"
    declared = contract.read_text().splitlines()
    contract.write_text("\n".join([*declared, "export type Broken = NoSuchType"]))
    assert compile_project(project) == wrong | {("trader.d.ts", len(declared) + 1)}


PAGES = ROOT / "trader" / "api" / "dashboard" / "static"
UNTYPED = {"reference.js"}  # a script of another page, which calls no procedure
PAGE_PROJECT = {
    "compilerOptions": {
        "allowJs": True, "noEmit": True, "target": "ESNext", "module": "ESNext", "moduleResolution": "Bundler",
        "lib": ["ESNext", "DOM", "DOM.Iterable"], "strict": False, "types": [], "skipLibCheck": True,
    },
    "files": [
        "app.js", *(f"report_{kind}.js" for kind in get_args(ReportKind)), "theme.js", "reference.js", "wrong.js",
    ],
}  # fmt: skip
WRONG = """// @ts-check
import { call } from './answers.js'
call('analytics.getLeaderboard', {}).then(({ entries }) => entries[0].modelNam)
call('analytics.getLeaderboard', { windw: 'run' })
"""


def test_the_modules_of_the_pages_fit_the_contract_and_the_formatter(tmp_path: Path, packages: Path) -> None:
    """A field that the wire does not have is an error in each module that says `@ts-check`, and all but one do."""
    project = tmp_path / "pages"
    shutil.copytree(PAGES, project)
    (project / "node_modules").symlink_to(packages)
    (project / "tsconfig.json").write_text(json.dumps(PAGE_PROJECT))
    (project / "wrong.js").write_text(WRONG)
    (project / "contract.d.ts").write_text(CONTRACT)
    assert compile_project(project) == {("wrong.js", 3), ("wrong.js", 4)}
    modules = sorted(PAGES.glob("*.js"))
    assert {each.name for each in modules if not each.read_text().startswith("// @ts-check")} == UNTYPED
    formatter: list[str | Path] = [
        packages / ".bin" / "prettier",
        "--config",
        FOLDER / "package.json",
        "--check",
        *modules,
    ]
    done = subprocess.run(formatter, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stderr}\nRun prettier --config tests/api/client/package.json --write on them."


def test_every_procedure_is_in_the_contract(tmp_path: Path) -> None:
    """The file is the one of the service, as test_openapi.py asserts."""
    assert CONTRACT.count("    input: ") == CONTRACT.count(": ProcedureClient<TContext, '") >= 18
    assert "any" not in re.sub(r"/\*\*.*?\*/|//.*", "", CONTRACT, flags=re.DOTALL)
    script, file = ROOT / "scripts" / "make_contract.py", tmp_path / "none" / "trader.d.ts"
    failed = subprocess.run(
        [sys.executable, "-P", script, file], capture_output=True, text=True, timeout=60, check=False
    )
    assert failed.returncode == 1
    assert failed.stderr.endswith("No such file or directory\n")
    assert "Traceback" not in failed.stderr


async def test_a_dashboard_with_tanstack_query(packages: Path, tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        process = await asyncio.create_subprocess_exec(
            "node", FOLDER / "tanstack.mjs", f"{service.url}/api/rpc", stdout=asyncio.subprocess.PIPE
        )
        stdout, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert service.traceback() == ""
    seen: dict[str, Any] = json.loads(stdout)
    assert seen["variants"] == ["Apex", "Trendsurfer", "Contrarian", "Sovereign"]
    assert len(seen["together"]) == 1
    assert seen["together"][0].endswith("/__batch__")
    assert (seen["again"], seen["cached"]) == (True, [])
    assert seen["leaderboard"] == "24h"
    assert seen["placed"] == "filled"
    assert [
        (position["symbol"], position["quantity"]) for position in seen["after"] if position["modelId"] == "default"
    ] == [("BTC", "0.01")]
    assert (seen["failed"]["code"], seen["failed"]["status"]) == ("VALIDATION_ERROR", 400)
    assert [issue["path"] for issue in seen["failed"]["issues"]] == [["window"]]
    assert [["trading", "getPositions"], {"input": {}, "type": "query"}] in seen["keys"]


async def test_every_client_calls_every_procedure(packages: Path, tmp_path: Path, dsn: str) -> None:
    inputs: dict[str, dict[str, Any]] = {
        "simulator.placeOrder": {"symbol": "BTC", "side": "buy", "quantity": 0.01},
        "simulator.cancelOrder": {"orderId": "none"},
        "models.getConversation": {"invocationId": "00000000-0000-5000-8000-000000000000"},
        "trading.getTrade": {"id": "00000000-0000-5000-8000-000000000000"},
        "trading.getCandles": {"symbol": "BTC", "interval": "1m"},
        "analytics.getTradeTotals": {"by": "day"},
        "analytics.getBehaviour": {"modelId": "apex-rules"},
        "analytics.getComparison": {"modelId": "apex-rules", "against": "contrarian-rules"},
        "operations.flatten": {"accountId": "apex-rules", "reason": "a test of clients"},
        "operations.halt": {"accountId": "apex-rules", "reason": "a test of clients"},
        "operations.approve": {"name": "nobody"},
    }
    names = re.findall(r"ProcedureClient<TContext, '([\w.]+)'>", CONTRACT)
    calls = [{"path": name.split("."), "input": inputs.get(name, {})} for name in names]
    kinds = [(link, flat) for link in ("single", "buffered", "streaming") for flat in (False, True)]
    asked = [{"link": link, "flat": flat, "calls": calls} for link, flat in kinds]
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        groups = await run_client(FOLDER / "calls.mjs", f"{service.url}/api/rpc", *asked)
        assert service.traceback() == ""
    for (link, _), group in zip(kinds, groups, strict=True):
        answers = dict(zip(names, group["answers"], strict=True))
        for name in ("simulator.cancelOrder", "models.getConversation", "trading.getTrade", "operations.approve"):
            assert answers.pop(name)["error"]["code"] == "NOT_FOUND"
        for name in [name for name in answers if name.startswith("agent.")]:  # these act for the account of a key
            assert answers.pop(name)["error"]["code"] == "UNAUTHORIZED", name
        assert [name for name, answer in answers.items() if "output" not in answer] == []
        assert answers["simulator.placeOrder"]["output"]["order"]["status"] == "filled"
        batched = [path for path in group["requests"] if path.endswith("/__batch__")]
        assert len(group["requests"]) == len(names) if link == "single" else 1 < len(batched) < len(names)
