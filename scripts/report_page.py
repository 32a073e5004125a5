"""The page of a season report: one HTML file with nothing outside of it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from html import escape
from statistics import median
from typing import NamedTuple

from report_charts import CARD_WIDTH, Line, bars, histogram, interval, line_chart

from trader.domain.models import VariantId
from trader.domain.money import ZERO
from trader.domain.portfolio.evidence import Statement, Verdict
from trader.store.portfolio.season import AccountReport, TradeOutcome, UnvaluedModel
from trader.variants import VARIANTS

Curve = Sequence[tuple[datetime, float]]


class Standing(NamedTuple):
    """A model's place. `curve` is its hourly equity in percent above its start; the verdict is against the next one."""

    account: AccountReport
    curve: Curve
    evidence: Statement
    drawdown: float
    verdict: Verdict | None = None

    @property
    def return_percent(self) -> float:
        return float(100 * self.account.change / self.account.initial_capital)


class Season(NamedTuple):
    """What the page shows. `standings` are ordered best first; `unvalued` models are in no figure but their trades."""

    name: str
    standings: Sequence[Standing]
    unvalued: Sequence[UnvaluedModel]
    trades: Sequence[TradeOutcome]

    @property
    def accounts(self) -> list[AccountReport]:
        return [standing.account for standing in self.standings]

    @property
    def unexplained(self) -> list[AccountReport]:
        """The accounts whose books do not explain their equity to the last digit."""
        return [account for account in self.accounts if account.explained != account.change]

    def of_variant(self, variant: VariantId) -> list[Standing]:
        return [standing for standing in self.standings if standing.account.variant == variant]


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
th:first-child, td:first-child, .text { text-align: left }
.gain { color: var(--gain) } .loss { color: var(--loss) } .unsure { color: var(--soft) }
.seal { border-left: 4px solid var(--gain); padding: 8px 14px; background: var(--card) } .seal.bad {
  border-color: var(--loss) }
"""


EQUITY = "The average equity of each variant's models, in percent of what they began with; thin lines are models."
DRAWDOWNS = "How far the average of each variant, and each model, is below its highest value so far."
TRADES = "Net profit of completed trades in percent of their entry notional."
COSTS = (
    "From the capital at the start to the equity at the end, each part summed from the books. What the language models "
    "cost is paid outside of the accounts and stands beside them."
)
BOARD = (
    "Best return first. The bar is the 95 % interval of the return. The verdict compares each model with the next one, "
    "hour by hour; all verdicts together are wrong in at most 5 % of cases, however often one looks."
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


def page(season: Season) -> str:
    """Return the whole report as HTML."""
    body = _head(season) + "".join(
        f"<section><h2>{title}</h2><p>{words}</p>{content}</section>"
        for title, words, content in (
            ("Equity", EQUITY, _curves(season, lambda curve: curve)),
            ("Drawdowns", DRAWDOWNS, _curves(season, below_peak)),
            ("Trades", TRADES, _trades(season)),
            ("Where the money went", COSTS, _costs(season)),
            ("Leaderboard", BOARD, _leaderboard(season)),
        )
    )
    return document(f"Season report: {season.name}", body)


def document(title: str, body: str) -> str:
    """Return an HTML document in the style of the reports."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def average(curves: Iterable[Curve]) -> Curve:
    """Return the average of the values at each moment, ascending."""
    found: defaultdict[datetime, list[float]] = defaultdict(list)
    for curve in curves:
        for moment, value in curve:
            found[moment].append(value)
    return [(moment, sum(values) / len(values)) for moment, values in sorted(found.items())]


def below_peak(curve: Curve) -> Curve:
    """Return the distance from the highest value so far, in percent of it; values are percents above a start."""
    peak, found = float("-inf"), []
    for moment, value in curve:
        peak = max(peak, 100 + value)
        found.append((moment, 100 * (100 + value) / peak - 100 if peak > 0 else 0.0))
    return found


def _head(season: Season) -> str:
    accounts = season.accounts
    start, end = min(account.started_at for account in accounts), max(account.at for account in accounts)
    capital = sum((account.initial_capital for account in accounts), ZERO)
    tiles = (
        ("models", f"{len(accounts):,}"),
        ("days", f"{(end - start) / timedelta(days=1):.1f}"),
        ("completed trades", f"{len(season.trades):,}"),
        ("invocations", f"{sum(account.invocations for account in accounts):,}"),
        ("return of all accounts", _signed(100 * _sum(accounts, lambda account: account.change) / capital, " %")),
    )
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)
    return (
        f"<h1>Season report</h1><p>{escape(season.name)}: {start:%d %B %Y, %H:%M} to {end:%d %B %Y, %H:%M} UTC</p>"
        f'<div class="tiles">{shown}</div>'
    )


def _curves(season: Season, shape: Callable[[Curve], Curve]) -> str:
    """Draw one chart of all variants, then one per variant with its models."""
    cards, averages = [], []
    for variant in VARIANTS.values():
        standings = season.of_variant(variant.id)
        mean = shape(average(standing.curve for standing in standings))
        averages.append(Line(f"{variant.label}, average", variant.color, mean, is_main=True))
        models = [Line(one.account.name, variant.color, shape(one.curve)) for one in standings]
        chart = line_chart([*models, averages[-1]], _percent, variant.label, CARD_WIDTH)
        count = "1 model" if len(standings) == 1 else f"{len(standings)} models"
        cards.append(f'<div class="card"><h3>{escape(variant.label)}, {count}</h3>{chart}</div>')
    chart = line_chart(averages, _percent, "All variants")
    return f'<div class="card">{_legend()}{chart}</div><br><div class="cards">{"".join(cards)}</div>'


