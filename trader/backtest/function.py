"""The function `run_backtest`: a backtest from Python, in a script, a notebook or a debugger."""

import asyncio
import inspect
import math
import signal
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from decimal import Decimal
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import msgspec
import numpy as np

from trader.backtest.execution import BacktestListener, FinishedBacktest, Interrupts, execute
from trader.backtest.spec import BacktestSpec, Participants, conditions_of, every_of
from trader.backtest.trials import TRIALS
from trader.core.errors import SettingsError, StartError
from trader.core.statistics import DAYS_PER_YEAR, RETURNS_MIN
from trader.core.variant_id import VariantId
from trader.core.wire import encode
from trader.portfolio.domain.baselines import BUY_AND_HOLD
from trader.portfolio.tables import Format, Results, extra

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

_FIGURES: Final = {
    "equity": "equity",
    "return_percent": "returnPercent",
    "max_drawdown_percent": "maxDrawdownPercent",
    "max_leverage": "maxLeverage",
    "trades": "trades",
    "decisions": "decisions",
    "fees": "fees",
    "funding": "funding",
}
"""The columns of `BacktestResult.accounts`, and the figures of `result.json` in them."""

_YEAR: Final = math.sqrt(DAYS_PER_YEAR)
_WIDTH, _HEIGHT = 640, 160
_INKS: Final = ("#2563eb", "#9ca3af")
"""The colors of the account, and of buy and hold."""


