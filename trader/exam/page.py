"""Report of an exam as an HTML file: its result, and examples of single states."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision, Holding, PlaceOrder, UpdateExitPlan
from trader.api.dashboard.reports import report_page
from trader.core.clock import epoch_second, iso, moment_of
from trader.exam.domain.law import HORIZON
from trader.exam.domain.scores import BASIS_POINTS
from trader.exam.domain.worlds import RECENT, Edge, World
from trader.exam.folder import ExamPlan
from trader.exam.opening import world_of, world_room
from trader.exam.report import ExamResult, summary
from trader.exam.sitting import Sitting

_SHOWN_MINUTES: Final = 720
_SAID_MAX: Final = 600
_KINDS: Final = {"planted": "an edge", "null": "no edge this time", "reversed": "the opposite of an edge"}


def page(result: ExamResult, plan: ExamPlan, secret: str, sittings: Sequence[Sitting]) -> str:
    """Return the report on a result. In moments of a recording, no world is there to show."""
    is_recorded = plan.recording is not None
    examples = [] if is_recorded else list(_examples(plan, secret, sittings))
    return report_page(
        "exam",
        "Exam",
        {"summary": summary(plan, result), "result": result, "isRecorded": is_recorded, "examples": examples},
    )


def _examples(plan: ExamPlan, secret: str, sittings: Sequence[Sitting]) -> Iterator[dict[str, Any]]:
    """Yield each entrant's best and worst decision: what it saw, decided and said, and what the oracle would have."""
    states, room = plan.states, world_room(plan.settings, (), is_managed=plan.managed)
    for name in plan.entrants:
        own = sorted((each for each in sittings if each.entrant == name), key=lambda each: each.score - each.oracle)
        for sitting in [own[-1], own[0]] if own and any(each.answer.decided for each in own) else ():
            yield _example(sitting, world_of(room, plan.seed(secret), states[sitting.state]))


def _example(sitting: Sitting, world: World) -> dict[str, Any]:
    symbol, closes, law = world.symbols[world.market], world.recent[world.market].close, world.law
    minutes = law.drift.shape[1]
    follows = closes[RECENT : RECENT + minutes]  # or what is expected to, where prices stand still
    if minutes == HORIZON:
        follows = closes[RECENT - 1] * np.exp(np.cumsum(law.drift[world.market]))
    side = {1: "long", -1: "short", 0: "nothing"}[world.side]
    best = f"{side} in {symbol}" if world.side else side
    stands = f", with a standing {'long' if world.standing > 0 else 'short'} in {world.symbols[world.stands_in]}"
    return {
        "entrant": sitting.entrant,
        "state": sitting.state,
        "edge": ("ordinary hours" if world.edge is None else f"{world.edge}, {_KINDS[world.kind]}")
        + (stands if world.standing else ""),
        "symbol": symbol,
        "until": iso(moment_of(world.state)),
        "closes": [float(f"{close:.6g}") for close in (*closes[RECENT - _SHOWN_MINUTES : RECENT], *follows)],
        "followed": minutes,
        "decided": _decision_words(sitting, world),
        "scoreBp": BASIS_POINTS * sitting.score,
        "oracleBp": BASIS_POINTS * sitting.oracle,
        "best": "close the position" if world.edge is Edge.DRAIN and world.side not in (0, world.standing) else best,
        "said": (sitting.answer.said or "")[:_SAID_MAX],
    }


def _decision_words(sitting: Sitting, world: World) -> str:
    words = []
    for decided in sitting.answer.decided:
        said = list(filter(None, (_words(call.decision) for step in decided.steps for call in step.calls)))
        minutes = (epoch_second(decided.started_at) - world.state) // 60
        words += [f"after {minutes} minutes: {', '.join(said)}" if minutes else ", ".join(said)] if said else []
    refused = [f"refused: {why}" for why in sitting.answer.reasons.values()]
    return "; ".join([*words, *refused])


def _words(decision: Decision) -> str:
    match decision:
        case CreatePosition() | PlaceOrder():
            return f"{decision.side.lower()} {decision.quantity:g} {decision.symbol}"
        case ClosePosition():
            return f"close {decision.symbol}"
    return "" if isinstance(decision, Holding | UpdateExitPlan) else type(decision).__name__
