"""HTML report of an exam: profiles of skills, verdicts on pairs, and examples of single states."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

import numpy as np

from trader.agents.domain.tools import ClosePosition, CreatePosition, Holding, PlaceOrder
from trader.api.dashboard.document import document, interval, minus, scale, table
from trader.core.clock import iso, moment_of
from trader.exam.domain.scores import MeanOfStates, Share
from trader.exam.domain.worlds import RECENT, Edge, World, draw_world
from trader.exam.folder import ExamPlan
from trader.exam.opening import world_room
from trader.exam.report import EntrantResult, ExamResult
from trader.exam.sitting import Sitting

_SHOWN_MINUTES: Final = 720
_WIDTH: Final = 640
_HEIGHT: Final = 140
_SAID_MAX: Final = 600

_WORDS: Final = (
    "A share is the expected value of an entrant's decisions over that of a decision maker who knows the law of each "
    "state, costs included: 1 is all of it, 0 is what holding nothing earns. The exam measures whether a model finds "
    "structure that is there and pays nothing where there is none. It does not promise profit."
)
_RECORDED_WORDS: Final = (
    "Every entrant decided in the same moments of a recording, with the same account, which every second time held a "
    "position. The noise of the market is in these outcomes. They do not promise profit."
)


def page(result: ExamResult, plan: ExamPlan, secret: str, sittings: Sequence[Sitting]) -> str:
    """Return the report on a result."""
    body = f"<h1>Exam</h1><p>{result.states} of {result.planned} states. "
    body += f"{_WORDS if plan.recording is None else _RECORDED_WORDS}</p>"
    if plan.recording is not None:
        body += _outcomes(result)
    else:
        bounds = _common_scale(result.entrants)
        body += "".join(_profile(entrant, *bounds) for entrant in result.entrants) + _burnt(result)
    body += _pairs(result)
    if plan.recording is None:
        cards = "".join(_examples(plan, secret, sittings))
        body += _section("Examples", "Each entrant's best and worst decision.", f'<div class="cards">{cards}</div>')
    return document("Exam", body)


def _section(title: str, words: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{words}</p>{content}</section>"


def _shares(entrant: EntrantResult) -> dict[str, Share]:
    """Return the shares that an entrant has, by edge and in all."""
    return {**entrant.shares} | ({} if entrant.share is None else {"all": entrant.share})


def _common_scale(entrants: Sequence[EntrantResult]) -> tuple[float, float]:
    shares = [share for entrant in entrants for share in _shares(entrant).values()]
    return scale((each.share for each in shares), (each.interval for each in shares))


def _profile(entrant: EntrantResult, least: float, most: float) -> str:
    """Return the bars of one entrant: its share of the oracle in each edge, with intervals and sizes."""
    rows = []
    for edge, share in _shares(entrant).items():
        sizes = entrant.sizes.get(Edge(edge)) if edge in list(Edge) else None
        size, over = "", ""
        if sizes is not None and sizes.median is not None:
            size, over = f"{sizes.median:.2f}", f"{100 * sizes.over:.0f} %"
        drawn = interval(share.interval, share.share, least, most)
        rows.append((edge, minus(f"{share.share:+.2f}"), drawn, f"{share.states}", size, over))
    notes = [f"refused {count} × {escape(rule)}" for rule, count in entrant.refusals.items()]
    cost = entrant.cost_usd_per_state
    notes += [] if cost is None else [f"{cost:.4f} USD and {entrant.tokens_per_state or 0:.0f} tokens per state"]
    if entrant.agreement is not None:
        notes.append(f"passed all of {entrant.samples} samples in {100 * entrant.agreement:.0f} % of states")
    head = ("edge", "share", f"{minus(f'{least:+.1f}')} to {minus(f'{most:+.1f}')}", "states", "size", "oversized")
    return _section(entrant.entrant, "; ".join(notes), table(head, rows))


def _burnt(result: ExamResult) -> str:
    figures = _figures({each.entrant: each.burnt_bp for each in result.entrants}, 1)
    return _section("Burned where nothing pays", "Basis points of equity per state.", figures)


def _outcomes(result: ExamResult) -> str:
    unit = f"In units of the volatility of {result.horizon}, net of costs"
    outcomes = _figures({each.entrant: each.outcome for each in result.entrants}, 3)
    selections = _figures({each.entrant: each.selection for each in result.entrants}, 3)
    return _section("Outcomes", f"{unit} and drift.", outcomes) + _section(
        "Beyond the market", f"{unit} and of beta times the move of BTC: what choosing markets earned.", selections
    )


def _figures(figures: Mapping[str, MeanOfStates | None], digits: int) -> str:
    """Return the table of a figure of each entrant that has it."""
    known = {name: figure for name, figure in figures.items() if figure is not None}
    least, most = scale((each.mean for each in known.values()), (each.interval for each in known.values()))
    rows = [
        (escape(name), minus(f"{each.mean:+.{digits}f}"), interval(each.interval, each.mean, least, most))
        for name, each in known.items()
    ]
    return table(("entrant", "mean", minus(f"{least:+.{digits}f} to {most:+.{digits}f}")), rows)


def _pairs(result: ExamResult) -> str:
    rows = [
        (
            escape(pair.first),
            escape(pair.second),
            pair.verdict,
            f"{pair.states}",
            minus(f"{pair.mean:+.2f}"),
            f"{min(pair.better_level, pair.worse_level):.2g}",
        )
        for pair in result.comparisons
    ]
    head = ("entrant", "other", "verdict", "states", "mean difference", "level")
    words = "The verdicts hold at every look. The level is one over the largest wealth of a bet on the difference."
    return _section("Pairs", words, table(head, rows, text_columns=3))


def _examples(plan: ExamPlan, secret: str, sittings: Sequence[Sitting]) -> Iterator[str]:
    """Yield each entrant's best and worst decision: what it saw, decided and said, and what the oracle would have."""
    states, room = {state.number: state for state in plan.states}, world_room(plan.settings, ())
    for name in plan.entrants:
        own = sorted((each for each in sittings if each.entrant == name), key=lambda each: each.score - each.oracle)
        for sitting in [own[-1], own[0]] if own and any(each.answer.decided for each in own) else ():
            state = states[sitting.state]
            world = draw_world(secret, state.number, state.edge, state.kind or "null", room.costs)
            yield _example(sitting, world)


