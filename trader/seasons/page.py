"""Page of a season report: one self-contained HTML file."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from html import escape
from statistics import median
from typing import Any, NamedTuple

from trader.agents.domain.models import Model
from trader.agents.variants import VARIANTS, Variant, color_of
from trader.api.dashboard.document import bar, document, interval, key, minus, scale, table
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.core.money import ZERO
from trader.core.statistics import EquityPoint, minutes
from trader.core.variant_id import VariantId
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.behaviour import is_within_minute
from trader.portfolio.domain.evidence import Statement, Verdict
from trader.portfolio.domain.seasons import Season
from trader.portfolio.evidence import EvidenceReport
from trader.portfolio.sql.analytics import CurrentRun
from trader.seasons.sql.report import AccountReport

PercentCurve = Sequence[tuple[datetime, float]]


def percent_curve(points: Sequence[EquityPoint], capital: float) -> PercentCurve:
    """Return hourly equity in percent above the capital."""
    return [(point.hour, 100 * point.value / capital - 100) for point in points]


class RankedModel(NamedTuple):
    """A model's place. `curve` is its hourly equity in percent above the start; the verdict is against the next."""

    account: AccountReport
    curve: PercentCurve
    evidence: Statement
    drawdown: float
    verdict: Verdict | None = None

    @property
    def return_percent(self) -> float:
        return float(100 * self.account.change / self.account.initial_capital)


class ReferenceCurve(NamedTuple):
    """An account that the models are compared with, as a dashed line beside their equity."""

    name: str
    curve: PercentCurve


class PageSection(NamedTuple):
    """A section of the page, with its content as HTML."""

    title: str
    words: str
    content: str


class SeasonReport(NamedTuple):
    """Content of the page. `standings` are ordered best first; `unvalued` models count only with their trades.

    A report without a database has no `evidence`. `kind` is the kind of report, for its title. With a `season`,
    everything is of the season. `sections` follow the equity; `script` draws what they need from `data`.
    """

    name: str
    standings: Sequence[RankedModel]
    unvalued: Sequence[tuple[Model, CurrentRun]]
    trades: Sequence[tuple[str, RunTrade]]
    """With the variants of their models."""
    evidence: EvidenceReport | None = None
    kind: str = "Season report"
    season: Season | None = None
    references: Sequence[ReferenceCurve] = ()
    sections: Sequence[PageSection] = ()
    data: Mapping[str, Any] = {}
    script: str = "report.js"

    @property
    def accounts(self) -> list[AccountReport]:
        return [standing.account for standing in self.standings]

    @property
    def unexplained(self) -> list[AccountReport]:
        """The accounts whose books do not explain the equity to the last digit."""
        return [account for account in self.accounts if account.explained != account.change]

    @property
    def is_backtest(self) -> bool:
        return self.kind == "Backtest"

    @property
    def entrant(self) -> str:
        """The word for what trades: in a backtest, mostly code."""
        return "account" if self.is_backtest else "model"

    @property
    def has_model_costs(self) -> bool:
        """Whether the cost of language models is shown; without any, a backtest does not mention it."""
        return not self.is_backtest or any(account.model_cost is not None for account in self.accounts)

    def of_variant(self, variant: VariantId) -> list[RankedModel]:
        return [standing for standing in self.standings if standing.account.variant == variant]

    def trades_of(self, variant: VariantId) -> list[RunTrade]:
        return [trade for variant_id, trade in self.trades if variant_id == variant]

    def label(self, variant: Variant) -> str:
        """Return the label of a variant: in a backtest, the name of its account if it has only one."""
        standings = self.of_variant(variant.id)
        return standings[0].account.name if self.is_backtest and len(standings) == 1 else variant.label


EQUITY = "The equity of each variant in percent of the starting capital; of several {}s, their average."
DRAWDOWNS = "How far each equity above is below its peak so far."
TRADES = "Net profit of completed trades in percent of their entry notional."
COSTS = "From the capital at the start to the equity at the end, each part summed from the books."
MODEL_COSTS = " The cost of the language models is paid outside the accounts and listed separately."
BOARD = (
    "Best return first. The bar is the 95 % interval of the return. The verdict compares each {} with the next one, "
    "hour by hour; all verdicts together are wrong in at most 5 % of cases, however often one looks. In a replay of "
    "candles, trades held under a minute are on drawn prices."
)

