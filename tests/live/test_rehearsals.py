"""The rehearsal: a fixed list of steps at the venue, a report with a digest, and no live start without one."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.fake_exchange import FakeExchange
from support.fake_ledger import ACCOUNT, KEY_INDEX, PLAIN_KEY
from support.live import PlainSigner
from support.process import ROOT
from support.scripted import START

from trader import __version__
from trader.core.errors import StartError
from trader.live.lighter.rehearsal import LighterRehearsal
from trader.live.rehearsals import RehearsalReport, RehearsalStep, rehearse, require_rehearsal
from trader.settings.forms import Secret

STEPS = [
    "prove", "open", "add", "part", "stop", "target", "refused change", "cancel", "cut socket", "kill -9 and restart",
    "empty",
]  # fmt: skip
MAINNET, TESTNET = "https://mainnet.example", "https://testnet.example"

CHILD = """
import asyncio, sys
sys.path[:0] = [{tests!r}, {root!r}]
from support.live import PlainSigner
from trader.live.lighter.rehearsal import LighterRehearsal
from trader.settings.forms import Secret
async def main():
    rehearsal = LighterRehearsal(PlainSigner({url!r}, {account}, {key_index}, Secret({key!r})), {url!r})
    await rehearsal.send_and_wait("BTC", int(sys.argv[1]))
asyncio.run(main())
"""


@pytest.fixture
async def venue() -> AsyncIterator[FakeExchange]:
    venue = FakeExchange()
    venue.frame_fault_share = 0
    await venue.start()
    yield venue
    await venue.stop()


async def rehearsed(venue: FakeExchange, folder: Path) -> RehearsalReport:
    signer = PlainSigner(venue.url, ACCOUNT, KEY_INDEX, Secret(PLAIN_KEY))
    places = {"tests": str(ROOT / "tests"), "root": str(ROOT), "url": venue.url}
    child = CHILD.format(**places, account=ACCOUNT, key_index=KEY_INDEX, key=PLAIN_KEY)
    rehearsal = LighterRehearsal(signer, venue.url, pause_s=0.001)
    steps = rehearsal.steps("BTC", ["-c", child], 0.001)
    try:
        return await rehearse("lighter", venue.url, rehearsal, steps, folder, START, pause_s=0)
    finally:
        await rehearsal.close()


@pytest.mark.processes
async def test_a_rehearsal_passes_answers_questions_and_keeps_payloads(venue: FakeExchange, tmp_path: Path) -> None:
    report = await rehearsed(venue, tmp_path / "rehearsal")
    assert [(step.name, step.passed) for step in report.steps] == [(name, True) for name in STEPS], report.steps
    assert report.answers["when a nonce counts"] == "at acceptance"
    assert report.answers["whether an id may be used again"] == "yes"
    assert report.answers["whether groups keep the ids of children"] == "yes"
    assert report.answers["price band of triggers"] == "6 % past the trigger: code 21735"
    assert venue.positions() == {}
    file = tmp_path / "rehearsal" / "rehearsal.json"
    assert msgspec.json.decode(file.read_bytes(), type=RehearsalReport) == report
    assert {path.stem for path in file.parent.glob("*.json")} == {"rehearsal", *report.payloads}
    assert PLAIN_KEY not in "".join(path.read_text() for path in file.parent.glob("*.json"))
    require_rehearsal(str(file), "lighter", venue.url, START + timedelta(days=30))
    with pytest.raises(StartError, match="which is not the venue"):
        require_rehearsal(str(file), "lighter", MAINNET, START)


@pytest.mark.parametrize(
    ("knob", "value", "failed"), [("has_bands", False, "refused change"), ("refusal", (1, "x"), "open")]
)
async def test_a_venue_that_behaves_otherwise_fails_the_rehearsal_and_is_left_empty(
    venue: FakeExchange, tmp_path: Path, knob: str, value: Any, failed: str
) -> None:
    setattr(venue, knob, value)
    report = await rehearsed(venue, tmp_path)
    assert [step.name for step in report.steps if not step.passed] == [failed]
    assert venue.positions() == {}
    with pytest.raises(StartError, match=f"it failed at {failed}"):
        require_rehearsal(str(tmp_path / "rehearsal.json"), "lighter", venue.url, START)


async def test_an_account_with_a_position_is_not_rehearsed_with(venue: FakeExchange, tmp_path: Path) -> None:
    venue.excuse("event_lag_s")
    venue.trade_by_hand("BTC", "1")
    with pytest.raises(StartError, match="not empty, it has 1 BTC, 0 orders"):
        await rehearsed(venue, tmp_path)
    assert venue.sent == []


def report_with(**more: Any) -> RehearsalReport:
    fields = {
        "venue": "lighter", "version": __version__, "url": TESTNET, "at": START, "answers": {}, "payloads": {},
        "steps": [RehearsalStep("open", True, "")], **more,
    }  # fmt: skip
    report = RehearsalReport(**fields)
    return msgspec.structs.replace(report, digest=fields.get("digest") or report.computed_digest())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"digest": "0"}, "its digest does not match"),
        ({"venue": "other"}, "it is of the venue other"),
        ({"version": "0.1"}, "it is of version 0.1"),
        ({"at": START - timedelta(days=30, seconds=1)}, "not of the last 30 days"),
        ({"at": START + timedelta(days=2)}, "not of the last 30 days"),
        ({"steps": []}, "it failed"),
        ({"steps": [RehearsalStep("open", False, "")]}, "it failed at open"),
        ({"url": "http://127.0.0.1:9"}, "not the venue"),
    ],
)
def test_only_a_fresh_and_passed_rehearsal_of_this_version_and_venue_allows_a_start(
    tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "rehearsal.json"
    file.write_bytes(msgspec.json.encode(report_with()))
    require_rehearsal(str(file), "lighter", MAINNET, START)
    file.write_bytes(msgspec.json.encode(report_with(**more)))
    with pytest.raises(StartError, match=reason):
        require_rehearsal(str(file), "lighter", MAINNET, START)


def test_a_start_without_a_rehearsal_needs_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StartError, match="Run `trader rehearse`, or set LIVE_REHEARSAL=override:NAME"):
        require_rehearsal(str(tmp_path / "none.json"), "lighter", MAINNET, START)
    (tmp_path / "none.json").write_text("[1]")
    with pytest.raises(StartError, match="is none"):
        require_rehearsal(str(tmp_path / "none.json"), "lighter", MAINNET, START)
    require_rehearsal("override:Ada", "lighter", MAINNET, START)
    assert "without a rehearsal, as Ada decided" in caplog.text
