"""Compute every figure of the worked example in docs/method.md from recorded candles.

    scripts/method_example FOLDER

FOLDER has the 1-minute candles of BTC, ETH and SOL for January 2025 as Binance kline files. The example's traders are
derived from the candles alone; intervals, verdicts, replicates, fingerprint and chain are computed by the same
functions as in the service.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Final, NamedTuple
from uuid import UUID

import numpy as np
from msgspec.structs import replace

from trader.agents.domain.entrants import Entrant, fingerprint
from trader.agents.domain.invocation_digest import ChainRecord, linked_record, record_digest
from trader.agents.domain.invocations import Invocation
from trader.agents.domain.models import contamination
from trader.core.canonical_json import canonical_json
from trader.core.clock import moment_of
from trader.core.errors import MarketDataError
from trader.core.intervals import ConfidenceInterval, percent_interval
from trader.market.domain.markets import Candle
from trader.market.sources.files import find_files, read_market
from trader.portfolio.domain.evidence import Statement, compare, judge_family, state_return
from trader.portfolio.domain.returns import ReturnSeries, holding_nothing, split_variance
from trader.record.domain.chain import NO_PAYLOAD, Anchor, ChainChecker, ChainLink, link_digest

HOUR: Final = timedelta(hours=1)
MINUTES: Final = 60
FEE: Final = 0.0005
LOOKBACK_HOURS: Final = 24
FORGOTTEN: Final = 0.1
"""How often a replicate misses an hour: the noise of the example."""


class Trader(NamedTuple):
    """A trader of the example: its hourly returns and the number of its completed trades."""

    series: ReturnSeries
    trades: int


def read_hours(folder: Path) -> dict[str, list[Candle]]:
    """Return the hourly candles of each market.

    :raises MarketDataError: there are none, or the example's markets are missing
    """
    candles = {}
    for symbol, paths in find_files(folder).items():
        minutes = read_market(paths)
        by_hour: dict[int, list[int]] = {}
        for place, minute in enumerate(minutes.minute):
            by_hour.setdefault(minute // 60, []).append(place)
        candles[symbol] = [
            Candle(moment_of(hour * 3600), *minutes.join(places[0], places[-1] + 1))
            for hour, places in sorted(by_hour.items())
            if len(places) == MINUTES
        ]
    if not {"BTC", "ETH", "SOL"} <= candles.keys():
        raise MarketDataError(f"{folder}: the example needs candles of BTC, ETH and SOL")
    return candles


def hold(hours: dict[str, list[Candle]]) -> ReturnSeries:
    """Return the hourly returns of buying three markets in equal parts, with fees, and holding them."""
    markets = [hours[symbol] for symbol in ("BTC", "ETH", "SOL")]
    worth = [
        (1 - FEE) * sum(market[hour].close / market[0].open for market in markets) / len(markets)
        for hour in range(len(markets[0]))
    ]
    return ReturnSeries(markets[0][0].open_time, np.diff(np.log(worth), prepend=0.0))


def follow(candles: Sequence[Candle], seed: int) -> Trader:
    """Return a trend follower that decides hourly: long BTC with all its equity after a 24-hour rise, otherwise flat.

    It randomly forgets one decision in ten.
    """
    rng = Random(seed)
    returns, trades, is_long = [], 0, False
    for hour, candle in enumerate(candles):
        value = 0.0
        if hour >= LOOKBACK_HOURS and rng.random() >= FORGOTTEN:
            wanted = candles[hour - 1].close > candles[hour - LOOKBACK_HOURS].open
            if wanted != is_long:
                value += math.log(1 - FEE)
                trades += is_long
                is_long = wanted
        after = candles[hour + 1].open if hour + 1 < len(candles) else candle.close
        returns.append(value + (math.log(after / candle.open) if is_long else 0.0))
    return Trader(ReturnSeries(candles[0].open_time, np.array(returns)), trades + is_long)


def show_interval(name: str, statement: Statement) -> None:
    """Print an estimate, its single-look interval, and the confidence sequence."""
    estimate = statement.estimate
    assert estimate is not None, statement.reason
    print(f"{name}: T = {estimate.hours} hours, mean {1e4 * estimate.mean:+.4f} bp an hour, B = {estimate.freedom}")
    print(f"  standard error √(Ω/T) = {1e4 * estimate.error:.4f} bp")
    print(f"  95 % interval of the return, one look: {_span(statement.interval_percent)}")
    print(f"  95 % confidence sequence, every look:  {_span(percent_interval(estimate.sequence, estimate.hours))}")


def show_verdicts(trader: Trader, references: dict[str, ReturnSeries]) -> None:
    """Print the paired differences between a trader and its references, as one family."""
    statements = [compare(trader.series, other) for other in references.values()]
    for name, statement, verdict in zip(references, statements, judge_family(statements), strict=True):
        print(f"to {name}: {_span(statement.interval_percent)} (one look); {verdict.word}")
        print(f"  p {statement.p_value:.3f}, corrected {verdict.p_value:.3f}")
        print(f"  {verdict.why}")


def show_replicates(replicates: dict[str, ReturnSeries]) -> None:
    """Print how the variance of replicates splits into noise and market."""
    noise = split_variance(replicates)
    assert noise is not None
    assert noise.noise_percent is not None
    print(f"replicates: {len(replicates)}, {noise.lowest_percent:+.2f} to {noise.highest_percent:+.2f} %, "
          f"standard deviation {noise.spread_percent:.2f} %")  # fmt: skip
    print(f"  of the variance of an hour {noise.noise_percent:.1f} % is their own noise, the rest the market's")


def show_entrant(began_at: datetime) -> Entrant:
    """Print the fingerprint of a small configuration; a real entrant's also covers its prompt, tools and limits."""
    text = canonical_json({"prompt": "Follow the trend.", "cadenceSeconds": 60}).decode()
    entrant = Entrant(
        model_id="example",
        number=1,
        fingerprint=fingerprint(text, "lab/one"),
        configuration=text,
        answered_by="lab/one",
        began_at=began_at,
    )
    print(f"entrant: {entrant.fingerprint}")
    return entrant


