"""The documents match the code: everything they name exists, their tables are complete, and nothing is repeated."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trader.agents.variants import VARIANTS
from trader.api import rpc, streams
from trader.api.openapi import EXAMPLES
from trader.api.registry import REGISTRY, load_procedures
from trader.composition.service import jobs
from trader.core.clock import SystemClock
from trader.core.events import EventBus
from trader.core.money import format_decimal
from trader.market.domain.markets import MARKETS
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.providers import PROVIDERS
from trader.settings.settings import VARIABLES

ROOT = Path(__file__).parents[1]
PAGES = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
INTRODUCTION = "trader/api/reference/introduction.md"
DOCUMENTS = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", INTRODUCTION, *PAGES)
}
OTHER_NAMES = {
    "TRADER_TEST_POSTGRES",
    "TRADER_TEST_SDK",
    "TRADER_TEST_DSN",
    "TRADER_TEST_CANDLES",
    "TRADER_TEST_RELEASE",
    "TRADER_TEST_RERUN",
    "HYPOTHESIS_PROFILE",
    "FAULT_SCHEDULES",
    "REPLAY_KILL_ROUNDS",
    "STREAM_CUTS",
    "REPLAY_KILL_SEED",
    "PYTHON",
    "TRADER_KEY",
    "CYCLES",
}
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("trader", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
README_WORDS_MAX = 1_200
PAGES_MAX = 16
HOURS = timedelta(hours=8)
SENTENCE_CHARACTERS = 60
"""Shorter sentences may be repeated: they are labels rather than statements."""


def section(name: str, heading: str) -> str:
    """Return the text under a heading, up to the next heading of its level or above."""
    level = heading.partition(" ")[0]
    _, sections, rest = DOCUMENTS[name].partition(f"\n{heading}\n")
    assert sections, f"{name} has no {heading!r}"
    return re.split(rf"\n#{{1,{len(level)}}} ", rest, maxsplit=1)[0]


def rows(name: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables in a section, without the header rows."""
    lines = [line for line in section(name, heading).split("\n") if line.startswith("|")]
    heads = {place for place, line in enumerate(lines[1:]) if set(line) <= set("|- ")}
    body = [line for place, line in enumerate(lines) if place not in heads and place - 1 not in heads]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


def test_every_procedure_is_in_the_table_once() -> None:
    load_procedures()
    listed = [row[0].strip("`") for row in rows("docs/api.md", "## Procedures")]
    assert sorted(listed) == sorted(REGISTRY.procedures)
    assert f"All {len(listed)} procedures" in DOCUMENTS["README.md"]


async def test_every_stream_and_scheduler_is_named() -> None:
    async def nothing() -> bytes:
        return b""

    async def run(_: object) -> None:
        pass

    events = EventBus()
    loads = dict.fromkeys(("positions", "trades", "conversations", "portfolio", "candles"), nothing)
    broadcasters = streams.Broadcasters(loads, events, SystemClock())
    assert [row[0].strip("`") for row in rows("docs/api.md", "## Event streams")] == list(broadcasters.all)
    schedulers = {row[0].strip("`") for row in rows("docs/operation.md", "## Health")}
    assert {job.name for job in jobs(events, run, run)} <= schedulers


def test_every_error_code_is_in_the_table() -> None:
    listed = {(int(row[0]), row[1].strip("`")) for row in rows("docs/api.md", "## Errors")}
    known = {*rpc.STATUSES.values(), rpc.INTERNAL, rpc.NOT_SUPPORTED}
    assert listed == {(int(status), code) for status, code in known}


def test_documented_markets_match_the_exchange() -> None:
    listed = [row for row in rows("docs/exchange.md", "## Orders") if len(row) == 6]
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
    table = {row[0]: row[1:] for row in rows("docs/models.md", "## Variants") if len(row) == 5}
    assert table["max leverage"] == [str(variant.limits.leverage_max) for variant in VARIANTS.values()]
    head = next(line for line in section("docs/models.md", "## Variants").split("\n") if line.startswith("| |"))
    assert [cell.strip() for cell in head.split("|")[2:-1]] == list(VARIANTS)