def _trades(season: Season) -> str:
    groups, rows = [], []
    for variant in VARIANTS.values():
        trades = [trade for trade in season.trades if trade.variant == variant.id]
        nets, reasons = [trade.net_percent for trade in trades], [trade.close_reason for trade in trades]
        groups.append((variant.label, variant.color, nets))
        if trades:
            won = sum(net > 0 for net in nets)
            closed = [sum(map(reasons.count, group)) for group in CLOSE_REASONS.values()]
            held = median(trade.held / timedelta(minutes=1) for trade in trades)
            shares = [f"{100 * count / len(trades):.1f} %" for count in (won, *closed)]
            rows.append(
                (escape(variant.label), f"{len(trades):,}", shares[0], _signed(median(nets), " %", 3),
                 f"{held:.0f} min", *shares[1:])
            )  # fmt: skip
    chart = histogram(groups, -2.0, 2.0, "Net profit of trades")
    found = table(("variant", "trades", "won", "median net", "median held", *CLOSE_REASONS), rows)
    return f'<div class="card">{_legend()}{chart}</div><br>{found}'


def _costs(season: Season) -> str:
    groups = [(one.label, [each.account for each in season.of_variant(one.id)]) for one in VARIANTS.values()]
    rows = [
        (escape(name), *(_signed(_sum(accounts, part)) for _, part in PARTS), _model_cost(accounts))
        for name, accounts in (*groups, ("all", season.accounts))
        if accounts
    ]
    sums = [(name, float(_sum(season.accounts, part))) for name, part in PARTS]
    chart = bars([(name, value, minus(f"{value:+,.0f}")) for name, value in sums], "Parts of the change of equity")
    found = table(("", *(name for name, _ in PARTS), "model cost, USD"), rows)
    return f'{_verdict(season)}<div class="card">{chart}</div><br>{found}'


def _verdict(season: Season) -> str:
    wrong = season.unexplained
    if not wrong:
        return '<p class="seal">The parts of every account add up to the change of its equity, to the last digit.</p>'
    names = ", ".join(escape(account.model_id) for account in wrong[:10])
    return f'<p class="seal bad">The books do not explain the equity of {len(wrong)} accounts: {names}.</p>'


def _leaderboard(season: Season) -> str:
    numbers = [one.return_percent for one in season.standings]
    numbers = sorted(numbers + [bound for one in season.standings for bound in one.evidence.interval_percent or ()])
    cut = len(numbers) // 50
    least, most = min(0.0, numbers[cut]), max(0.0, numbers[-1 - cut])
    rows: list[Sequence[str]] = []
    for rank, one in enumerate(season.standings, start=1):
        account, bounds, value = one.account, one.evidence.interval_percent, one.return_percent
        rows.append(
            (
                f"{rank}", escape(account.name), _variant(account.variant), _signed(value, " %"),
                interval(bounds, value, least, most),
                escape(one.evidence.reason or "")
                if bounds is None
                else minus(f"{bounds.low:+.1f} to {bounds.high:+.1f} %"),
                _against_next(one.verdict),
                f"{one.drawdown:.1f} %", _signed(account.change), f"{account.equity:,.2f}", _model_cost([account]),
            )
        )  # fmt: skip
    for model in season.unvalued:
        began = f"{model.started_at:%d %B, %H:%M} UTC with {model.initial_capital:,.2f}"
        words = f"no snapshot yet since it began on {began}"
        name = f'{escape(model.name)}<br><span class="unsure">{words}</span>'
        rows.append(("–", name, _variant(model.variant), *[""] * 8))
    heads = (
        "rank", "model", "variant", "return", "", "95 % interval", "against the next", "drawdown", "change",
        "equity", "model cost, USD",
    )  # fmt: skip
    return table(heads, rows, text_columns=3)


def _against_next(verdict: Verdict | None) -> str:
    """Return the verdict in words; what cannot be seen yet is in its title."""
    if verdict is None:
        return "–"
    kind = "" if verdict.why is None else ' class="unsure"'
    return f'<span{kind} title="{escape(verdict.why or "")}">{verdict.word}</span>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table of HTML cells, whose first columns hold text and the others figures."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="text"' if place < text_columns else "" for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{line("th", heads)}</tr>{body}</table></div>'


def _legend() -> str:
    names = (f'{_key(one.color)}<span class="name">{escape(one.label)}</span>' for one in VARIANTS.values())
    return f'<div class="keys">{"".join(names)}</div>'


def _variant(name: str) -> str:
    return _key(VARIANTS[VariantId(name)].color) + escape(name)


def _key(color: str) -> str:
    return f'<span class="key" style="background:{color}"></span>'


def _sum(accounts: Iterable[AccountReport], part: Callable[[AccountReport], Decimal]) -> Decimal:
    return sum(map(part, accounts), ZERO)


def _model_cost(accounts: Sequence[AccountReport]) -> str:
    known = [account.model_cost for account in accounts if account.model_cost is not None]
    return f"{sum(known, ZERO):,.2f}" if known else "–"


def _percent(value: float) -> str:
    return f"{value:.0f} %" if abs(value) >= 10 or value == int(value) else f"{value:.1f} %"


def _signed(value: float | Decimal, unit: str = "", digits: int = 2) -> str:
    """Return a figure with its sign and color; its title has all digits."""
    kind = "gain" if value > 0 else "loss" if value < 0 else ""
    return f'<span class="{kind}" title="{value}">{minus(f"{value:+,.{digits}f}")}{unit}</span>'


def minus(text: str) -> str:
    return text.replace("-", "−")