class BacktestResult:
    """The result of a backtest. Tables are DataFrames with times in UTC; `value` is the content of `result.json`."""

    def __init__(self, value: Mapping[str, Any], finished: FinishedBacktest, folder: Path | None) -> None:
        self.value = value
        self._tables = finished.tables
        self._series, self._excursions = finished.series, finished.excursions
        self.folder = folder
        """The folder of the files; None if none was asked for."""

    @property
    def tables(self) -> Results:
        """The same tables as arrays of numpy, without pandas."""
        return self._tables.results

    @property
    def equity(self) -> "pd.DataFrame":
        """The equity of each account and baseline, by minute while a position is open, else by hour."""
        return self.tables.equity.frame()

    @property
    def trades(self) -> "pd.DataFrame":
        """The completed trades, with how far the price went against each and in its favor, in percent of the entry."""
        against, favor = np.array(self._excursions).reshape(-1, 2).T
        return self.tables.trades.frame().assign(mae_percent=against, mfe_percent=favor)

    @property
    def fills(self) -> "pd.DataFrame":
        """The fills."""
        return self.tables.fills.frame()

    @property
    def decisions(self) -> "pd.DataFrame":
        """The outcome of each decision: `ok`, `rejected` with the rule and the reason, or `failed`."""
        return self.tables.decisions.frame()

    @property
    def series(self) -> "pd.DataFrame":
        """The values of the strategy's own series."""
        return self._series.frame()

    @property
    def accounts(self) -> "pd.DataFrame":
        """The figures of each account and baseline; baselines have no trades of their own.

        `max_drawdown_percent` is of the last equity of each hour; `equity`, by minute, may show a larger fall.
        """
        rows = [*self.value["accounts"], *self.value["baselines"]]
        columns = {name: np.array([float(row.get(figure, "nan")) for row in rows]) for name, figure in _FIGURES.items()}
        frame: pd.DataFrame = extra("pandas").DataFrame(columns, index=[row["id"] for row in rows])
        return frame

    def trades_by(
        self, key: Literal["symbol", "side", "close_reason", "entry_tag", "exit_tag", "weekday", "hour"]
    ) -> "pd.DataFrame":
        """The number of trades, their net profit, and the share won; weekday and hour are those of the entry."""
        entry = self.trades["opened_at"].dt
        keys = self.trades.assign(weekday=entry.day_name(), hour=entry.hour)[key]
        nets = self.trades["net_pnl"].groupby(keys)
        return nets.agg(trades="count", net_pnl="sum", won_percent=lambda each: 100 * (each > 0).mean())

    def drawdowns(self, account: str | None = None) -> "pd.DataFrame":
        """The falls of an account's equity (default: the first) with their dates, the deepest first."""
        curve = self._curves_by_time()[account or self.value["accounts"][0]["id"]].dropna()
        peaks = curve.cummax()
        falls = curve.div(peaks).sub(1).mul(-100).groupby((curve == peaks).cumsum())
        starts = curve.index.to_series().groupby((curve == peaks).cumsum()).first()
        found = starts.to_frame("began_at").assign(
            lowest_at=falls.idxmax(), ended_at=starts.shift(-1), percent=falls.max()
        )
        return found[found["percent"] > 0].sort_values("percent", ascending=False, ignore_index=True)

    def rolling(self, days: int = 30) -> "pd.DataFrame":
        """The annual Sharpe ratio and volatility of the last `days` daily returns of each account and baseline."""
        windows = self._daily_returns().rolling(days)
        found = {"sharpe": _YEAR * windows.mean() / windows.std(), "volatility": _YEAR * windows.std()}
        frame: pd.DataFrame = extra("pandas").concat(found, axis="columns")
        return frame

    @property
    def risk(self) -> "pd.DataFrame":
        """Figures of the daily returns of each account, from ten days on: annual volatility, the loss that one day in
        twenty exceeded, and beta and annual alpha beside buy and hold."""
        returns = self._daily_returns()
        market = returns.get(BUY_AND_HOLD.id, returns.iloc[:, 0] * np.nan)
        beta = returns.apply(market.cov) / market.var()
        return beta.to_frame("beta").assign(
            alpha_percent=100 * DAYS_PER_YEAR * (returns.mean() - beta * market.mean()),
            volatility_percent=100 * _YEAR * returns.std(),
            value_at_risk_percent=-100 * returns.quantile(0.05).clip(upper=0),
        )

    def _curves_by_time(self) -> "pd.DataFrame":
        return self.equity.pivot_table("equity", "at", "account", aggfunc="last")

    def _daily_returns(self) -> "pd.DataFrame":
        """Return the daily returns of whole days, by day and account; none below ten."""
        closes = self._curves_by_time().resample("D").last().ffill()[:-1]
        returns = closes / closes.shift(fill_value=float(self.value["capital"])) - 1
        return returns if len(returns) >= RETURNS_MIN else returns[:0]

    def __repr__(self) -> str:
        shown = (f"{each['id']} {each['returnPercent']:+.2f} %" for each in self.value["accounts"])
        return f"<BacktestResult {self.value['from']} to {self.value['to']}: {', '.join(shown)}>"

    def _repr_html_(self) -> str:
        """Return the curve of the first account beside buy and hold, and the figures, for notebooks."""
        title = f"{', '.join(self.value['markets'])}, {self.value['from']} to {self.value['to']}"
        account = self.value["accounts"][0]["id"]
        figures = self.accounts.drop(columns="decisions").to_html(float_format=lambda number: f"{number:,.2f}")
        return f"<p>{escape(title)}</p>{self._curves(account, BUY_AND_HOLD.id)}{figures}"

    def _curves(self, *accounts: str) -> str:
        """Return the equity of accounts as lines of an SVG picture with one scale, its axes and a legend."""
        table = self.tables.equity
        own = [(ink, name, table["account"] == name) for ink, name in zip(_INKS, accounts, strict=True)]
        shown = np.logical_or.reduce([chosen for *_, chosen in own])
        if not shown.any():
            return ""
        at, equity = table["at"].astype(np.int64), table["equity"]
        (first, last), (low, high) = ((each[shown].min(), each[shown].max()) for each in (at, equity))
        x = _WIDTH * (at - first) / max(1, last - first)
        y = _HEIGHT * (1 - (equity - low) / (high - low or 1))
        lines = (f'<polyline stroke="{ink}" points="{_points(x[chosen], y[chosen])}"/>' for ink, _, chosen in own)
        begin, end = np.datetime_as_string(np.array([first, last], "datetime64[ms]"), unit="m", timezone="UTC")
        words = [(_WIDTH + 6, 8, f"{high:,.2f}"), (_WIDTH + 6, _HEIGHT, f"{low:,.2f}")]
        words += [(0, _HEIGHT + 18, begin), (_WIDTH - 110, _HEIGHT + 18, end)]
        texts = [f'<text x="{left}" y="{top}">{escape(text)}</text>' for left, top, text in words]
        for place, (ink, name, _) in enumerate(own):
            texts.append(f'<text x="{240 * place}" y="{_HEIGHT + 38}" style="fill:{ink}">— {escape(name)}</text>')
        return (
            f'<svg viewBox="0 -4 {_WIDTH + 90} {_HEIGHT + 48}" width="{_WIDTH + 90}" font-size="12">'
            f'<g fill="none"><path stroke="gray" d="M0 {_HEIGHT}H{_WIDTH}V0"/>{"".join(lines)}</g>'
            f'<g fill="currentColor">{"".join(texts)}</g></svg>'
        )