def test_every_metric_is_in_the_table() -> None:
    files = (ROOT / "trader" / "api" / name for name in ("metrics.py", "requests.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    kinds = re.findall(r"(Counter|Gauge|Histogram|_counters|_gauges)\w*\(\s*\"trader_(\w+)\"", source)
    exposed = {f"{name}_total" if kind in {"Counter", "_counters"} else name for kind, name in kinds}
    assert len(exposed) == source.count('"trader_')
    listed = rows("docs/operation.md", "## Metrics")
    assert {name for row in listed for name in re.findall(r"`(\w+)`", row[0])} == exposed


def test_documented_doors_match_the_tables_and_each_has_its_test() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "make_doors.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [row[-1].strip("`").split("::") for row in rows("docs/doors.md", "## What you can add")]
    assert len(listed) == 13
    for file, test in listed:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_the_list_of_dependencies_is_complete() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    listed = [row[0] for row in rows("CONTRIBUTING.md", "### A dependency")]
    assert listed == [re.split("[<>=; ]", dependency)[0] for dependency in dependencies]


def test_documented_layers_match_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    assert " → ".join(contracts[0]["layers"]) in " ".join(DOCUMENTS["CONTRIBUTING.md"].split())


def test_the_readme_is_short_and_links_every_page() -> None:
    readme = DOCUMENTS["README.md"]
    assert len(readme.split()) <= README_WORDS_MAX
    assert all(f"]({page})" in readme for page in [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
    assert len(PAGES) <= PAGES_MAX


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_files_and_settings_exist(name: str) -> None:
    document = DOCUMENTS[name]
    for path in re.findall(r"(?<![\w/.-])(?:scripts|docs|tests|trader)/[\w./-]*\w", document):
        assert (ROOT / path).exists(), f"{name} names {path}"
    for path in re.findall(r"`([\w/]+/[\w/]+\.(?:py|sql))`", document):
        assert (ROOT / path).exists() or (ROOT / "trader" / path).exists(), f"{name} names {path}"
    for benchmark in re.findall(r"scripts/benchmark (\w+)(?=`| *#|$)", document, re.MULTILINE):
        assert benchmark == "NAME" or (ROOT / "tests" / "benchmarks" / f"{benchmark}.py").exists(), benchmark
    for script, arguments in re.findall(r"(scripts/(?!make_environment)[\w.]+)( [^`\n#]*)", document):
        text = SOURCES + (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"(?<!\S)--[a-z-]+", arguments):
            assert re.search(rf'"{option}"| {option} ]', text) or option == "--help", f"{name}: {script}{arguments}"
    settings = {variable.name for variable in VARIABLES.values()} | OTHER_NAMES
    providers = "|".join(PROVIDERS).upper()
    for variable in re.findall(r"(?<![\w.])([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)=", document):
        assert variable in settings or re.fullmatch(rf"({providers})_(BASE_URL|API_KEY(_?\d+)?)", variable), variable


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_in_toml_can_be_read(name: str) -> None:
    for example in re.findall(r"^```toml\n(.*?)^```", DOCUMENTS[name], re.DOTALL | re.MULTILINE):
        tomllib.loads(example)


def test_classes_and_functions_named_for_contributors_exist() -> None:
    """Every word in backticks, which may be a call without arguments, occurs in the code."""
    defined = set(re.findall(r"\b\w+\b", SOURCES))
    prose = re.sub(r"(?s)```.*?```", "", DOCUMENTS["CONTRIBUTING.md"])
    named = set(re.findall(r"`(_?[A-Za-z]\w*[A-Za-z])(?:\(\))?`", prose))
    assert {name for name in named - defined if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[name]):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), f"{name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{name}: there is no heading for {target}"


def sentences(document: str) -> Iterator[str]:
    """The sentences of a document, without code, generated parts and markup; a table cell is a separate paragraph."""
    text = re.sub(r"(?s)<!-- (\w+):start -->.*?<!-- \1:end -->", "", document)
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    text = re.sub(r"(?m)^ {4,}.*$", "", text)
    text = re.sub(r"(?m)^(\||#+ |[-*] |\d+\. )", r"\n\n", text).replace("|", "\n\n")
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?:;])\s", paragraph):
            yield re.sub(r"[\s*`]+", " ", sentence).strip().lower()


def test_no_sentence_stands_twice() -> None:
    counts = Counter(sentence for document in DOCUMENTS.values() for sentence in sentences(document))
    assert [sentence for sentence, count in counts.items() if count > 1 and len(sentence) > SENTENCE_CHARACTERS] == []


async def test_the_stops_of_example_orders_hold_on_every_seed() -> None:
    """Every example buys BTC on the market of the demo, whose seed the reader does not choose."""
    stops = [
        float(stop)
        for text in (*DOCUMENTS.values(), str(EXAMPLES))
        for stop in re.findall(r"""exitPlan["']: *\{["']stop["']: *([0-9.]+)""", text)
    ]
    end = datetime(2026, 11, 25, tzinfo=UTC)
    lowest = [
        min(candle.low for candle in await SyntheticSource(seed, ("BTC",)).candles("BTC", "4h", end - HOURS, end))
        for seed in range(150)
    ]
    assert len(stops) > 2
    assert max(stops) < min(lowest)


def test_guides_call_the_program_by_one_name_that_a_checkout_has() -> None:
    """After the first start, which makes the environment, a shell has `trader`."""
    mentions = {name: len(re.findall(r"(?<![/\w])scripts/run\b", text)) for name, text in DOCUMENTS.items()}
    allowed = {"README.md": 2, "docs/tutorial.md": 1, "docs/commands.md": 1}
    assert {name: mentions[name] for name in PAGES if mentions[name]} | {"README.md": mentions["README.md"]} == allowed
    for name in allowed:
        assert "`source .venv/bin/activate`" in DOCUMENTS[name], name
    assert "trader" in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