EVIDENCE = (
    "Each entrant, a model in one configuration, compared with its references on the same hours: its rule agent, "
    "holding nothing, buy and hold, and the best other entrant. Intervals are 95 %, for one look."
)

CLOSE_REASONS = {
    "by decision": ("order", "limit"),
    "by stop": ("stop", "invalidation"),
    "by target": ("target",),
    "by time": ("time",),
    "liquidated": ("liquidation",),
    "by operator": ("operator",),
}

PARTS: Sequence[tuple[str, Callable[[AccountReport], Decimal]]] = (
    ("gross, completed", lambda account: account.gross),
    ("gross, still open", lambda account: account.unrealized),
    ("trading fees", lambda account: -account.fees),
    ("funding", lambda account: account.funding),
    ("liquidation fees", lambda account: -account.liquidation_fees),
    ("insurance", lambda account: account.insurance),
    ("change", lambda account: account.change),
)


def page(season: SeasonReport) -> str:
    """Return the report as HTML."""
    body = _head(season) + "".join(
        f"<section><h2>{title}</h2><p>{words}</p>{content}</section>"
        for title, words, content in [
            ("Equity", _equity_words(season), _curves(season, "equity")),
            *season.sections,
            ("Drawdowns", DRAWDOWNS, _curves(season, "drawdown")),
            ("Trades", TRADES, _trades(season)),
            ("Where the money went", COSTS + MODEL_COSTS * season.has_model_costs, _costs(season)),
            ("Leaderboard", BOARD.format(season.entrant), _leaderboard(season)),
            *([] if season.evidence is None else [("Evidence", EVIDENCE, '<div class="panel" id="evidence"></div>')]),
        ]
    )
    return document(f"{season.kind}: {season.name}", body, _data(season), season.script)


def _equity_words(season: SeasonReport) -> str:
    one = "The equity in percent of the starting capital."
    return (EQUITY.format(season.entrant) if len(season.standings) > 1 else one) + (
        f" Dashed: {escape(', '.join(each.name for each in season.references))}." if season.references else ""
    )


def _head(season: SeasonReport) -> str:
    accounts = season.accounts
    start, end = min(account.started_at for account in accounts), max(account.at for account in accounts)
    if season.season is not None:
        start = season.season.rules.start
    capital = sum((account.initial_capital for account in accounts), ZERO)
    decisions = sum(account.invocations for account in accounts)
    tiles = (
        (f"{season.entrant}s", f"{len(accounts):,}"),
        ("days", f"{(end - start) / timedelta(days=1):.1f}"),
        ("completed trades", f"{len(season.trades):,}"),
        ("decisions" if season.is_backtest else "invocations", f"{decisions:,}"),
        ("return of all accounts", signed(100 * _sum(accounts, lambda account: account.change) / capital, " %")),
    )
    shown = "".join(f'<div class="tile"><span>{name}</span><b>{value}</b></div>' for name, value in tiles)
    return (
        f"<h1>{season.kind}</h1><p>{escape(season.name)}: {start:%d %B %Y, %H:%M} to {end:%d %B %Y, %H:%M} UTC</p>"
        f'<div class="panel card tiles">{shown}</div>'
    )


def _data(season: SeasonReport) -> dict[str, Any]:
    """Return the data of the charts: the hours, and each model's return at each of them."""
    hours = sorted({hour for standing in season.standings for hour, _ in standing.curve})

    def shown(curve: PercentCurve) -> list[float | None]:
        values = dict(curve)
        return [None if (value := values.get(hour)) is None else round(value, 3) for hour in hours]

    models = [
        {"name": each.account.name, "variant": each.account.variant, "values": shown(each.curve)}
        for each in season.standings
    ]
    trades = [
        {
            "name": season.label(variant),
            "color": variant.color,
            "values": [round(trade.net_percent, 3) for trade in season.trades_of(variant.id)],
        }
        for variant in VARIANTS.values()
    ]
    return {
        "times": [int(hour.timestamp()) for hour in hours],
        "variants": [
            {"id": variant.id, "label": variant.label, "color": variant.color} for variant in VARIANTS.values()
        ],
        "models": models,
        "references": [{"name": each.name, "values": shown(each.curve)} for each in season.references],
        "trades": trades,
        **season.data,
        **({} if season.evidence is None else _evidence(season, season.evidence)),
    }


