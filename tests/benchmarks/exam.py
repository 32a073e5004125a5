"""Exams of entrants of known skill: whether shares, intervals and verdicts are right, and how fast states are decided.

  scripts/benchmark exam [--states 150] [--exams 200]

Scripted entrants decide once in a pool of states, through view, guard and exchange; exams are drawn from the pool. Two
entrants decide like the oracle in half and in three tenths of the states, and in no others, so that their shares are
known. Two know page and code: one infers from the past of a world what follows, and one does not; both also manage
positions in the second part, beside one that knows the law. Two cheats that know the future decide in moments of a
recording, with and without a mask: one finds its place by names, dates and prices, as a memory does, the other by the
shape of the last returns, as code can.

Exit code 1: a share is not the known one, who infers earns less than 0.8 (0.65 in the second part) or who does not
more than 0.25, fewer than 91 % of the intervals cover a share (95 % less three deviations), more than 5 % of exams
separate equal entrants, fewer than 80 % separate 0.5 from 0.3 within 700 states, a mask does not blind the memory, or a
decision of a rule agent takes more than 12 ms of one core.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from msgspec.structs import replace
from support.candles import write_walk
from support.exam_entrants import Cheat, Manager, NoiseTrader, Nothing, Oracle, TrendTrader, entrant
from support.exam_readers import Inferring, Reading

from trader.agents.domain.mask import Mask
from trader.agents.domain.strategy import Strategy
from trader.backtest.spec import Participants, conditions_of, settings_of
from trader.exam.domain.law import HORIZON
from trader.exam.domain.scores import MOMENTS, Scored, burnt, compare, differences, mean_of, share_of_oracle
from trader.exam.domain.worlds import Edge, World
from trader.exam.folder import schedule
from trader.exam.opening import ExamSpec, examining, sit, world_of, world_room
from trader.exam.pairs import RecordedRoom
from trader.exam.sitting import EVERY, EVERY_STEP, WorldRoom
from trader.market.sources.replay import ReplaySource

ENVIRON: Final = {"SIM_SEED": "0", "MARKETS": "BTC,ETH,SOL", "REPLAY_THINKING": "off"}
BEGIN: Final = datetime(2025, 3, 3, tzinfo=UTC)
STATES: Final = 700
DECISION_MS: Final = 12.0

Pool = dict[str, list[Scored]]


def entrants_of(world: World) -> list[Strategy]:
    one = Oracle(world, knows=(Edge.CARRY,))
    return [
        Oracle(world),
        Oracle(world, 0.5),
        one,
        Nothing(),
        NoiseTrader(world.number),
        TrendTrader(1),
        TrendTrader(-1),
        Inferring(),
        Reading(),
    ]


def managers_of(world: World) -> list[Strategy]:
    return [Manager(world), Nothing(), Inferring(), Reading()]


async def decide(room: WorldRoom, secret: str, count: int) -> Pool:
    """Return the decisions of the scripted entrants by name."""
    pool: Pool = {}
    made, every = (managers_of, EVERY_STEP) if room.is_managed else (entrants_of, EVERY)
    for state in schedule(secret, count, tuple(Edge)):
        world = world_of(room, secret, state)
        for sitting in await room.sit(world, [entrant(each, every=every) for each in made(world)]):
            pool.setdefault(sitting.entrant, []).append(sitting)
    return pool


async def of_rule_agents(secret: str, count: int) -> float:
    """Return the milliseconds of one core that a decision of a rule agent takes."""
    spec = ExamSpec(
        conditions=conditions_of(None, {}), entrants=Participants(every=EVERY), out=Path(), states=count, horizon="4h"
    )
    async with examining(spec) as examined:
        began = time.process_time()
        for state in schedule(secret, count, tuple(Edge)):
            await sit(examined.room, secret, state, examined.entrants)
        return 1000 * (time.process_time() - began) / count / len(examined.chosen.models)


def drawn(decided: Sequence[Scored], places: Sequence[int]) -> list[Scored]:
    """Return an exam of these states of the pool, renumbered."""
    return [replace(decided[place], state=number) for number, place in enumerate(places)]


def covered(decided: Sequence[Scored], known: float, exams: int, rng: np.random.Generator) -> float:
    """Return the part of exams of as many states as the pool whose interval covers the known share."""
    hits = 0
    for _ in range(exams):
        share = share_of_oracle(drawn(decided, rng.integers(0, len(decided), len(decided)).tolist()))
        hits += share is not None and share.interval is not None and share.interval.low <= known <= share.interval.high
    return hits / exams


def partly(oracle: Sequence[Scored], part: float, rng: np.random.Generator) -> list[Scored]:
    """Return the decisions of an entrant that decides like the oracle in a part of the states and in no others."""
    return [each if rng.random() < part else replace(each, score=0.0, value=0.0) for each in oracle]


def called(pair: Callable[[list[Scored]], tuple[list[Scored], list[Scored]]], pool: Pool, exams: int) -> float:
    """Return the part of exams that call a pair different within `STATES` states."""
    rng, oracle, calls = np.random.default_rng(5), pool["oracle-1.0-7"], 0
    for _ in range(exams):
        one, other = pair(drawn(oracle, rng.integers(0, len(oracle), STATES).tolist()))
        calls += compare(differences(one, other)).verdict != "not distinguishable yet"
    return calls / exams


def failures(pool: Pool, decision_ms: float, exams: int) -> Iterator[str]:
    """Yield what is not as promised, and print the figures."""
    rng = np.random.default_rng(1)
    planted = {name: [each for each in decided if each.kind == "planted"] for name, decided in pool.items()}
    oracle = planted["oracle-1.0-7"]
    carry = sum(each.oracle for each in oracle if each.edge is Edge.CARRY) / sum(each.oracle for each in oracle)
    for name, known in (("oracle-1.0-7", 1.0), ("oracle-0.5-7", 0.5), ("oracle-1.0-1", carry), ("nothing", 0.0)):
        share = share_of_oracle(planted[name])
        assert share is not None
        print(f"{name}: share {share.share:+.3f}, known {known:+.3f}")
        if abs(share.share - known) > 0.02:
            yield f"the share of {name} is {share.share:.3f}, not {known:.3f}"
    for name, least, most in (("inferring", 0.8, 1.0), ("reading", -9.0, 0.25)):
        share = share_of_oracle(pool[name])
        assert share is not None
        print(f"{name}: share of all states {share.share:+.3f}")
        if not least <= share.share <= most:
            yield f"the share of {name} is {share.share:.3f}, not from {least:g} to {most:g}"
    for name in ("noise", "trend+1-1.0", "trend-1-1.0"):
        share = share_of_oracle(planted[name])
        assert share is not None
        part = covered(planted[name], share.share, exams, rng)
        cost = burnt([each for each in pool[name] if each.kind == "null"])
        assert cost is not None
        print(f"{name}: share {share.share:+.3f}, burnt {cost.mean:.1f} bp; covered in {100 * part:.1f} %")
        if part < 0.91:
            yield f"the intervals of {name} cover its share in {100 * part:.1f} % of exams"
    equal = called(lambda exam: (partly(exam, 0.4, rng), partly(exam, 0.4, rng)), pool, exams)
    apart = called(lambda exam: (partly(exam, 0.5, rng), partly(exam, 0.3, rng)), pool, exams)
    print(
        f"equals called different: {100 * equal:.1f} %; 0.5 and 0.3 separated in {STATES} states: {100 * apart:.1f} %"
    )
    print(f"{decision_ms:.1f} ms of one core for a decision: 10,000 on two cores in {5 * decision_ms:.0f} s")
    if equal > 0.05:
        yield f"{100 * equal:.1f} % of exams tell equals apart"
    if apart < 0.8:
        yield f"{100 * apart:.1f} % of exams separate 0.5 from 0.3 within {STATES} states"
    if decision_ms > DECISION_MS:
        yield f"a decision takes {decision_ms:.1f} ms"


def mismanaged(pool: Pool) -> Iterator[str]:
    """Yield which share of the second part is not as promised, and print the shares."""
    for name, least, most in (
        ("manager", 0.9, 1.02),
        ("nothing", 0.0, 0.0),
        ("inferring", 0.65, 1.0),
        ("reading", -9, 0.25),
    ):
        share = share_of_oracle(pool[name])
        assert share is not None
        print(f"second part, {name}: share of all states {share.share:+.3f}")
        if not least <= share.share <= most:
            yield f"the share of {name} in the second part is {share.share:.3f}, not from {least:g} to {most:g}"


async def cheated(count: int, folder: Path) -> dict[str, list[Scored]]:
    """Return the decisions of the cheats in moments of a recording, with and without a mask, by entrant."""
    for number, (symbol, price) in enumerate({"BTC": 90_000, "ETH": 2_200, "SOL": 150}.items()):
        write_walk(folder / f"{symbol}USDT-1m-2025-03.csv", BEGIN, 21 * 1440, price=price, seed=number)
    settings = settings_of(ENVIRON)
    source = ReplaySource(folder, settings.markets, plain_rate=Decimal(0))
    await source.open()
    room = RecordedRoom(settings, source, ["15m"], "4h")
    minutes = {symbol: recording.minutes for symbol, recording in source.recordings.items()}
    closes = {symbol: dict(zip(own.minute, own.close, strict=True)) for symbol, own in minutes.items()}
    mask = Mask.hiding(
        frozenset({"symbols", "dates", "scale"}), {symbol: own.close[0] for symbol, own in minutes.items()}, BEGIN
    )
    cheats = [Cheat(clue, closes, HORIZON) for clue in ("memory", "shape")]
    entrants = [entrant(each, shown) for each in cheats for shown in (None, mask)]
    decided: dict[str, list[Scored]] = {}
    for number, moment in enumerate(room.draw("benchmark", count)):
        for sitting in await room.sit(number, moment, [*entrants, entrant(Nothing())]):
            decided.setdefault(sitting.entrant, []).append(sitting)
    return decided


def unmasked(decided: Mapping[str, Sequence[Scored]]) -> Iterator[str]:
    """Yield what a mask does not hide, and print the outcomes."""
    verdicts = {}
    for name, own in decided.items():
        outcome, compared = mean_of(own), compare(differences(own, decided["nothing"]), MOMENTS)
        assert outcome is not None
        verdicts[name] = compared.verdict
        print(f"{name}: outcome {outcome.mean:+.2f} of the volatility, {compared.verdict} (holding nothing)")
    if verdicts["cheat-memory"] != "better" or verdicts["cheat-memory:masked"] == "better":
        yield f"a memory of the recording is {verdicts['cheat-memory']}, and {verdicts['cheat-memory:masked']} masked"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=150)
    parser.add_argument("--exams", type=int, default=200)
    options = parser.parse_args()
    pool = asyncio.run(decide(world_room(ENVIRON, ("1m", "15m", "1h")), "benchmark", options.states))
    managed = world_room(ENVIRON, ("1m", "15m", "1h"), is_managed=True)
    wrong = list(mismanaged(asyncio.run(decide(managed, "benchmark", options.states))))
    decision_ms = asyncio.run(of_rule_agents("benchmark", options.states))
    wrong += failures(pool, decision_ms, options.exams)
    with TemporaryDirectory() as folder:
        wrong += unmasked(asyncio.run(cheated(min(100, options.states), Path(folder))))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
