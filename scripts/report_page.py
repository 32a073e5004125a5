"""The page of a season report: one HTML file with nothing outside of it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from html import escape
from statistics import median
from typing import NamedTuple

from report_charts import CARD_WIDTH, Line, bars, histogram, interval, line_chart

from trader.domain.models import VariantId
from trader.domain.money import ZERO
from trader.domain.portfolio.statistics import Confidence95
from trader.store.portfolio.season import Account, TradeShape, Unseen
from trader.variants import VARIANTS

Hours = Mapping[str, Sequence[tuple[datetime, float]]]


class Season(NamedTuple):
    """What the page shows. `accounts` are ordered best first; `certain` says whose place is more than luck.

    `unseen` are in no figure but that of the trades.
    """

    name: str
    accounts: Sequence[Account]
    unseen: Sequence[Unseen]
    hours: Hours
    trades: Sequence[TradeShape]
    intervals: Mapping[str, Confidence95 | None]
    drawdowns: Mapping[str, float]
    certain: Mapping[str, bool]

    @property
    def unexplained(self) -> list[Account]:
        """The accounts whose books do not explain their equity to the last digit."""
        return [account for account in self.accounts if account.explained != account.change]


STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #ffffff; --ink: #1b2130; --soft: #5d6678; --rule: #e3e6ec;
  --gain: #0f8a5f; --loss: #c8334a; --accent: #3558d4 }
@media (prefers-color-scheme: dark) { :root { --back: #10131a; --card: #181c26; --ink: #e7eaf1; --soft: #98a2b6;
  --rule: #2a3040; --gain: #3ecf97; --loss: #ff6f83; --accent: #8fa8ff } }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 28px; margin: 0 } h2 { font-size: 19px; margin: 40px 0 12px } h3 { font-size: 15px; margin: 0 0 6px }
p { margin: 4px 0 12px; color: var(--soft); max-width: 80ch }
.tiles, .cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)) }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums }
.tile > span { color: var(--soft) }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px }
.keys { color: var(--soft); margin-bottom: 6px } .keys span.name { margin-right: 16px }
svg { display: block; width: 100%; height: auto } svg.small { width: 160px; height: 20px }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } svg text.value { fill: var(--ink); font-size: 12px }
.rule { stroke: var(--rule) } .zero { stroke: var(--soft); stroke-dasharray: 3 3 } .range { stroke: var(--soft);
  stroke-width: 2 }
polyline { fill: none } polyline.main { stroke-width: 2.2 } polyline.thin { stroke-width: 1; opacity: .38 }
polyline.thin:hover { opacity: 1; stroke-width: 2 }
rect.gain, circle.gain { fill: var(--gain) } rect.loss, circle.loss { fill: var(--loss) }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; white-space: nowrap;
  font-size: 14px }
th, td { padding: 6px 9px; text-align: right; border-top: 1px solid var(--rule) }
th { border: 0; color: var(--soft); font-weight: 600; position: sticky; top: 0; background: var(--card);
  white-space: normal; vertical-align: bottom }
th:first-child, td:first-child, .text { text-align: left } tr.sum td { font-weight: 600 }
.gain { color: var(--gain) } .loss { color: var(--loss) } .unsure { color: var(--soft) }
.seal { border-left: 4px solid var(--gain); padding: 8px 14px; background: var(--card) } .seal.bad {
  border-color: var(--loss) }
"""