def show_chain(entrant: Entrant) -> None:
    """Print the findings in a chain of five records after an edit, after rebuilding the chain, and after a cut."""
    records = [
        ChainRecord(
            Invocation(
                id=UUID(int=number), model_id=entrant.model_id, status="completed", response=f"decision {number}",
                started_at=entrant.began_at + number * HOUR, finished_at=entrant.began_at + number * HOUR, entrant=1,
            ), entrant, (), (),
        )
        for number in range(1, 6)
    ]  # fmt: skip
    links = _links(records)
    print(f"chain: the head of {len(links)} records is {links[-1].digest.hex()}")
    anchors = [Anchor(3, links[2].digest, records[2].invocation.started_at, "outside")]
    edited = [*records]
    edited[1] = edited[1]._replace(invocation=replace(edited[1].invocation, response="I knew it"))
    for what, rows, chain in (
        ("record 2 is edited", edited, links),
        ("record 2 is edited and the chain is rebuilt", edited, _links(edited)),
        ("records 3 to 5 are cut off", records[:2], links[:2]),
    ):
        checker = ChainChecker(anchors)
        for link, record in zip(chain, rows, strict=True):
            checker.follow(link, linked_record(link, record))
        checker.finish()
        print(
            f"  {what}: {'; '.join(f'{finding.kind} at position {finding.position}' for finding in checker.findings)}"
        )


def _links(records: Sequence[ChainRecord]) -> list[ChainLink]:
    links: list[ChainLink] = []
    for position, record in enumerate(records, 1):
        digest = record_digest(record, NO_PAYLOAD)
        before = links[-1].digest if links else bytes(32)
        links.append(ChainLink(position, record.invocation.id, None, None, digest, link_digest(before, digest)))
    return links


def _span(interval: ConfidenceInterval | None) -> str:
    assert interval is not None
    return f"{interval.low:+.2f} to {interval.high:+.2f} %"


def show(folder: Path) -> None:
    """Print the whole example.

    :raises MarketDataError: the candles cannot be read
    """
    hours = read_hours(folder)
    btc = hours["BTC"]
    first, *others = (follow(btc, seed) for seed in range(3))
    start, end = first.series.start, first.series.end
    print(f"period: {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC")
    for cutoff in (date(2024, 10, 31), date(2025, 6, 30), None):
        print(f"  a model with training cutoff {cutoff or 'not stated'}: {contamination(cutoff, start)}")
    show_interval("follower", state_return(first.series, first.trades))
    show_verdicts(first, {"holding nothing": holding_nothing(first.series), "buy and hold": hold(hours)})
    show_replicates({str(number): trader.series for number, trader in enumerate((first, *others))})
    show_chain(show_entrant(start))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/method_example", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the candles of January 2025")
    try:
        show(parser.parse_args(arguments).folder)
    except MarketDataError as error:
        print(f"method_example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
