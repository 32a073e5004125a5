"""Evidence: every entrant of the current runs against its references, and what replicates say about its own noise."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from trader.clock import Clock, ceil_time, floor_time, iso
from trader.domain.agents.entrants import COVERAGE_MIN_PERCENT, EntrantRecord
from trader.domain.models import Model, VariantId
from trader.domain.portfolio.board import (
    NO_SEASON,
    Board,
    BoardRules,
    Comparison,
    JudgedEntrant,
    RankInterval,
    judge_board,
)
from trader.domain.portfolio.evidence import Statement, missing_trades, state_returns
from trader.domain.portfolio.histories import RESOLUTIONS, WINDOWS, RunWindow, minute_end
from trader.domain.portfolio.luck import Luck
from trader.domain.portfolio.replicates import ReplicateNoise, mean_series, split_variance
from trader.domain.portfolio.returns import ReturnSeries
from trader.domain.portfolio.seasons import Season, SeasonRules, SeasonState, season_part
from trader.services.portfolio.behaviour import EntrantBehaviour, describe_entrant, present_period
from trader.services.portfolio.luck import COMPUTING, LuckRequest
from trader.services.portfolio.run_statistics import CurrentRuns, EntrantPeriod, RunStatistics, count_contenders
from trader.services.portfolio.seasons import AccountPast, read_accounts, read_standing
from trader.store.agents.models import select_models
from trader.store.database.pool import Database
from trader.store.portfolio.analytics import PastEntrant

_MISSED: Final = f"it decided less than {COVERAGE_MIN_PERCENT:g} % of its due cycles"
_HOUR: Final = RESOLUTIONS["1h"]


class EntrantEvidence(NamedTuple):
    """An entrant in its part of the current run of its model. `ended_at` is None of the present entrant.

    `statement`, `trades` and `losing_trades` are of the window. `comparisons` have the verdicts on all hours, those of
    replicates on all of them together, and `luck` is of the last look. `attempt` is the number of the run.
    """

    model: Model
    record: EntrantRecord
    started_at: datetime
    ended_at: datetime | None
    statement: Statement
    return_percent: float | None
    trades: int
    losing_trades: int
    comparisons: Sequence[Comparison]
    is_among_best: bool
    luck: Luck | str
    replicates: ReplicateNoise | None
    attempt: int
    rank: RankInterval | None
    account: AccountPast
    age_hours: int
    off_board: str | None


class EvidenceReport(NamedTuple):
    """The evidence of all entrants up to the end of the last whole hour, and the model of the best of them.

    `contenders` is the number of entrants of all boards. In a season the evidence is that of its hours, by its rules.
    """

    until: datetime
    best: str | None
    entrants: Sequence[EntrantEvidence]
    contenders: int
    season: Season | None = None

    @property
    def state(self) -> SeasonState:
        """The state of its season at that time."""
        return "running" if self.season is None else self.season.state(self.until)


class _Judged(NamedTuple):
    """An entrant's part of a run, or of a season (`rules`), with its whole hours.

    `off_board` is why it can have no rank.
    """

    model: Model
    period: EntrantPeriod
    series: ReturnSeries | None
    account: AccountPast
    off_board: str | None
    rules: SeasonRules | None

    @property
    def key(self) -> str:
        return f"{self.model.id}#{self.record.number}"

    @property
    def record(self) -> EntrantRecord:
        return self.period.entrant.record

    def count_trades(self, since: datetime | None = None) -> tuple[int, int]:
        """Return how many trades it completed from a moment on (None: all), and how many of them gained nothing."""
        since = since or self.period.started_at
        if self.rules is None:
            return self.period.count_after(since)
        return self.period.count_after(max(since, self.rules.start), self.rules.end)

    def luck_until(self, until: datetime) -> LuckRequest:
        """Return what is compared with luck: the period up to a whole hour."""
        period = self.period
        end = until if period.ended_at is None else floor_time(period.ended_at, _HOUR)
        return LuckRequest(period.run, self.record.number, period.started_at, end, period.start_value)


class _Part:
    """The hours of an entrant, or of its replicates together, and its trades, within a window (None: all)."""

    def __init__(self, group: Sequence[_Judged], since: datetime | None) -> None:
        series = _joint(group)
        self.age = 0 if series is None else len(series.values)
        self.series = series if series is None or since is None else series.within(since, series.end)
        counts = [entrant.count_trades(since) for entrant in group]
        self.trades, self.losing_trades = (sum(column) // len(group) for column in zip(*counts, strict=True))


class LuckSource(Protocol):
    """Compares entrants with luck, or says why it does not (yet)."""

    async def results(self, requests: Sequence[LuckRequest], models: int, /) -> Sequence[Luck | str]: ...


class Evidence:
    """Makes the evidence of entrants from the statistics of the current runs."""

    def __init__(self, database: Database, runs: CurrentRuns, luck: LuckSource, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._luck = luck
        self._clock = clock

    async def report(
        self, window: RunWindow, variant: VariantId | None = None, model_id: str | None = None
    ) -> EvidenceReport:
        """Return the evidence of all entrants, of those of a variant, or of one model.

        All boards are corrected together as one family: that of all entrants, even when a part of them is shown.
        """
        until = last_whole_hour(self._clock.now())
        async with self._database.reading() as conn:
            standing = await read_standing(conn, until)
            accounts = standing.accounts or await read_accounts(conn)
        current, until = self._runs.as_of(standing.ended_at), standing.ended_at or until
        runs = await current.refresh()
        async with self._database.connection() as conn:  # after the runs, so that each has its model
            models = {model.id: model for model in await select_models(conn)}
        runs = {key: run for key, run in runs.items() if standing.has(models[key])}
        family = {key: run for key, run in runs.items() if variant in {None, models[key].variant}}
        since = None if window == "run" else until - WINDOWS[window]
        baselines, contenders = current.baselines, count_contenders(runs.values())
        return await make_report(
            models, family, baselines, self._luck, until, since, model_id, contenders, standing.season, accounts
        )

    async def behaviour(self, model_id: str) -> EntrantBehaviour | None:
        """Return how the present entrant of a model traded until now; None before it is known."""
        runs = await self._runs.refresh()
        period = present_period(runs[model_id]) if model_id in runs else None
        if period is None:
            return None
        async with self._database.reading() as conn:
            return await describe_entrant(conn, period, runs, minute_end(self._clock.now()))


def last_whole_hour(now: datetime) -> datetime:
    """Return until when there is evidence at a moment: the end of the last whole hour."""
    return floor_time(minute_end(now), _HOUR)


async def make_report(
    models: Mapping[str, Model],
    runs: Mapping[str, RunStatistics],
    baselines: Mapping[str, RunStatistics],
    luck: LuckSource,
    until: datetime,
    since: datetime | None = None,
    model_id: str | None = None,
    contenders: int | None = None,
    season: Season | None = None,
    accounts: Mapping[str, AccountPast] = {},
) -> EvidenceReport:
    """Return the evidence of all runs, corrected together, or of one model among them; the window begins at `since`.

    Runs in which an account was traded by hand are not judged; in a season they are listed with that reason.

    `contenders` is the number of entrants of all boards (None: those of these runs). In a `season` only its hours
    count. `accounts` have the past of each account (None: its present run).
    """
    contenders = count_contenders(runs.values()) if contenders is None else contenders
    rules = None if season is None else season.rules
    listed = {key: run for key, run in runs.items() if rules is not None or run.run.entrant.manual_since is None}
    periods = [
        _judged(models[key], period, until, rules, accounts.get(key) or _past_of(run))
        for key, run in listed.items()
        for period in run.periods
        if rules is None or period.ended_at is None or period.ended_at > rules.start
    ]
    returns = {key: season_part(run.returns(until), rules) for key, run in baselines.items()}
    board_rules = NO_SEASON if rules is None else rules.board
    best, judged = await asyncio.to_thread(_judge, periods, returns, since, model_id, contenders, board_rules)
    tried = await luck.results([period.luck_until(until) for period, _ in judged], contenders)
    shown = [entrant._replace(luck=each) for (_, entrant), each in zip(judged, tried, strict=True)]
    shown.sort(key=lambda entrant: (not entrant.is_among_best, entrant.model.id, -entrant.record.number))
    return EvidenceReport(until, None if best is None else best.rpartition("#")[0], shown, contenders, season)


def _past_of(run: RunStatistics) -> AccountPast:
    """Return the past of an account that has had this run alone."""
    entrants = [
        PastEntrant(
            run.run.model_id,
            run.run.number,
            period.entrant.record.number,
            period.entrant.record.fingerprint or "",
            period.started_at,
            period.ended_at,
        )
        for period in run.periods
    ]
    return AccountPast.of([run.as_account_run()], entrants)


def _judged(
    model: Model, period: EntrantPeriod, until: datetime, rules: SeasonRules | None, account: AccountPast
) -> _Judged:
    """Return an entrant with its whole hours; the first hour of a run counts even when it began within it."""
    series, began_at, ended_at = period.run.returns(until), period.entrant.record.began_at, period.ended_at
    if series is not None:
        start = series.start if began_at is None or began_at < series.start + _HOUR else ceil_time(began_at, _HOUR)
        series = season_part(series.within(start, until if ended_at is None else floor_time(ended_at, _HOUR)), rules)
    off_board: str | None
    if ended_at is not None:
        off_board = f"it was configured otherwise at {iso(ended_at)}"
    elif rules is not None:
        off_board = account.absence(rules, period.entrant.record, period.started_at)
    else:
        record = period.entrant.record
        off_board = None if not record.cycles_due or record.is_ranked else _MISSED
    return _Judged(model, period, series, account, off_board, rules)


def _judge(
    periods: Sequence[_Judged],
    baselines: Mapping[str, ReturnSeries | None],
    since: datetime | None,
    model_id: str | None,
    contenders: int,
    rules: BoardRules,
) -> tuple[str | None, list[tuple[_Judged, EntrantEvidence]]]:
    """Return the best entrant, and the evidence of all or of one model: of a hundred models a tenth of a second.

    Replicates are one row, that of the first of them; of one model among them its own row has the figures of all.
    """
    groups: dict[str, list[_Judged]] = {}
    for entrant in periods:
        groups.setdefault(entrant.period.contender, []).append(entrant)
    board = judge_board([_entrant(group) for group in groups.values()], baselines, since, contenders, rules)
    shown = [
        (entrant, group)
        for group in groups.values()
        for entrant in (group[:1] if model_id is None else group)
        if model_id in {None, entrant.model.id}
    ]
    parts = [_Part(group, since) for _, group in shown]
    statements = state_returns((part.series, part.trades) for part in parts)
    noise = {group[0].key: _noise(group) for group in groups.values()}
    return board.best, [
        (entrant, _evidence(entrant, part, statement, board, group, noise[group[0].key], rules))
        for (entrant, group), part, statement in zip(shown, parts, statements, strict=True)
    ]


def _noise(group: Sequence[_Judged]) -> ReplicateNoise | None:
    series = {entrant.model.id: entrant.series for entrant in group if entrant.series is not None}
    return split_variance(series) if len(series) > 1 else None


def _joint(group: Sequence[_Judged]) -> ReturnSeries | None:
    """Return the hours of an entrant, or of its replicates together."""
    series = [entrant.series for entrant in group if entrant.series is not None]
    return series[0] if len(series) == 1 else mean_series(series)


def _trades(group: Sequence[_Judged]) -> int:
    return sum(entrant.count_trades()[0] for entrant in group) // len(group)


def _entrant(group: Sequence[_Judged]) -> JudgedEntrant:
    """Return what is compared with others: an entrant, or its replicates together."""
    return JudgedEntrant(
        key=group[0].key,
        variant=group[0].model.variant,
        series=_joint(group),
        trades=_trades(group),
        attempt=max(entrant.period.run.run.number for entrant in group),
        is_eligible=all(entrant.off_board is None for entrant in group),
    )


def _off_board(group: Sequence[_Judged], part: _Part, rank: RankInterval | None, age_min: int) -> str | None:
    """Return why an entrant has no rank; None of one that has."""
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
    noise: ReplicateNoise | None,
    rules: BoardRules,
) -> EntrantEvidence:
    """Return the evidence of an entrant, which is compared together with its group."""
    period, key = judged.period, group[0].key
    return EntrantEvidence(
        model=judged.model,
        record=judged.record,
        started_at=period.started_at,
        ended_at=period.entrant.ended_at,
        statement=statement,
        return_percent=None if part.series is None else part.series.percent,
        trades=part.trades,
        losing_trades=part.losing_trades,
        comparisons=board.comparisons[key],
        is_among_best=key in board.among_best,
        luck=COMPUTING,
        replicates=noise,
        attempt=period.run.run.number,
        rank=board.ranks.get(key),
        account=judged.account,
        age_hours=part.age,
        off_board=_off_board(group, part, board.ranks.get(key), rules.age_min),
    )