def page(season: Season) -> str:
    """The whole report."""
    body = "".join(
        [
            _head(season),
            _section("Equity", _EQUITY, _equity(season)),
            _section("Drawdowns", _DRAWDOWNS, _drawdowns(season)),
            _section("Trades", _TRADES, _distribution(season)),
            _section("Where the money went", _COSTS, _costs(season)),
            _section("Leaderboard", _BOARD, _leaderboard(season)),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Season report: {escape(season.name)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


_EQUITY = "The average equity of each variant's models, in percent of what they began with; thin lines are models."
_DRAWDOWNS = "How far the average of each variant, and each model, is below its highest value so far."
_TRADES = "Net profit of completed trades in percent of their entry notional."
_COSTS = (
    "From the capital at the start to the equity at the end, each part summed from the books. What the language models "
    "cost is paid outside of the accounts and stands beside them."
)
_BOARD = (
    "Best return first. The bar is the 95 % interval of the return; a place is certain when the interval does not "
    "touch those of its neighbours, and else shown in gray."
)


def _section(title: str, words: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{words}</p>{content}</section>"


def _head(season: Season) -> str:
    start = min(account.started_at for account in season.accounts)
    end = max(account.at for account in season.accounts)
    change = sum((account.change for account in season.accounts), ZERO)
    capital = sum((account.initial_capital for account in season.accounts), ZERO)
    tiles = (
        ("models", f"{len(season.accounts):,}"),
        ("days", f"{(end - start) / timedelta(days=1):.1f}"),
        ("completed trades", f"{len(season.trades):,}"),
        ("invocations", f"{sum(account.invocations for account in season.accounts):,}"),
        ("return of all accounts", _signed(float(100 * change / capital), 2, " %")),
    )
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)
    return (
        f"<h1>Season report</h1><p>{escape(season.name)}: {start:%d %B %Y, %H:%M} to {end:%d %B %Y, %H:%M} UTC</p>"
        f'<div class="tiles">{shown}</div>'
    )


def _of_variants(season: Season) -> dict[VariantId, list[Account]]:
    found: dict[VariantId, list[Account]] = {variant: [] for variant in VARIANTS}
    for account in season.accounts:
        found[VariantId(account.variant)].append(account)
    return found


def _percent_of_start(season: Season, account: Account) -> list[tuple[datetime, float]]:
    capital = float(account.initial_capital)
    return [(hour, 100 * value / capital - 100) for hour, value in season.hours.get(account.model_id, ())]


def average(series: Sequence[Sequence[tuple[datetime, float]]]) -> list[tuple[datetime, float]]:
    """The average of the values that there are at each moment, ascending."""
    found: defaultdict[datetime, list[float]] = defaultdict(list)
    for points in series:
        for moment, value in points:
            found[moment].append(value)
    return [(moment, sum(values) / len(values)) for moment, values in sorted(found.items())]


def below_peak(points: Sequence[tuple[datetime, float]]) -> list[tuple[datetime, float]]:
    """The distance from the highest value so far, in percent of it; values are percents above a start."""
    peak, found = float("-inf"), []
    for moment, value in points:
        peak = max(peak, 100 + value)
        found.append((moment, 100 * (100 + value) / peak - 100 if peak > 0 else 0.0))
    return found


def _charts(season: Season, shape: Callable[[list[tuple[datetime, float]]], list[tuple[datetime, float]]]) -> str:
    """One chart of all variants, then one per variant with its models."""
    cards, overview = [], []
    for variant, accounts in _of_variants(season).items():
        color, label = VARIANTS[variant].color, VARIANTS[variant].label
        series = [_percent_of_start(season, account) for account in accounts]
        main = Line(f"{label}, average", color, shape(average(series)), is_main=True)
        overview.append(main)
        models = [Line(a.name, color, shape(each)) for a, each in zip(accounts, series, strict=True)]
        chart = line_chart([*models, main], _percent, label, CARD_WIDTH)
        count = "1 model" if len(accounts) == 1 else f"{len(accounts)} models"
        cards.append(f'<div class="card"><h3>{escape(label)}, {count}</h3>{chart}</div>')
    chart = line_chart(overview, _percent, "All variants")
    return f'<div class="card">{_keys()}{chart}</div><br><div class="cards">{"".join(cards)}</div>'


def _keys() -> str:
    names = (
        f'<span class="key" style="background:{one.color}"></span><span class="name">{escape(one.label)}</span>'
        for one in VARIANTS.values()
    )
    return f'<div class="keys">{"".join(names)}</div>'


def _equity(season: Season) -> str:
    return _charts(season, lambda points: points)


def _drawdowns(season: Season) -> str:
    return _charts(season, below_peak)


def _distribution(season: Season) -> str:
    by_variant: dict[str, list[TradeShape]] = {variant: [] for variant in VARIANTS}
    for trade in season.trades:
        by_variant[trade.variant].append(trade)
    groups = [
        (VARIANTS[VariantId(variant)].label, VARIANTS[VariantId(variant)].color, [t.net_percent for t in trades])
        for variant, trades in by_variant.items()
    ]
    rows = []
    for variant, trades in by_variant.items():
        if not trades:
            continue
        nets, reasons = [t.net_percent for t in trades], [t.close_reason for t in trades]
        shares = "".join(
            f"<td>{100 * sum(one in group for one in reasons) / len(reasons):.1f} %</td>" for group in _REASONS.values()
        )
        rows.append(
            f"<tr><td>{escape(VARIANTS[VariantId(variant)].label)}</td><td>{len(trades):,}</td>"
            f"<td>{100 * sum(net > 0 for net in nets) / len(nets):.1f} %</td><td>{_signed(median(nets), 3, ' %')}</td>"
            f"<td>{median(t.held / timedelta(minutes=1) for t in trades):.0f} min</td>{shares}</tr>"
        )
    heads = "".join(f"<th>{name}</th>" for name in ("variant", "trades", "won", "median net", "median held", *_REASONS))
    chart = histogram(groups, -2.0, 2.0, "Net profit of trades")
    return (
        f'<div class="card">{_keys()}{chart}</div><br>'
        f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'
    )


_REASONS = {
    "by decision": ("order", "limit"),
    "by stop": ("stop", "invalidation"),
    "by target": ("target",),
    "by time": ("time",),
    "liquidated": ("liquidation",),
    "by operator": ("operator",),
}

_PARTS: Sequence[tuple[str, Callable[[Account], Decimal]]] = (
    ("gross, completed", lambda account: account.gross),
    ("gross, still open", lambda account: account.unrealized),
    ("trading fees", lambda account: -account.fees),
    ("funding", lambda account: account.funding),
    ("liquidation fees", lambda account: -account.liquidation_fees),
    ("insurance", lambda account: account.insurance),
)


def _costs(season: Season) -> str:
    groups: list[tuple[str, Sequence[Account]]] = [
        (VARIANTS[variant].label, accounts) for variant, accounts in _of_variants(season).items() if accounts
    ]
    groups.append(("all", season.accounts))
    rows = []
    for name, accounts in groups:
        cells = "".join(_money(sum((part(one) for one in accounts), ZERO)) for _, part in _PARTS)
        change = _money(sum((one.change for one in accounts), ZERO))
        kind = ' class="sum"' if name == "all" else ""
        rows.append(f"<tr{kind}><td>{escape(name)}</td>{cells}{change}{_model_cost(accounts)}</tr>")
    heads = "".join(f"<th>{name}</th>" for name in ("", *(name for name, _ in _PARTS), "change", "model cost, USD"))
    drawn = [(name, float(sum((part(one) for one in season.accounts), ZERO))) for name, part in _PARTS]
    drawn.append(("change", float(sum((one.change for one in season.accounts), ZERO))))
    chart = bars([(name, value, _signed_plain(value)) for name, value in drawn], "Parts of the change of equity")
    return f'{_seal(season)}<div class="card">{chart}</div><br><div class="scroll"><table><tr>{heads}</tr>' + (
        "".join(rows) + "</table></div>"
    )


def _seal(season: Season) -> str:
    wrong = season.unexplained
    if not wrong:
        words = "The parts of every account add up to the change of its equity, to the last digit."
        return f'<p class="seal">{words}</p>'
    names = ", ".join(escape(account.model_id) for account in wrong[:10])
    return f'<p class="seal bad">The books do not explain the equity of {len(wrong)} accounts: {names}.</p>'


def _model_cost(accounts: Sequence[Account]) -> str:
    known = [account.model_cost for account in accounts if account.model_cost is not None]
    return f"<td>{sum(known, ZERO):,.2f}</td>" if known else "<td>–</td>"


def _leaderboard(season: Season) -> str:
    returns = {a.model_id: float(100 * a.change / a.initial_capital) for a in season.accounts}
    bounds = [bound for one in season.intervals.values() if one is not None for bound in (one.low, one.high)]
    numbers = sorted([*returns.values(), *bounds])
    least, most = min(0.0, numbers[len(numbers) // 50]), max(0.0, numbers[-1 - len(numbers) // 50])
    rows = []
    for rank, account in enumerate(season.accounts, start=1):
        found, value = season.intervals[account.model_id], returns[account.model_id]
        low, high = (found.low, found.high) if found is not None else (None, None)
        text = "too little data" if found is None else f"{found.low:+.1f} to {found.high:+.1f} %"
        sure = "text" if season.certain[account.model_id] else "text unsure"
        variant = VARIANTS[VariantId(account.variant)]
        rows.append(
            f'<tr><td class="{sure}">{rank}</td><td class="text">{escape(account.name)}</td>'
            f'<td class="text"><span class="key" style="background:{variant.color}"></span>{escape(variant.id)}</td>'
            f"<td>{_signed(value, 2, ' %')}</td><td>{interval(low, value, high, least, most)}</td><td>{text}</td>"
            f"<td>{season.drawdowns[account.model_id]:.1f} %</td>{_money(account.change)}"
            f"<td>{account.equity:,.2f}</td>{_model_cost([account])}</tr>"
        )
    rows += [_unseen_row(one) for one in season.unseen]
    names = (
        "rank",
        "model",
        "variant",
        "return",
        "",
        "95 % interval",
        "drawdown",
        "change",
        "equity",
        "model cost, USD",
    )
    heads = "".join(f'<th class="{"text" if place < 3 else ""}">{name}</th>' for place, name in enumerate(names))
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'


def _unseen_row(model: Unseen) -> str:
    variant = VARIANTS[VariantId(model.variant)]
    words = f"no snapshot yet since it began on {model.started_at:%d %B, %H:%M} UTC with {model.initial_capital:,.2f}"
    return (
        f'<tr><td class="text unsure">–</td><td class="text">{escape(model.name)}</td>'
        f'<td class="text"><span class="key" style="background:{variant.color}"></span>{escape(variant.id)}</td>'
        f'<td class="text unsure" colspan="7">{words}</td></tr>'
    )


def _percent(value: float) -> str:
    return f"{value:.0f} %" if abs(value) >= 10 or value == int(value) else f"{value:.1f} %"


def _signed(value: float, digits: int, unit: str) -> str:
    kind = "gain" if value > 0 else "loss" if value < 0 else ""
    return f'<span class="{kind}">{value:+,.{digits}f}{unit}</span>'.replace("-", "−")


def _signed_plain(value: float) -> str:
    return f"{value:+,.0f}".replace("-", "−")


def _money(value: Decimal) -> str:
    kind = "gain" if value > 0 else "loss" if value < 0 else ""
    return f'<td class="{kind}" title="{value:f}">{value:+,.2f}</td>'.replace(">-", ">−")
