"""The documents say what is: procedures, streams, errors, markets, settings and scripts that they name exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trader.api import rpc, streams
from trader.clock import SystemClock
from trader.domain.market.markets import MARKETS
from trader.domain.money import format_decimal
from trader.schedulers import jobs
from trader.services.events import EventBus
from trader.settings import DEFINITIONS, PROVIDERS
from trader.variants import VARIANTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
OTHER_NAMES = {
    "TRADER_TEST_POSTGRES",
    "TRADER_TEST_SDK",
    "TRADER_TEST_DSN",
    "TRADER_TEST_CANDLES",
    "HYPOTHESIS_PROFILE",
    "FAULT_SCHEDULES",
    "PYTHON",
}


def section(heading: str) -> str:
    """The text under a heading of the README, up to the next heading of its level or above."""
    level = heading.partition(" ")[0]
    _, found, rest = README.partition(f"\n{heading}\n")
    assert found, f"README.md has no {heading!r}"
    return re.split(rf"\n#{{1,{len(level)}}} ", rest, maxsplit=1)[0]


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables in a section, without their heads."""
    lines = [line for line in section(heading).split("\n") if line.startswith("|")]
    heads = {place for place, line in enumerate(lines[1:]) if set(line) <= set("|- ")}
    body = [line for place, line in enumerate(lines) if place not in heads and place - 1 not in heads]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


def test_every_procedure_is_in_the_table_once() -> None:
    rpc.load_procedures()
    listed = [row[0].strip("`") for row in rows("## Procedures")]
    assert sorted(listed) == sorted(rpc.REGISTRY.procedures)
    assert f"{len(listed)} procedures" in README


async def test_every_stream_and_scheduler_is_named() -> None:
    async def nothing() -> bytes:
        return b""

    async def run(_: object) -> None:
        pass

    events = EventBus()
    loads = dict.fromkeys(("positions", "trades", "conversations", "portfolio"), nothing)
    hubs = streams.Hubs(loads, events, SystemClock())
    assert [row[0].strip("`") for row in rows("## Streams")] == list(hubs.all)
    schedulers = {row[0].strip("`") for row in rows("### Health and logs")}
    assert {job.name for job in jobs(events, run, run)} <= schedulers


def test_every_error_code_is_in_the_table() -> None:
    listed = {(int(row[0]), row[1].strip("`")) for row in rows("### Refusals and errors")}
    known = {*rpc.STATUSES.values(), rpc.INTERNAL, rpc.NOT_SUPPORTED, rpc.TIMEOUT}
    assert listed == {(int(status), code) for status, code in known}


def test_the_markets_are_those_of_the_exchange() -> None:
    listed = [row for row in rows("### Orders") if len(row) == 6]
    assert listed == [
        [
            m.symbol,
            format_decimal(m.tick),
            format_decimal(m.lot),
            format_decimal(m.min_notional),
            str(m.leverage_max),
            format_decimal(m.maintenance_rate),
        ]
        for m in MARKETS.values()
    ]


def test_the_variants_have_their_limits() -> None:
    table = {row[0]: row[1:] for row in rows("## Variants and rule agents") if len(row) == 5}
    assert table["max leverage"] == [str(variant.limits.leverage_max) for variant in VARIANTS.values()]
    head = next(line for line in section("## Variants and rule agents").split("\n") if line.startswith("| |"))
    assert [cell.strip() for cell in head.split("|")[2:-1]] == list(VARIANTS)


def test_every_metric_is_in_the_table() -> None:
    source = (ROOT / "trader" / "api" / "metrics.py").read_text(encoding="utf-8")
    kinds = re.findall(r"(Counter|Gauge|Histogram|_counters|_gauges)\w*\(\s*\"trader_(\w+)\"", source)
    told = {f"{name}_total" if kind in {"Counter", "_counters"} else name for kind, name in kinds}
    assert len(told) == source.count('"trader_')
    assert {name for row in rows("### Metrics") for name in re.findall(r"`(\w+)`", row[0])} == told


def test_the_picture_of_the_house_shows_every_module() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "make_module_tree.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_exists(name: str) -> None:
    document = DOCUMENTS[name]
    for path in re.findall(r"(?<![\w/.-])(?:scripts|packaging|tests|benchmarks)/[\w./-]*\w", document):
        assert (ROOT / path).exists(), f"{name} names {path}"
    settings = {definition.name for definition in DEFINITIONS} | OTHER_NAMES
    providers = "|".join(PROVIDERS).upper()
    for variable in re.findall(r"(?<![\w.])([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)=", document):
        assert variable in settings or re.fullmatch(rf"({providers})_(BASE_URL|API_KEY(_?\d+)?)", variable), variable


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    headings = re.findall(r"^#+ (.+)$", DOCUMENTS[name], re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[name]):
        if target.startswith("#"):
            assert target[1:] in anchors, f"{name} has no heading for {target}"
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), f"{name} links to {target}"
