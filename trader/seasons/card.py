"""Result of a season: its card and its report, computed only from the rows that its record has."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import msgspec

from trader.api.schemas.analytics import Percent
from trader.api.schemas.behaviour import BehaviourView
from trader.api.schemas.common import Timestamp, Wire, iso
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.core.errors import SettingsError
from trader.core.statistics import max_drawdown, percent
from trader.portfolio.behaviour import make_behaviour, present_period
from trader.portfolio.domain.board import BoardRules
from trader.portfolio.evidence import EvidenceReport, Field, make_report
from trader.portfolio.run_statistics import RunStatistics, count_contenders
from trader.portfolio.tables import Format, Table
from trader.seasons.bundle import REPORT, SCHEMA, Basis, SeasonFacts, SeasonRows, rows_of, schema_file
from trader.seasons.page import page
from trader.seasons.standings import season_report

FORMAT: Final = 1


class Period(Wire, kw_only=True):
    """From the start of the first run to the end of the last full hour. `marketsTraded` had a position in it."""

    started_at: Timestamp | None
    until: Timestamp
    markets_traded: list[str]


class Trials(Wire, kw_only=True):
    """How many chances luck had.

    `contenders` counts all entrants of the runs, including earlier ones, replicates as one; `runs` all runs of their
    accounts (in a season, those within it); `replicates` the accounts that share a configuration with another.
    `comparisons` is the size of the family, which errs with probability `alpha` at most.
    """

    models: int
    contenders: int
    runs: int
    replicates: int
    comparisons: int
    alpha: float


class NoiseFloor(Wire, kw_only=True):
    """The limits of detection.

    `smallestDifference` is the smallest true difference from holding nothing that any entrant's season would have
    detected in four of five cases, in percent over its hours; `ownNoise` is the median share of an hour's variance in
    which replicates differ from each other, in percent. Null if there is none.
    """

    smallest_difference: Percent | None
    own_noise: Percent | None


class AccountCard(Wire, kw_only=True):
    """An account in its current run: amounts in the quote currency, model cost in USD.

    `traded` is the notional of its `fills`, `maker` the share of maker fills, in percent. `fees` and `funding` cover
    closed positions; `drawdown` is the largest fall of the hourly equity from a running peak.
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
    """The result of a season. `season` holds what the rows lack: rules, market, frictions, code and record.

    `evidence` is the output of `analytics.getEvidence` at the end, by the rules of the season.
    `decisions` counts the calls by tool and status. `digests` are the SHA-256 of the bundle's other files except the
    record, which has digests of its own.
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
    digests: dict[str, str]


class Judged(NamedTuple):
    """A season with its rows and its evidence: the basis of card and report."""

    basis: Basis
    rows: SeasonRows
    report: EvidenceReport


async def judge(basis: Basis) -> Judged:
    """Return a season with its evidence.

    :raises SettingsError: the record has a value that no row can have
    """
    try:
        rows = rows_of(basis)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SettingsError([f"the record of season {basis.season.number} contradicts itself: {error}"]) from None
    field = Field(basis.until, rows.models, rows.runs, rows.baselines, season=basis.season, accounts=rows.accounts)
    return Judged(basis, rows, await make_report(field))


def write_files(folder: Path, judged: Judged, form: Format) -> None:
    """Write tables, report and schema into a folder. Raises `OSError`, and `SettingsError` without pyarrow."""
    for table in judged.basis.tables.values():
        table.write(folder, form)
    (folder / REPORT).write_text(page(season_report(*judged)), encoding="utf-8")
    (folder / SCHEMA).write_bytes(schema_file(Card))


def make_card(judged: Judged, digests: Mapping[str, str]) -> Card:
    """Return the card of a season. `digests` are the SHA-256 of the bundle's other files."""
    basis, rows, report = judged
    until, tables = basis.until, basis.tables
    return Card(
        format=FORMAT,
        season=basis.facts,
        period=Period(
            started_at=min((iso(run.run.started_at) for run in rows.runs.values()), default=None),
            until=iso(until),
            markets_traded=sorted({part.symbol for parts in rows.parts.values() for part in parts}),
        ),
        trials=_trials(rows, basis.season.rules.board),
        noise_floor=_noise_floor(report),
        accounts=[_account(key, run, rows, tables["fills"]) for key, run in sorted(rows.runs.items())],
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
        decisions=_decisions(tables["decisions"]),
        digests=dict(digests),
    )


def is_decided(report: EvidenceReport) -> bool:
    """Return whether every comparison of the current entrants has a verdict for or against."""
    verdicts = [each.verdict for entrant in report.entrants if entrant.ended_at is None for each in entrant.comparisons]
    verdicts += [] if report.primary is None else [report.primary]
    return bool(verdicts) and "not distinguishable yet" not in [each.word for each in verdicts]


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
        cycles_decided=sum(period.record.cycles_decided for period in run.periods),
        cycles_due=sum(period.record.cycles_due for period in run.periods),
    )


def _decisions(decisions: Table) -> dict[str, int]:
    names = (f"{tool} {status}" for tool, status in zip(decisions["tool"], decisions["status"], strict=True))
    return dict(sorted(Counter(names).items()))