def _points(x: Any, y: Any) -> str:
    step = max(1, len(x) // _WIDTH)
    return " ".join(f"{across:.1f},{down:.1f}" for across, down in zip(x[::step], y[::step], strict=True))


def run_backtest(
    strategy: type[Any] | str,
    data: str | PathLike[str],
    *,
    params: Mapping[str, Any] | None = None,
    markets: str | Sequence[str] = (),
    start: datetime | str | None = None,
    end: datetime | str | None = None,
    cadence: str | None = None,
    capital: Decimal | float | None = None,
    taker_fee: Decimal | float | None = None,
    maker_fee: Decimal | float | None = None,
    latency: int | None = None,
    funding: Decimal | float | str | Path | None = None,
    preset: str | None = None,
    seed: int | None = None,
    guard: Mapping[str, int] | Literal["none"] | None = None,
    markets_file: str | Path | None = None,
    out: str | Path | None = None,
    trials: str | Path | None = None,
    tables: Format = "csv",
    own_data: "str | Path | pd.DataFrame | None" = None,
    evidence: bool = True,
) -> BacktestResult:
    """Backtest a strategy on a folder of 1-minute candles, by the rules of the command `trader lab backtest`.

    `strategy` is a class with `decide(view)`, FILE:CLASS, or the name of a variant, whose rule agent trades. The other
    arguments are the command's options: `markets` is one or several, fees are in basis points, `latency` in
    milliseconds, `funding` is an hourly rate or a folder, times without a zone are UTC. `guard` maps names of limits to
    numbers, or is "none". With `out`, the files of the command are written into that new folder, without a database.
    The run counts in the ledger `trials`, by default trials.jsonl next to `out` or in the working folder. `own_data` is
    a file of dated columns, or a DataFrame with a time as a column or index, for `view.data`. Without `evidence` there
    are no baselines and no report, which take more time than the run itself.

    It also works where an event loop is running, as in a notebook; there the strategy runs in another thread, without
    its deadline.

    :raises SettingsError: an argument, the strategy's class or a parameter is wrong
    :raises StartError: the candles cannot be read, or the files cannot be written
    :raises StrategyError: the strategy failed; the cause is its own exception
    """
    options = dict(locals())
    with tempfile.TemporaryDirectory(prefix="trader-backtest-") as folder:
        spec, interrupts = spec_of(Path(folder), **options), Interrupts()
        finished = completed(execute(spec, BacktestListener(), interrupts), interrupts)
    if finished.failure is not None:
        raise finished.failure
    if finished.end.cause is not None:
        raise StartError(finished.end.reason)
    return BacktestResult(msgspec.json.decode(encode(finished.value)), finished, None if out is None else spec.out)


def spec_of(folder: Path, strategy: type[Any] | str, data: str | PathLike[str], **options: Any) -> BacktestSpec:
    """Return the spec that arguments of `run_backtest` describe, whose files may be in `folder`. Raises like it."""
    markets, guard, own_data = options.get("markets", ()), options.get("guard"), options.get("own_data")
    _check_kinds({"strategy": strategy, "data": data, **options})
    limits = [guard] if isinstance(guard, str) else [f"{name}={_digits(each)}" for name, each in (guard or {}).items()]
    out, trials, markets_file = options.get("out"), options.get("trials"), options.get("markets_file")
    given = options | {
        "market": (markets,) if isinstance(markets, str) else markets,
        "markets_file": None if markets_file is None else Path(markets_file).absolute(),
        "with": None if own_data is None else [_own_data_file(own_data, folder)],
    }
    place, variants = folder / "run" if out is None else Path(out), [each for each in VariantId if each == strategy]
    return BacktestSpec(
        conditions=conditions_of(Path(data), given, limits),
        entrants=Participants(
            variants=tuple(variants),
            strategy=None if variants else strategy,
            params=plain_params(options.get("params") or {}),
            every=every_of(options.get("cadence")),
        ),
        out=place,
        trials=Path(trials or (TRIALS if out is None else place.absolute().parent / TRIALS)).absolute(),
        tables=None if out is None else options.get("tables", "csv"),
        has_database=False,
        has_evidence=options.get("evidence", True),
    )


def _own_data_file(given: "str | Path | pd.DataFrame", folder: Path) -> Path:
    """Return the file of own data; a DataFrame is written to one in `folder`."""
    if isinstance(given, str | Path):
        return Path(given).absolute()
    file = folder / "own.csv"
    has_times = not isinstance(given.index, extra("pandas").RangeIndex)
    given.to_csv(file, index=has_times, date_format="%Y-%m-%dT%H:%M:%S.%f%z")
    return file


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Check the kinds of arguments that have no text by which the command checks them. Raises `SettingsError`."""
    problems = [
        f"{name} is {given[name]!r:.100}; it must be {expected}"
        for name, kinds, expected in (
            ("strategy", type | str, "a class with decide(view), FILE:CLASS, or the name of a variant"),
            ("data", str | PathLike, "a folder or file of candles"),
            ("params", Mapping | None, "a mapping of names to values"),
            ("markets", str | Sequence | None, "a symbol, or a sequence of them"),
            ("guard", str | Mapping | None, 'a mapping of names of limits to numbers, or "none"'),
            ("out", str | PathLike | None, "a new folder"),
            ("trials", str | PathLike | None, "a file"),
            ("markets_file", str | PathLike | None, "a file"),
        )
        if not isinstance(given.get(name), kinds)
    ]
    own_data, markets = given.get("own_data"), given.get("markets")
    if not (own_data is None or isinstance(own_data, str | Path) or hasattr(own_data, "to_csv")):
        problems.append(f"own_data is {own_data!r:.100}; it must be a file or a DataFrame")
    if isinstance(markets, Sequence) and not all(isinstance(symbol, str) for symbol in markets):
        problems.append(f"markets is {markets!r:.100}; it must be a symbol, or a sequence of them")
    if problems:
        raise SettingsError(problems)


def as_file(strategy: type[Any] | str) -> str:
    """Return a strategy as FILE:CLASS, which other processes can load."""
    if not isinstance(strategy, type):
        return strategy
    return f"{inspect.getsourcefile(strategy)}:{strategy.__qualname__}"


def _digits(limit: object) -> str:
    """Return a limit of the guard as the command takes it."""
    is_whole = isinstance(limit, bool | np.bool_) or (isinstance(limit, float) and limit.is_integer())
    return str(int(cast("float", limit))) if is_whole else str(limit)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as the ledger of trials keeps them. Raises `SettingsError`."""
    try:
        plain: dict[str, Any] = msgspec.to_builtins(
            {name: value.item() if isinstance(value, np.generic) else value for name, value in params.items()}
        )
    except TypeError as error:
        raise SettingsError([f"params must be numbers, strings, booleans, or lists of these: {error}"]) from None
    return plain


def completed(work: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
    """Return what a coroutine returns, also where an event loop is running; Ctrl+C raises KeyboardInterrupt."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # the usual case: a script, or a debugger
        finished = asyncio.run(work)
    else:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(asyncio.run, work)
            try:
                finished = future.result()
            except KeyboardInterrupt:
                interrupts.interrupt(signal.SIGINT)
                raise
    if interrupts:
        raise KeyboardInterrupt
    return finished