def _evidence(season: SeasonReport, report: EvidenceReport) -> dict[str, Any]:
    """Return the output of getEvidence, and the color of each model.

    For a model with one entrant, use the leaderboard's return, so that the report has one return per model: the
    evidence ends with the last full hour, the account with the last price.
    """
    whole = {standing.account.model_id: standing.return_percent for standing in season.standings}
    entrants = Counter(entrant.model.id for entrant in report.entrants)
    shown = [
        entrant._replace(return_percent=whole[entrant.model.id])
        if entrants[entrant.model.id] == 1 and entrant.return_percent is not None and entrant.model.id in whole
        else entrant
        for entrant in report.entrants
    ]
    return {
        "evidence": GetEvidenceOutput.of("run", report._replace(entrants=shown)),
        "colors": {entrant.model.id: color_of(entrant.model) for entrant in report.entrants},
    }


def _curves(season: SeasonReport, chart: str) -> str:
    """Return the placeholders of one chart for all variants, then of one per variant with several models."""
    cards = []
    for variant in VARIANTS.values():
        standings = season.of_variant(variant.id)
        if len(standings) > 1:
            cards.append(
                f'<div class="panel card"><h3>{escape(variant.label)}, {len(standings)} {season.entrant}s</h3>'
                f'<div class="chart" data-chart="{chart}" data-variant="{variant.id}"></div></div>'
            )
    whole = f'<div class="panel card">{_legend(season)}<div class="chart" data-chart="{chart}"></div></div>'
    return f'{whole}<div class="cards">{"".join(cards)}</div>'


def _trades(season: SeasonReport) -> str:
    causes = {trade.close_reason for _, trade in season.trades}
    groups = {
        head: group
        for head, group in CLOSE_REASONS.items()
        if head != "by operator" or not season.is_backtest or causes.intersection(group)
    }
    rows = []
    for variant in VARIANTS.values():
        trades = season.trades_of(variant.id)
        nets, reasons = [trade.net_percent for trade in trades], [trade.close_reason.value for trade in trades]
        if trades:
            won = sum(net > 0 for net in nets)
            closed = [sum(map(reasons.count, group)) for group in groups.values()]
            held = median(minutes(trade.opened_at, trade.closed_at) for trade in trades)
            brief = sum(is_within_minute(trade.opened_at, trade.closed_at) for trade in trades)
            shares = [f"{100 * count / len(trades):.1f} %" for count in (won, brief, *closed)]
            rows.append(
                (escape(season.label(variant)), f"{len(trades):,}", shares[0], signed(median(nets), " %", 3),
                 f"{held:.0f} min", *shares[1:])
            )  # fmt: skip
    head = "account" if season.is_backtest else "variant"
    details = table((head, "trades", "won", "median net", "median held", "under 1 min", *groups), rows)
    return f'<div class="panel card">{_legend(season)}<div class="chart" data-chart="trades"></div></div><br>{details}'


def _costs(season: SeasonReport) -> str:
    groups = [
        (season.label(variant), [each.account for each in season.of_variant(variant.id)])
        for variant in VARIANTS.values()
    ]
    rows = [
        (escape(name), *(signed(_sum(accounts, part)) for _, part in PARTS), *_model_cost(season, accounts))
        for name, accounts in (*groups, ("all", season.accounts))
        if accounts
    ]
    sums = [(name, float(_sum(season.accounts, part))) for name, part in PARTS]
    least, most = min(0.0, *(value for _, value in sums)), max(0.0, *(value for _, value in sums))
    chart = table(
        ("part", "", "amount"),
        [(name, bar(value, least, most), minus(f"{value:+,.0f}")) for name, value in sums],
        text_columns=2,
    )
    details = table(("", *(name for name, _ in PARTS), *_model_cost_heads(season)), rows)
    return f"{_verdict(season)}{chart}<br>{details}"


