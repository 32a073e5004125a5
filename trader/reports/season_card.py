"""Result card of a season: every figure of it, computed from the rows and facts of a bundle and from nothing else."""

import math
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

import msgspec

from trader.api.schemas.analytics import Percent
from trader.api.schemas.behaviour import BehaviourView
from trader.api.schemas.common import Timestamp, Wire, iso
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.domain.portfolio.board import NO_SEASON, BoardRules
from trader.domain.portfolio.statistics import max_drawdown, percent
from trader.reports.season_bundle import Bundle, SeasonFacts, SeasonRows, rows_of
from trader.reports.season_record import Difference, compare_record
from trader.results import Table
from trader.services.portfolio.behaviour import make_behaviour, present_period
from trader.services.portfolio.evidence import EvidenceReport, make_report
from trader.services.portfolio.luck import NoLuck
from trader.services.portfolio.run_statistics import RunStatistics, count_contenders

FORMAT: Final = 1

_TOLERANCE: Final = 1e-9
"""Figures of two machines may differ in their last digits."""


class Period(Wire, kw_only=True):
    """From the start of the first run to the end of the last whole hour. `marketsTraded` have a position in it."""

    started_at: Timestamp | None
    until: Timestamp
    markets_traded: list[str]


class Trials(Wire, kw_only=True):
    """How often luck had a chance.

    `contenders` are all entrants of the runs, earlier ones too, replicates as one; `runs` all runs of their accounts,
    in a season those of it, `replicates` the accounts that share a configuration with another. `comparisons` are those
    of the family, which errs with probability `alpha` at most.
    """

    models: int
    contenders: int
    runs: int
    replicates: int
    comparisons: int
    alpha: float


class NoiseFloor(Wire, kw_only=True):
    """What could not have been seen.

    `smallestDifference` is the least true difference to holding nothing that any entrant's season would have shown in
    four of five cases, in percent over its hours; `ownNoise` the median share of an hour's variance in which
    replicates differ from each other, in percent. Null without any.
    """

    smallest_difference: Percent | None
    own_noise: Percent | None


class AccountCard(Wire, kw_only=True):
    """An account in its current run: amounts in the quote currency, model cost in USD.

    `traded` is the notional of its `fills`, `maker` the share of them that were maker, in percent. `fees` and `funding`
    are of the positions that were closed, `drawdown` is the largest fall from a running peak of the hourly equity.
    """

    model_id: str
    provider: str
    router_model: str
    initial_capital: float
    equity: float
    drawdown: Percent | None
    fills: int
    maker: Percent | None
    traded: float
    fees: float
    funding: float
    model_cost_usd: float | None
    cycles_decided: int
    cycles_due: int


class BehaviourCard(Wire, kw_only=True):
    """How a model traded."""

    model_id: str
    behaviour: BehaviourView


class Card(Wire, kw_only=True):
    """The result of a season. `season` is what the rows do not say: rules, market, frictions, code and record.

    `evidence` is what `analytics.getEvidence` answers at the end, by the rules of the season, without luck. `decisions`
    counts the calls by tool and status. `unrecorded` counts the rows of each table that are in no record, since they
    are from before the first or newer than the last. `digests` are the SHA-256 of the other files of the bundle.
    """

    format: int
    season: SeasonFacts
    period: Period
    trials: Trials
    noise_floor: NoiseFloor
    accounts: list[AccountCard]
    evidence: GetEvidenceOutput
    behaviour: list[BehaviourCard]
    decisions: dict[str, int]
    unrecorded: dict[str, int]
    digests: dict[str, str]


def card_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of `card.json`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Card)}


async def make_card(bundle: Bundle) -> Card:
    """Return the card of a bundle."""
    rows, until, season = rows_of(bundle), bundle.facts.end, bundle.facts.season
    report = await make_report(
        rows.models, rows.runs, rows.baselines, NoLuck(), until, season=season, accounts=rows.accounts
    )
    return Card(
        format=FORMAT,
        season=bundle.facts,
        period=Period(
            started_at=min((iso(run.run.started_at) for run in rows.runs.values()), default=None),
            until=iso(until),
            markets_traded=sorted({part.symbol for parts in rows.parts.values() for part in parts}),
        ),
        trials=_trials(rows, NO_SEASON if season is None else season.rules.board),
        noise_floor=_noise_floor(report),
        accounts=[_account(key, run, rows, bundle.tables["fills"]) for key, run in sorted(rows.runs.items())],
        evidence=GetEvidenceOutput.of("run", report),
        behaviour=[
            BehaviourCard(
                model_id=key,
                behaviour=BehaviourView.of(
                    make_behaviour(period, rows.runs, rows.parts, rows.changes, rows.closes, until)
                ),
            )
            for key, run in sorted(rows.runs.items())
            if (period := present_period(run)) is not None
        ],
        decisions=_decisions(bundle.tables["decisions"]),
        unrecorded=dict(compare_record(bundle).unrecorded),
        digests=dict(bundle.digests),
    )


