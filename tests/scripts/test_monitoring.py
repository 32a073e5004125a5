"""The alert rules and the Grafana dashboard: valid, and based on metrics that the running service has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.process import ROOT, serving

FOLDER = ROOT / "scripts" / "packaging" / "monitoring"
METRIC = re.compile(r"\b(?:trader|process)_[a-z_]+\b")


def rules() -> str:
    return (FOLDER / "alerts.yml").read_text(encoding="utf-8")


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_bytes())
    return board


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.processes
def test_promtool_accepts_the_rules_and_they_fire_as_they_should() -> None:
    checked = promtool("check", "rules", FOLDER / "alerts.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", FOLDER / "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.processes
def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": expression.replace("$job", "trader").replace("$instance", ".+")}
        for number, expression in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_tested_and_says_what_is_wrong() -> None:
    tests = (FOLDER / "alerts_test.yml").read_text(encoding="utf-8")
    names = re.findall(r"- alert: (\w+)", rules())
    assert len(names) == len(set(names)) == rules().count("summary:") == rules().count("severity:")
    assert [name for name in names if name not in tests] == []


def test_inhibit_rules_name_alerts_that_exist() -> None:
    names = set(re.findall(r"- alert: (\w+)", rules()))
    inhibited = set(re.findall(r"Trader\w+(?!\w|\.)", (FOLDER / "inhibit.yml").read_text(encoding="utf-8")))
    assert inhibited - names - {"TraderScheduler"} == set()


def test_panels_neither_overlap_nor_share_an_id() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.processes
async def test_every_named_metric_exists_in_the_running_service(tmp_path: Path, dsn: str) -> None:
    environ = {"DATABASE_URL": dsn, "NOTIFY_URL": "http://127.0.0.1:9/"}
    async with serving(tmp_path, **environ) as service, service.http.get(f"{service.url}/metrics") as response:
        text = await response.text()
    known = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
        known |= {family.name + suffix for suffix in suffixes}
    named = set(METRIC.findall(" ".join([*re.findall(r"expr: (.+?)\n(?= {8}\S)", rules(), re.DOTALL), *expressions()])))
    assert len(named) > 30
    known.add("trader_lag_seconds")  # of a follower
    assert named <= known, named - known
