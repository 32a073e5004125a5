"""Evidence: every entrant of the current runs compared with its references, and its own noise by its replicates."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Final, NamedTuple
from uuid import UUID

import numpy as np

from trader.agents.domain.entrants import COVERAGE_MIN_PERCENT, EntrantRecord, joint_id, joint_name, joint_record
from trader.agents.domain.models import Model
from trader.agents.sql.models import select_models
from trader.core.clock import Clock, floor_time, iso
from trader.core.statistics import grouped
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.portfolio.behaviour import EntrantBehaviour, describe_entrant, present_period
from trader.portfolio.domain.baselines import BUY_AND_HOLD
from trader.portfolio.domain.behaviour import Conduct, PositionPart, Stance, stances
from trader.portfolio.domain.bets import HOURLY_MOVE_MAX, separable_sharpe
from trader.portfolio.domain.board import (
    NO_SEASON,
    Board,
    BoardRules,
    Comparison,
    DifferencePoint,
    JudgedEntrant,
    PrimaryComparison,
    RankInterval,
    compare_entrants,
    difference_curve,
    judge_board,
    judge_primary,
)
from trader.portfolio.domain.evidence import Statement, Verdict, missing_trades, state_returns
from trader.portfolio.domain.histories import RESOLUTIONS, WINDOWS, RunWindow, minute_end
from trader.portfolio.domain.returns import ReplicateNoise, ReturnSeries, mean_series, split_variance
from trader.portfolio.domain.seasons import Season, SeasonRules, SeasonState
from trader.portfolio.run_statistics import CurrentRuns, EntrantPeriod, RunStatistics, count_contenders
from trader.portfolio.seasons import AccountPast, read_accounts, read_standing
from trader.portfolio.sql.analytics import PastEntrant, select_position_parts

_IN_VAIN: Final = "its last three cycles ended without a call that can be executed"
_MISSED: Final = f"it decided less than {COVERAGE_MIN_PERCENT:g} % of its due cycles"
_HOUR: Final = RESOLUTIONS["1h"]

VOLATILITY_ASSUMED: Final = 0.005
"""The hourly volatility of an entrant before it has any hours."""


class EntrantEvidence(NamedTuple):
    """An entrant in its part of the current run of its model. `ended_at` is None for the current entrant.

    `statement`, `trades` and `losing_trades` cover the window. `comparisons` hold the verdicts on all hours, for
    replicates on their mean; `models` are all of these, `model` and `account` of the first. `attempt` is the number of
    the run. `before` is the evidence by the rules at the start of a season, before a later amendment.
    """

    id: str
    name: str
    model: Model
    models: Sequence[Model]
    record: EntrantRecord
    started_at: datetime
    ended_at: datetime | None
    statement: Statement
    return_percent: float | None
    trades: int
    losing_trades: int
    comparisons: Sequence[Comparison]
    is_among_best: bool
    replicates: ReplicateNoise | None
    attempt: int
    rank: RankInterval | None
    account: AccountPast
    age_hours: int
    off_board: str | None
    before: "EntrantEvidence | None" = None


class BoardResolution(NamedTuple):
    """The smallest difference of annual Sharpe ratios that a board can detect between two entrants, now and at the end.

    None if it can detect none; the board has typical entrants, with the median of their volatilities and leverages.
    """

    now: float | None
    at_end: float | None


class EvidenceReport(NamedTuple):
    """The evidence of all entrants up to the end of the last full hour, and the model of the best one.

    `contenders` is the number of entrants of all boards. In a season the evidence covers its hours, by its rules.
    `market_percent` is the return of buying and holding in these hours. `primary` is the verdict of the season's
    primary comparison, on the board of all entrants.
    """

    until: datetime
    best: str | None
    entrants: Sequence[EntrantEvidence]
    contenders: int
    season: Season | None = None
    resolution: BoardResolution = BoardResolution(None, None)
    market_percent: float | None = None
    primary: Verdict | None = None

    @property
    def state(self) -> SeasonState:
        """The state of its season at that time."""
        return "running" if self.season is None else self.season.state(self.until)


class PairEvidence(NamedTuple):
    """Two entrants compared up to the end of the last full hour: the first one against the other.

    `curve` is their difference within the window, and `stances` are their sides in the markets that either held.
    """

    until: datetime
    comparison: Comparison
    curve: Sequence[DifferencePoint]
    stances: Sequence[Stance]
    model_ids: Sequence[Sequence[str]] = ((), ())


class Field(NamedTuple):
    """All entrants judged together up to a time: the current runs with their models, or a season's, cut to it.

    `contenders` is the number of entrants of all boards (None: those of these runs). `accounts` hold the past of each
    account (none: its current run).
    """

    until: datetime
    models: Mapping[str, Model]
    runs: Mapping[str, RunStatistics]
    baselines: Mapping[str, RunStatistics]
    contenders: int | None = None
    season: Season | None = None
    accounts: Mapping[str, AccountPast] = {}

    def count_all(self) -> int:
        return count_contenders(self.runs.values()) if self.contenders is None else self.contenders

    def since(self, window: RunWindow) -> datetime | None:
        """Return the start of a window; None for the whole run."""
        return None if window == "run" else self.until - WINDOWS[window]


class _Judged(NamedTuple):
    """An entrant's part of a run with its whole hours.

    `off_board` is the reason why it cannot have a rank.
    """

    model: Model
    period: EntrantPeriod
    series: ReturnSeries | None
    account: AccountPast
    off_board: str | None

    @property
    def key(self) -> str:
        return f"{self.model.id}#{self.record.number}"

    @property
    def record(self) -> EntrantRecord:
        return self.period.record

    def has_name(self, name: str) -> bool:
        """Return whether it is the model, or one of the replicates, with this id."""
        return name in {self.model.id, self.model.configuration.replicate_of}

    def count_trades(self, since: datetime | None = None) -> tuple[int, int]:
        """Return how many trades it completed since a moment (None: all), and how many of them had no profit."""
        return self.period.count_after(since or self.period.started_at)

    @property
    def run_id(self) -> UUID:
        return self.period.run.run.run_id

    def conduct(self, parts: Sequence[PositionPart], until: datetime) -> Conduct:
        """Return its positions up to a moment."""
        period = self.period
        return Conduct(
            period.started_at, min(until, period.ended_at or until), float(period.start_value), parts, (), ()
        )


_Found = tuple[str | None, list[tuple[_Judged, EntrantEvidence]], Verdict | None]
"""The id of the best entrant, the shown entrants, and the verdict of the primary comparison."""


class _Part:
    """The hours and trades of an entrant, or of its replicates together, within a window (None: all)."""

    def __init__(self, group: Sequence[_Judged], series: ReturnSeries | None, since: datetime | None) -> None:
        self.age = 0 if series is None else len(series.values)
        self.series = series if series is None or since is None else series.within(since, series.end)
        counts = [entrant.count_trades(since) for entrant in group]
        self.trades, self.losing_trades = (sum(column) // len(group) for column in zip(*counts, strict=True))


class Evidence:
    """Makes the evidence of entrants from the statistics of the current runs."""

    def __init__(self, database: Database, runs: CurrentRuns, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._clock = clock

    async def report(
        self, window: RunWindow, variant: VariantId | None = None, model_id: str | None = None
    ) -> EvidenceReport:
        """Return the evidence of all entrants, of one variant's, or of one model.

        All boards are corrected together as one family of all entrants, even if only some are shown.
        """
        field = await self._field()
        family = {key: run for key, run in field.runs.items() if variant in {None, field.models[key].variant}}
        report = await make_report(field._replace(runs=family), field.since(window), model_id)
        return report if variant is None else report._replace(primary=None)

    async def compare(self, window: RunWindow, model_id: str, against: str) -> PairEvidence:
        """Compare the current entrants of two models, corrected with the board on which they are."""
        field = await self._field()
        if not field.models.keys() >= {model_id, against}:
            return _not_compared(field.until, "there is no such model")
        rules = None if field.season is None else field.season.rules
        returns = {key: run.returns(field.until) for key, run in field.baselines.items()}
        periods = await _judged_periods(field, field.until, rules)
        named = [
            next((each for each in periods if each.model.id == name and each.period.ended_at is None), None)
            for name in (model_id, against)
        ]
        first, other = named
        if first is None or other is None:
            return _not_compared(field.until, f"{model_id if first is None else against} is on no board")
        if first.period.contender == other.period.contender:
            return _not_compared(field.until, "the two are one entrant: replicates are compared by their mean")
        async with self._database.reading() as conn:
            parts = await select_position_parts(conn, [first.run_id, other.run_id])
        own, others = (each.conduct(parts.get(each.run_id, ()), field.until) for each in (first, other))
        board, contenders = NO_SEASON if rules is None else rules.board, field.count_all()

        def compare() -> PairEvidence:
            groups = grouped(periods, lambda each: each.period.contender)
            units = {key: _entrant(group) for key, group in groups.items()}
            ids = [[each.model.id for each in groups[one.period.contender]] for one in (first, other)]
            pair, since = (units[first.period.contender], units[other.period.contender]), field.since(window)
            comparison = compare_entrants(*pair, list(units.values()), returns, since, contenders, board)
            return PairEvidence(
                field.until, comparison, difference_curve(*pair, since), stances(own, others, since), ids
            )

        return await asyncio.to_thread(compare)

    async def _field(self) -> Field:
        """Return all entrants that are judged together now."""
        until = last_whole_hour(self._clock.now())
        async with self._database.reading() as conn:
            standing = await read_standing(conn, until)
            accounts = standing.accounts or await read_accounts(conn)
        current, until = self._runs.within(standing.scope), standing.ended_at or until
        runs = await current.refresh()
        async with self._database.connection() as conn:  # after the runs, so that each has its model
            models = {model.id: model for model in await select_models(conn)}
        runs = {key: run for key, run in runs.items() if standing.has(models[key])}
        contenders = count_contenders(runs.values())
        return Field(until, models, runs, current.baselines, contenders, standing.season, accounts)

    async def behaviour(self, model_id: str) -> EntrantBehaviour | None:
        """Return how the current entrant of a model traded until now; None before it is known.

        For an entrant of a season it covers the season.
        """
        now = minute_end(self._clock.now())
        async with self._database.reading() as conn:
            standing = await read_standing(conn, now)
            models = {model.id: model for model in await select_models(conn)}
        is_shown = model_id in models and standing.has(models[model_id])
        runs = await (self._runs.within(standing.scope) if is_shown else self._runs).refresh()
        period = present_period(runs[model_id]) if model_id in runs else None
        if period is None:
            return None
        async with self._database.reading() as conn:
            return await describe_entrant(conn, period, runs, (is_shown and standing.ended_at) or now)


def last_whole_hour(now: datetime) -> datetime:
    """Return the end of the last full hour, up to which there is evidence at a moment."""
    return floor_time(minute_end(now), _HOUR)


async def make_report(field: Field, since: datetime | None = None, model_id: str | None = None) -> EvidenceReport:
    """Return the evidence of all runs, corrected together, or of one model among them; the window starts at `since`.

    Manually traded runs are not judged; in a season they are listed with that reason.
    """
    until, season, baselines = field.until, field.season, field.baselines
    contenders = field.count_all()
    rules = None if season is None else season.rules

    async def judged(rules: SeasonRules | None, until: datetime) -> _Found:
        returns = {key: run.returns(until) for key, run in baselines.items()}
        periods = await _judged_periods(field, until, rules)
        board_rules = NO_SEASON if rules is None else rules.board
        return await asyncio.to_thread(_judge, periods, returns, since, model_id, contenders, board_rules)

    best, found, primary = await judged(rules, until)
    before = None if season is None else season.rules_before
    earlier = [] if before is None else (await judged(before, min(until, before.end)))[1]
    by_key = {period.key: entrant for period, entrant in earlier}
    shown = [entrant._replace(before=by_key.get(period.key)) for period, entrant in found]
    shown.sort(key=lambda entrant: (not entrant.is_among_best, entrant.model.id, -entrant.record.number))
    series = [period.series for period, _ in found if period.series is not None and len(period.series.values) > 1]
    market = baselines.get(BUY_AND_HOLD.id)
    held = None if market is None else market.returns(until)
    return EvidenceReport(
        until=until,
        best=best,
        entrants=shown,
        contenders=contenders,
        season=season,
        resolution=await asyncio.to_thread(
            _resolution, series, contenders, NO_SEASON if rules is None else rules.board
        ),
        market_percent=None if held is None else held.percent,
        primary=primary,
    )


async def _judged_periods(field: Field, until: datetime, rules: SeasonRules | None) -> list[_Judged]:
    """Return the entrants of the runs, except manually traded runs outside a season."""
    periods: list[_Judged] = []
    for key, run in field.runs.items():
        if rules is not None or run.run.entrant.manual_since is None:
            past = field.accounts.get(key) or _past_of(run)
            periods += [_judged(field.models[key], period, until, rules, past) for period in run.periods]
            await asyncio.sleep(0)  # a long season takes a fraction of a millisecond per run
    return periods


def _resolution(series: Sequence[ReturnSeries], contenders: int, rules: BoardRules) -> BoardResolution:
    """Return what differences a board of these entrants can detect; before the first hours, of assumed ones."""
    spreads = [float(np.std(each.values)) for each in series if np.isfinite(each.values).all()]
    volatility = (median(spreads) if spreads else 0.0) or VOLATILITY_ASSUMED
    bounds = [[each.loss_bounds for each in series], [each.gain_bounds for each in series]]
    bound = sum(median(float(each[-1]) for each in side) if side else HOURLY_MOVE_MAX for side in bounds)
    share = rules.level / max(1, rules.family(contenders))
    now = max((len(each.values) for each in series), default=0)
    sharpes = [
        None if hours is None else separable_sharpe(hours, volatility, bound, share) for hours in (now, rules.hours)
    ]
    return BoardResolution(*sharpes)


def _past_of(run: RunStatistics) -> AccountPast:
    """Return the past of an account whose only run is this one."""
    entrants = [
        PastEntrant(
            run.run.model_id,
            run.run.number,
            period.record.number,
            period.record.fingerprint or "",
            period.started_at,
            period.ended_at,
        )
        for period in run.periods
    ]
    return AccountPast.of([run.as_account_run()], entrants)


def _judged(
    model: Model, period: EntrantPeriod, until: datetime, rules: SeasonRules | None, account: AccountPast
) -> _Judged:
    """Return an entrant with its whole hours."""
    series = period.returns(until, NO_SEASON if rules is None else rules.board)
    off_board: str | None
    if period.ended_at is not None:
        off_board = f"it was configured otherwise at {iso(period.ended_at)}"
    elif rules is not None:
        off_board = account.absence(rules, period.record, period.started_at)
    else:
        record = period.record
        off_board = None if not record.cycles_due or record.is_ranked else _IN_VAIN if record.is_in_vain else _MISSED
    return _Judged(model, period, series, account, off_board)


def _judge(
    periods: Sequence[_Judged],
    baselines: Mapping[str, ReturnSeries | None],
    since: datetime | None,
    model_id: str | None,
    contenders: int,
    rules: BoardRules,
) -> _Found:
    """Return the evidence of all entrants or of one model; a hundred models take a tenth of a second.

    Replicates share the row of the first one; for a single model among them, its own row has the figures of all.
    """
    groups = grouped(periods, lambda each: each.period.contender)
    units = {group[0].key: _entrant(group) for group in groups.values()}
    board = judge_board(list(units.values()), baselines, since, contenders, rules)
    shown = [
        (entrant, group)
        for group in groups.values()
        for entrant in (group[:1] if model_id is None else group)
        if model_id in {None, entrant.model.id}
    ]
    parts = [_Part(group, units[group[0].key].series, since) for _, group in shown]
    statements = state_returns((part.series, part.trades) for part in parts)
    found = [
        (entrant, _evidence(entrant, part, statement, board, group, rules))
        for (entrant, group), part, statement in zip(shown, parts, statements, strict=True)
    ]
    rule = rules.primary
    primary = None if rule is None else _primary(rule, list(groups.values()), baselines, rules.hours)
    ids = {group[0].key: evidence.id for (_, group), (_, evidence) in zip(shown, found, strict=True)}
    return None if board.best is None else ids.get(board.best), found, primary


def _not_compared(until: datetime, reason: str) -> PairEvidence:
    nothing = Statement(0, None, reason)
    return PairEvidence(until, Comparison("bestOther", None, nothing, Verdict(nothing, 1.0)), [], [])


def _primary(
    primary: PrimaryComparison,
    groups: Sequence[Sequence[_Judged]],
    baselines: Mapping[str, ReturnSeries | None],
    hours_max: int | None,
) -> Verdict:
    """Return the verdict of the primary comparison; none on an entrant that is not on the board."""

    def find(name: str) -> Sequence[_Judged]:
        named = (group for group in groups for each in group if each.period.ended_at is None and each.has_name(name))
        return next(named, ())

    first, other = find(primary.entrant), find(primary.against)
    missing = None if first else f"{primary.entrant} is not an entrant"
    off_board = (f"{each.model.id}: {each.off_board}" for each in (*first, *other) if each.off_board is not None)
    if (reason := missing or next(off_board, None)) is not None:
        return Verdict(Statement(0, None, reason), 1.0, level=primary.alpha)
    return judge_primary(primary, _entrant(first), _entrant(other) if other else None, baselines, hours_max)


def _trades(group: Sequence[_Judged]) -> int:
    return sum(entrant.count_trades()[0] for entrant in group) // len(group)


def _entrant(group: Sequence[_Judged]) -> JudgedEntrant:
    """Return the unit of comparison: an entrant, or its replicates together."""
    series = [entrant.series for entrant in group if entrant.series is not None]
    return JudgedEntrant(
        key=group[0].key,
        variant=group[0].model.variant,
        series=series[0] if len(series) == 1 else mean_series(series),
        trades=_trades(group),
        attempt=max(entrant.period.run.run.number for entrant in group),
        is_eligible=all(entrant.off_board is None for entrant in group),
    )


def _off_board(group: Sequence[_Judged], part: _Part, rank: RankInterval | None, age_min: int) -> str | None:
    """Return why an entrant has no rank; None if it has one."""
    if rank is not None:
        return None
    for entrant in group:
        if entrant.off_board is not None:
            return entrant.off_board if len(group) == 1 else f"{entrant.model.id}: {entrant.off_board}"
    if part.age < age_min:
        return f"it is {part.age} hours old; a rank needs {age_min}"
    return missing_trades(_trades(group))


def _evidence(
    judged: _Judged,
    part: _Part,
    statement: Statement,
    board: Board,
    group: Sequence[_Judged],
    rules: BoardRules,
) -> EntrantEvidence:
    """Return the evidence of an entrant, which is compared as part of its group."""
    period, key = judged.period, group[0].key
    models, record = [each.model for each in group], joint_record([each.record for each in group])
    series = {each.model.id: each.series for each in group if each.series is not None}
    return EntrantEvidence(
        id=joint_id(models, record),
        name=joint_name(models),
        model=judged.model,
        models=models,
        record=record,
        started_at=period.started_at,
        ended_at=period.entrant.ended_at,
        statement=statement,
        return_percent=None if part.series is None else part.series.percent,
        trades=part.trades,
        losing_trades=part.losing_trades,
        comparisons=board.comparisons[key],
        is_among_best=key in board.among_best,
        replicates=split_variance(series) if len(series) > 1 else None,
        attempt=period.run.run.number,
        rank=board.ranks.get(key),
        account=judged.account,
        age_hours=part.age,
        off_board=_off_board(group, part, board.ranks.get(key), rules.age_min),
    )