def _verdict(season: SeasonReport) -> str:
    wrong = season.unexplained
    if season.season is not None:
        return ""  # the prices at its ends have no rows: their effect is the remainder
    if not wrong:
        return '<p class="seal">The parts of every account add up to the change of its equity, to the last digit.</p>'
    names = ", ".join(escape(account.model_id) for account in wrong[:10])
    return f'<p class="seal bad">The books do not explain the equity of {len(wrong)} accounts: {names}.</p>'


def _leaderboard(season: SeasonReport) -> str:
    least, most = scale(
        [standing.return_percent for standing in season.standings],
        [standing.evidence.interval_percent for standing in season.standings],
    )
    rows: list[Sequence[str]] = []
    for standing in season.standings:
        account, bounds, value = standing.account, standing.evidence.interval_percent, standing.return_percent
        bar = interval(bounds, value, least, most, VARIANTS[VariantId(account.variant)].color)
        why = standing.evidence.reason if bounds is None else minus(f"{bounds.low:+.1f} to {bounds.high:+.1f} %")
        rows.append(
            (
                escape(account.name), _variant(account.variant), signed(value, " %"),
                f'{bar}<br><span class="words unsure">{escape(why or "")}</span>', _against_next(standing.verdict),
                f"{standing.drawdown:.1f} %", f"{account.within_minute:,} of {account.trades:,}",
                signed(account.change), f"{account.equity:,.2f}", *_model_cost(season, [account]),
            )
        )  # fmt: skip
    for model, run in season.unvalued:
        began = f"{run.started_at:%d %B, %H:%M} UTC with {run.initial_capital:,.2f}"
        words = f"no snapshot yet since it began on {began}"
        name = f'{escape(model.name)}<br><span class="unsure">{words}</span>'
        rows.append((name, _variant(model.variant), *[""] * 8))
    heads = (
        season.entrant, "variant", "return", "95 % interval, for one look", "against the next", "drawdown",
        "trades under 1 min", "change", "equity", *_model_cost_heads(season),
    )  # fmt: skip
    return table(heads, rows, text_columns=2)


def _against_next(verdict: Verdict | None) -> str:
    """Return the verdict in words; its title attribute says why it is uncertain."""
    if verdict is None:
        return "–"
    kind = "" if verdict.why is None else ' class="unsure"'
    return f'<span{kind} title="{escape(verdict.why or "")}">{verdict.word}</span>'


def _legend(season: SeasonReport) -> str:
    shown = [variant for variant in VARIANTS.values() if season.of_variant(variant.id)]
    names = (f"<span>{key(variant.color)}{escape(season.label(variant))}</span>" for variant in shown)
    return f'<div class="keys">{"".join(names)}</div>'


def _variant(name: str) -> str:
    return key(VARIANTS[VariantId(name)].color) + escape(name)


def _sum(accounts: Iterable[AccountReport], part: Callable[[AccountReport], Decimal]) -> Decimal:
    return sum(map(part, accounts), ZERO)


def _model_cost_heads(season: SeasonReport) -> list[str]:
    return ["model cost, USD"] if season.has_model_costs else []


def _model_cost(season: SeasonReport, accounts: Sequence[AccountReport]) -> list[str]:
    known = [account.model_cost for account in accounts if account.model_cost is not None]
    return [f"{sum(known, ZERO):,.2f}" if known else "–"] if season.has_model_costs else []


def signed(value: float | Decimal, unit: str = "", digits: int = 2) -> str:
    """Return a figure as HTML with sign and color; its title attribute has all digits."""
    kind = "gain" if value > 0 else "loss" if value < 0 else ""
    return f'<span class="{kind}" title="{value}">{minus(f"{value:+,.{digits}f}")}{unit}</span>'