def is_decided(card: Card) -> bool:
    """Return whether every comparison of the present entrants has a verdict for or against."""
    verdicts = [
        each.verdict for entrant in card.evidence.entrants if entrant.ended_at is None for each in entrant.differences
    ]
    return bool(verdicts) and "not distinguishable yet" not in verdicts


def _trials(rows: SeasonRows, rules: BoardRules) -> Trials:
    contenders = count_contenders(rows.runs.values())
    present = [period.contender for run in rows.runs.values() if (period := present_period(run)) is not None]
    return Trials(
        models=len(rows.runs),
        contenders=contenders,
        runs=sum(rows.accounts[key].runs for key in rows.runs if key in rows.accounts),
        replicates=sum(present.count(each) > 1 for each in present),
        comparisons=rules.family(contenders),
        alpha=rules.level,
    )


def _noise_floor(report: EvidenceReport) -> NoiseFloor:
    visible = [
        each.verdict.visible_percent
        for entrant in report.entrants
        for each in entrant.comparisons
        if each.reference == "holdNothing" and each.verdict.visible_percent is not None
    ]
    noise = [
        entrant.replicates.noise_percent
        for entrant in report.entrants
        if entrant.replicates is not None and entrant.replicates.noise_percent is not None
    ]
    return NoiseFloor(smallest_difference=min(visible, default=None), own_noise=float(median(noise)) if noise else None)


def _account(model_id: str, run: RunStatistics, rows: SeasonRows, fills: Table) -> AccountCard:
    own = fills["account"] == model_id
    parts = [part for part in rows.parts.get(model_id, ()) if part.net is not None and part.gross is not None]
    fees, gross = (math.fsum(values) for values in ([part.fees for part in parts], [part.gross or 0 for part in parts]))
    capital, cost = float(run.run.initial_capital), run.run.totals.cost_usd
    fall = max_drawdown([capital, *run.values])
    return AccountCard(
        model_id=model_id,
        provider=rows.models[model_id].provider,
        router_model=rows.models[model_id].router_model_name,
        initial_capital=capital,
        equity=run.values[-1] if run.hours else capital,
        drawdown=None if fall is None else fall.percent,
        fills=int(own.sum()),
        maker=percent(int(fills["maker"][own].sum()), int(own.sum())),
        traded=math.fsum(fills["quantity"][own] * fills["price"][own]),
        fees=fees,
        funding=math.fsum(part.net or 0 for part in parts) - gross + fees,
        model_cost_usd=None if cost is None else float(cost),
        cycles_decided=sum(period.entrant.record.cycles_decided for period in run.periods),
        cycles_due=sum(period.entrant.record.cycles_due for period in run.periods),
    )


def _decisions(decisions: Table) -> dict[str, int]:
    names = [f"{tool} {status}" for tool, status in zip(decisions["tool"], decisions["status"], strict=True)]
    return {name: names.count(name) for name in sorted(set(names))}


def differences(written: Any, computed: Any, field: str = "") -> Iterator[Difference]:
    """Yield the fields of two cards, as plain JSON values, that are not the same."""
    if isinstance(written, Mapping) and isinstance(computed, Mapping):
        for name in sorted({*written, *computed}):
            if (name in written) != (name in computed):
                yield Difference(f"{field}.{name}".lstrip("."), written.get(name), computed.get(name))
            else:
                yield from differences(written[name], computed[name], f"{field}.{name}".lstrip("."))
    elif isinstance(written, list) and isinstance(computed, list) and len(written) == len(computed):
        for number, (first, other) in enumerate(zip(written, computed, strict=True)):
            yield from differences(first, other, f"{field}[{number}]")
    elif not _is_same(written, computed):
        yield Difference(field, written, computed)


def _is_same(written: Any, computed: Any) -> bool:
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (written, computed))
    if are_numbers:
        return math.isclose(written, computed, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return type(written) is type(computed) and bool(written == computed)
