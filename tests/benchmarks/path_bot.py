"""A bot that trades within minutes on a replay without fees: whether drawn paths pay for its spreads.

    scripts/benchmark path_bot [folder of kline files] [--minutes 120]

The bot learns with `support.searching_judge` on two weeks whose paths one seed drew. Then it trades a replay of a later
day over HTTP, five times, each time with another day and a secret seed that the service draws: it reads the prices of
each second, and enters where it expects a gain beyond the spread, and more than in all but the best twentieth of the
moments that it learned on. It closes at second 59. The replay is in lockstep, so that it waits for the bot, and orders
meet the next second.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightgbm
import numpy
from benchmarks.fidelity import LEARNED, SEEDS, TRIED
from benchmarks.figures import Figures, temporary_folder
from support.candles import FOLDER
from support.composed import composed
from support.market_fidelity import draw_together, log_paths
from support.searching_judge import DrawnMarket, expect, learn
from support.served import Client

from trader.core.clock import Clock, ceil_time, epoch_second, iso, moment_of
from trader.core.money import round_to
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.database.schema import apply_schema
from trader.market.domain.markets import MARKETS, Calm
from trader.market.sources.books import Grid
from trader.market.sources.files import Minutes, find_files, read_market
from trader.market.sources.rows import replayed_rows

PRESET: Final = "lighter-standard"
"""It has no fees, so spreads pay for what paths give away."""
RUNS: Final = 5
BEST: Final = 0.05
PATIENCE_S: Final = 5.0
NOTIONAL: Final = Decimal(5_000)
"""USD per trade: half the capital, which takes little of the depth."""
CAPITAL: Final = 10_000.0
ACCOUNT: Final = "bot"
MOMENTS: Final = 10_000
"""Random moments from which the least gain of an entry is learned."""
ENTRIES: Final = range(1, 56)
"""The seconds at which it may enter."""
CLOSE_AT: Final = 58
ARRIVES: Final = 30
"""How many milliseconds, and at least turns of the event loop, an order has to arrive while the market stands still."""
LOSING_MIN: Final = 4
"""In at least this many of the runs the bot must not end above its start."""


class Learned(NamedTuple):
    """What the bot has learned about a market.

    It enters at an expected gain of at least `least_bp` beyond the spread. `usual_bp` is the usual range of each
    recorded minute. Both are in basis points.
    """

    model: lightgbm.Booster
    least_bp: float
    calm: Calm
    lot: Decimal
    usual_bp: Mapping[int, float]


def prepare(recorded: Mapping[str, Minutes]) -> dict[str, Learned]:
    """Learn each market's moves on paths of the first seed."""
    marks = draw_together(recorded, SEEDS[0])
    drawn = {symbol: DrawnMarket.of(symbol, recorded[symbol], each) for symbol, each in marks.items()}
    rows, random, known = replayed_rows(PRESET, None, Decimal(0)), numpy.random.default_rng(1), {}
    for symbol, market in drawn.items():
        model, calm = learn(symbol, drawn, LEARNED, random), rows[symbol].calm
        places = random.integers(LEARNED.start, LEARNED.stop, MOMENTS)
        seconds = random.integers(ENTRIES.start, ENTRIES.stop, MOMENTS)
        score = numpy.abs(expect(model, symbol, drawn, places, seconds)) - market.spreads_bp(places, seconds, calm)
        usual_bp = dict(zip(recorded[symbol].minute, market.usual_bp.tolist(), strict=True))
        least_bp = max(0.0, float(numpy.quantile(score, 1 - BEST)))
        known[symbol] = Learned(model, least_bp, calm, rows[symbol].rules.lot, usual_bp)
        print(f"{symbol}: enters from {least_bp:+.2f} bp beyond the spread on", flush=True)
    return known