def _example(sitting: Sitting, world: World) -> str:
    symbol = world.symbols[world.market]
    edge = "ordinary hours" if world.edge is None else f"{world.edge} ({world.kind})"
    side = {1: "long", -1: "short", 0: "nothing"}[world.side]
    best = f"{side} in {symbol}" if world.side else side
    best = "close the position" if world.edge is Edge.DRAIN and world.kind == "planted" else best
    figures = f"scores {1e4 * sitting.score:+.1f} bp of equity; the oracle {1e4 * sitting.oracle:+.1f} bp"
    said = f"<blockquote>{escape(sitting.answer.said[:_SAID_MAX])}</blockquote>" if sitting.answer.said else ""
    return (
        f'<div class="card panel"><h3>{escape(sitting.entrant)}, state {sitting.state}: {escape(edge)}</h3>'
        f"<p>{symbol}, the twelve hours until {iso(moment_of(world.state))}</p>{_chart(world)}"
        f"<p>Decided: {escape(_decision_words(sitting)) or 'nothing'}; {minus(figures)}. Oracle: {best}.</p>"
        f"{said}</div>"
    )


def _decision_words(sitting: Sitting) -> str:
    decided = sitting.answer.decided
    words = []
    for decision in (call.decision for step in decided.steps for call in step.calls) if decided else ():
        match decision:
            case CreatePosition():
                words.append(f"{decision.side.lower()} {decision.quantity:g} {decision.symbol}, stop {decision.stop:g}")
            case PlaceOrder():
                words.append(f"{decision.side} {decision.quantity:g} {decision.symbol}")
            case ClosePosition():
                words.append(f"close {decision.symbol}")
            case Holding():
                pass
            case _:
                words.append(type(decision).__name__)
    return ", ".join(words)


def _chart(world: World) -> str:
    """Return the closes of the market of the edge as a line."""
    closes = world.recent[world.market].close[RECENT - _SHOWN_MINUTES : RECENT]
    low, high = float(closes.min()), float(closes.max())
    across = np.linspace(0, _WIDTH, len(closes))
    up = _HEIGHT - (closes - low) / (high - low) * _HEIGHT
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across.tolist(), up.tolist(), strict=True))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" height="{_HEIGHT}" preserveAspectRatio="none" role="img">'
        f'<title>{low:g} to {high:g}</title><polyline points="{points}" fill="none" stroke="currentColor" '
        'vector-effect="non-scaling-stroke"/></svg>'
    )
