"""Rehearsals of live trading: running one, its report with a digest, and the report that a live start needs."""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trader import __version__
from trader.core.canonical_json import canonical_json
from trader.core.errors import StartError, TraderError
from trader.core.files import BYTES_MAX, decode_json, read_regular, replace_file
from trader.live.budget import Priority, spending_as
from trader.live.emptying import EMPTY_LOOKS, PATIENCE_S, PAUSE_S, empty
from trader.live.venue import Steps, VenueCloser
from trader.settings.checks import is_loopback

log = logging.getLogger("trader.live")

VALID_FOR: Final = timedelta(days=30)
OVERRIDE: Final = "override:"
_LOOKS: Final = 10 * EMPTY_LOOKS


class RehearsalStep(msgspec.Struct, frozen=True):
    name: str
    passed: bool
    detail: str


class RehearsalReport(msgspec.Struct, frozen=True):
    """The outcome of a rehearsal; `payloads` are the digests of the payloads kept beside it."""

    venue: str
    version: str
    url: str
    at: datetime
    steps: list[RehearsalStep]
    answers: dict[str, str]
    payloads: dict[str, str]
    digest: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.steps) and all(step.passed for step in self.steps)

    def computed_digest(self) -> str:
        return digest_of(msgspec.to_builtins(msgspec.structs.replace(self, digest="")))


async def rehearse(
    venue: str, url: str, closer: VenueCloser, steps: Steps, folder: Path, now: datetime, *, pause_s: float = PAUSE_S
) -> RehearsalReport:
    """Run the steps until one fails, empty the account, and write the report and the payloads to a folder."""
    if (found := await closer.look(acts=False)) is not None:
        raise StartError(f"The account is not empty, it has {found}: rehearse with one of its own.")
    done: list[RehearsalStep] = []
    try:
        for name, run in steps:
            try:
                with spending_as(Priority.CLOSE, PATIENCE_S):
                    done.append(RehearsalStep(name, True, await run()))
            except (TraderError, aiohttp.ClientError, OSError, TimeoutError, LookupError) as error:
                done.append(RehearsalStep(name, False, f"{type(error).__name__}: {error}"))
                break
    finally:
        is_empty = await empty(closer, looks=_LOOKS, pause_s=pause_s)
    done.append(RehearsalStep("empty", is_empty, "nothing is left" if is_empty else "the account is NOT empty"))
    digests = {name: digest_of(payload) for name, payload in closer.payloads.items()}
    report = RehearsalReport(venue, __version__, url, now, done, closer.answers, digests)
    report = msgspec.structs.replace(report, digest=report.computed_digest())
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    for name, content in {**closer.payloads, "rehearsal": report}.items():
        await asyncio.to_thread(replace_file, folder / f"{name}.json", msgspec.json.encode(content))
    return report


def require_rehearsal(where: str, venue: str, url: str, now: datetime) -> None:
    """Raise `StartError` unless a file has a passed rehearsal of this version and venue, or `where` is an override."""
    if where.startswith(OVERRIDE):
        log.warning("LIVE: without a rehearsal, as %s decided", where.removeprefix(OVERRIDE).strip())
        return
    file = Path(where)
    try:
        report = decode_json(read_regular(file, BYTES_MAX), RehearsalReport)
        problem = _problem(report, venue, url, now)
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise StartError(
            f"TRADING_MODE=live needs a rehearsal of this version at the venue, and LIVE_REHEARSAL={file} is none: "
            f"{problem}. Run `trader rehearse`, or set LIVE_REHEARSAL=override:NAME with the name of who decides."
        )


def _problem(report: RehearsalReport, venue: str, url: str, now: datetime) -> str | None:
    failed = [step.name for step in report.steps if not step.passed]
    reasons: Mapping[str, bool] = {
        "its digest does not match its content": report.digest != report.computed_digest(),
        f"it failed at {', '.join(failed) or 'the start'}": not report.passed,
        f"it is of the venue {report.venue}": report.venue != venue,
        f"it is of version {report.version}, and this is {__version__}": report.version != __version__,
        f"it is of {report.at:%Y-%m-%d}, not of the last {VALID_FOR.days} days": not (
            now - VALID_FOR <= report.at <= now + timedelta(days=1)
        ),
        f"it was at {report.url}, which is not the venue": report.url != url
        and is_loopback(urlsplit(report.url).hostname),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON."""
    return sha256(canonical_json(value)).hexdigest()