@dataclass
class Bot:
    """An account that trades over HTTP. `late` counts the orders that did not meet the second after their decision."""

    client: Client
    known: Mapping[str, Learned]
    before: dict[str, list[int]] = field(default_factory=dict)
    present: dict[str, list[int]] = field(default_factory=dict)
    held: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    sent: list[asyncio.Task[Any]] = field(default_factory=list)
    trades: int = 0
    late: int = 0

    async def call(self, procedure: str, **request: Any) -> Any:
        async with self.client.post(f"/api/rpc/{procedure}", json=request) as response:
            body = await response.json()
            assert response.status == 200, (procedure, body)
            return body

    async def run(self, clock: Clock, minutes: int) -> float:
        """Trade this many minutes after a first one. Return the gain in percent of the capital."""
        first = epoch_second(ceil_time(clock.now(), timedelta(minutes=1)))
        async with clock.busy():
            for second in range(first, first + 60 * (minutes + 1)):
                await clock.sleep_until(moment_of(second) + timedelta(milliseconds=1))
                await self.filled()
                await self.look(second)
                if second >= first + 60:
                    await self.act(second)
        account = (await self.call("simulator.getAccount", accountId=ACCOUNT))["account"]
        return 100 * (float(account["equity"]) / CAPITAL - 1)

    async def filled(self) -> None:
        """Wait for the orders of the previous second, whose books have come, before the market goes on."""
        if self.sent:
            await asyncio.wait(self.sent, timeout=PATIENCE_S)
            self.sent.clear()

    async def look(self, second: int) -> None:
        """Read the prices of a second."""
        for one in (await self.call("trading.getCryptoPrices"))["prices"]:
            symbol = one["symbol"]
            if second % 60 == 0:
                self.before[symbol], self.present[symbol] = self.present.get(symbol, []), []
            self.present[symbol].append(Grid(MARKETS[symbol]).nearest(one["price"]))

    async def act(self, second: int) -> None:
        """Enter where enough is expected, and close everything in time for the last second of the minute."""
        if second % 60 == CLOSE_AT:
            for symbol, entry in self.held.items():
                entered = (await entry)["order"]
                if entered["fills"]:
                    side = "sell" if entered["side"] == "buy" else "buy"
                    self.sent.append(self.order(second, symbol, side, entered["totalQuantity"], reduceOnly=True))
            self.trades += len(self.sent)
            self.held.clear()
        elif second % 60 in ENTRIES:
            place, at = numpy.array([1]), numpy.array([second % 60])
            shown = {symbol: self.shown(symbol, second) for symbol in self.known}
            for symbol in self.known.keys() - self.held.keys():
                known = self.known[symbol]
                (expected,) = expect(known.model, symbol, shown, place, at)
                if abs(expected) - shown[symbol].spreads_bp(place, at, known.calm)[0] >= known.least_bp:
                    price = Grid(MARKETS[symbol]).number(self.present[symbol][-1])
                    quantity = float(round_to(NOTIONAL / Decimal(price), known.lot))
                    self.held[symbol] = self.order(second, symbol, "buy" if expected > 0 else "sell", quantity)
                    self.sent.append(self.held[symbol])
        for _ in range(ARRIVES if self.sent else 0):
            await asyncio.sleep(0.001)

    def order(self, second: int, symbol: str, side: str, quantity: float, **more: Any) -> asyncio.Task[Any]:
        async def send() -> Any:
            request = {"accountId": ACCOUNT, "symbol": symbol, "side": side, "quantity": quantity, "leverage": 5}
            answer = await self.call("simulator.placeOrder", **request, **more)
            fills = answer["order"]["fills"]  # none where it is refused
            self.late += bool(fills) and fills[0]["timestamp"] >= iso(moment_of(second + 2))
            return answer

        return asyncio.create_task(send())

    def shown(self, symbol: str, second: int) -> DrawnMarket:
        """Return the previous minute and the present one, whose later prices the judge does not look at."""
        present = self.present[symbol]
        marks = [self.before[symbol], present + present[-1:] * (60 - len(present))]
        usual_bp = numpy.full(2, self.known[symbol].usual_bp[second // 60])
        return DrawnMarket(symbol, Minutes(), marks, log_paths(Grid(MARKETS[symbol]), marks), usual_bp)


async def trade(
    folder: Path, known: Mapping[str, Learned], starts: Sequence[int], minutes: int
) -> list[tuple[float, Bot]]:
    """Trade from each of these minutes on. Return the gains in percent, and the bots."""
    ended = []
    with temporary_folder() as place:
        async with EmbeddedPostgres(place / EMBEDDED_FOLDER) as server:
            for number, start in enumerate(starts):
                dsn = await server.ensure_database(f"bot_{number}")
                database = await Database.connect(dsn, size=1)
                await apply_schema(database)
                await database.close()
                recorded, begin = f"replay:{folder}", iso(moment_of(start * 60))
                async with composed(
                    dsn, MARKET_SOURCE=recorded, MARKETS=",".join(known), VENUE_PRESET=PRESET, REPLAY_SPEED="0",
                    REPLAY_START=begin,
                ) as (service, client):  # fmt: skip
                    bot = Bot(client, known)
                    ended.append((await bot.run(service.context.clock, minutes), bot))
                gain, bot = ended[-1]
                print(f"run {number + 1}: {gain:+.2f} % in {bot.trades} trades, {bot.late} orders late", flush=True)
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--minutes", type=int, default=120, help="how long each run trades; default: 120")
    options = parser.parse_args()
    recorded = {symbol: read_market(paths) for symbol, paths in find_files(options.folder).items()}
    figures, known = Figures(), prepare(recorded)
    minutes = next(iter(recorded.values())).minute
    spacing = len(TRIED) // RUNS
    starts = [minutes[TRIED.start + run * spacing] for run in range(RUNS)]
    ended = asyncio.run(trade(options.folder.resolve(), known, starts, options.minutes))
    figures.show("runs that end not above their start", sum(gain <= 0 for gain, _ in ended), "", at_least=LOSING_MIN)
    trades = sum(bot.trades for _, bot in ended)
    mean_bp = sum(gain for gain, _ in ended) / 100 * CAPITAL / (trades * float(NOTIONAL)) * 1e4 if trades else 0.0
    figures.show(f"mean of {trades:,} trades, net of the spread", mean_bp, "bp")
    figures.show("orders that met a later second", sum(bot.late for _, bot in ended), "", at_most=0)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
