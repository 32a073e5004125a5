"""Check of an exam: every state is drawn again, every decision executed again, and every score compared."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from trader.agents.domain.models import Model
from trader.backtest.accounts import DecisionSource, Idle
from trader.backtest.sources import RecordedInvocation, ReplayedDecisions
from trader.core.errors import SettingsError, StartError
from trader.core.files import decode_json, read_regular
from trader.exam.folder import ContradictoryExam, ExamPlan, read_plan, read_states
from trader.exam.opening import ExamRoom, draw_states, recorded_room, sit, world_room
from trader.exam.report import CARD_FILE, ExamCard, exam_card
from trader.exam.sitting import Examinee, Sitting

_EQUAL: Final = 1e-9
"""Scores that differ by less, as fractions of equity, are equal."""

_OTHER_STATES: Final = "the states are not those that the secret plans"


async def check(folder: Path, data: Path | None = None, funding: str | None = None) -> list[str]:
    """Return what is wrong with an exam; nothing if every score follows from the secret, the recording and the
    decisions.

    :raises SettingsError: the recording is missing, or is another one
    :raises StartError: the folder has no exam
    """
    try:
        plan, secret = read_plan(folder)
        states = read_states(folder, plan)
    except ContradictoryExam as error:
        return [str(error)]
    room: ExamRoom
    if plan.recording is not None:
        room = await recorded_room(plan, data, funding)
    elif data is not None or funding is not None:
        raise SettingsError([f"--data and --funding: not for {folder}, an exam in worlds generated from its secret"])
    else:
        room = world_room(plan.settings, ())
    drawn = draw_states(room, secret, len(plan.states), plan.edges, plan.kind)
    wrong, models = [] if plan.states == drawn else [_OTHER_STATES], {model.id: model for model in plan.models}
    by_sample: dict[int, list[int]] = {}
    for state in states:
        by_sample.setdefault(state[0].sample, []).append(state[0].state)
    for sample, decided in sorted(by_sample.items()):
        if sorted(decided) != list(range(len(decided))):
            wrong.append(f"the decided states of sample {sample} are not the first ones of the plan")
    for state in states:
        again = [Examinee(models[each.entrant], partial(_replayed, decided=each.answer.decided)) for each in state]
        wrong += filter(None, map(_difference, state, await sit(room, secret, drawn[state[0].state], again)))
    return wrong + card_differences(folder, plan, [sitting for state in states for sitting in state])


def card_differences(folder: Path, plan: ExamPlan, sittings: Sequence[Sitting]) -> list[str]:
    """Return the parts of the card, if there is one, that do not follow from the plan and the decisions.

    :raises StartError: it cannot be read
    """
    file = folder / CARD_FILE
    if not file.exists():
        return []
    try:
        given = decode_json(read_regular(file), ExamCard)
    except msgspec.ValidationError as error:
        return [f"{CARD_FILE} is not the card of an exam: {error}"]
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"{file} cannot be read: {error}") from None
    expected = exam_card(plan, sittings)
    return [
        f"{CARD_FILE}: {name} does not follow from the decisions"
        for name in ExamCard.__struct_fields__
        if getattr(given, name) != getattr(expected, name)
    ]


def _replayed(model: Model, ends_at: datetime, *, decided: RecordedInvocation | None) -> DecisionSource:
    return Idle() if decided is None else ReplayedDecisions(model, [decided])


def _difference(given: Sitting, again: Sitting) -> str | None:
    """Return how a decision differs from the same one executed again; None if it does not."""
    place = f"state {given.state}, {given.entrant}"
    for name in ("edge", "kind"):
        if getattr(given, name) != getattr(again, name):
            return f"{place}: {name} is {getattr(given, name)}, not {getattr(again, name)}"
    if given.answer.refused != again.answer.refused:
        return f"{place}: refused are {list(given.answer.refused)}, not {list(again.answer.refused)}"
    for name in ("value", "risk", "score", "oracle", "selection"):
        if abs(getattr(given, name) - getattr(again, name)) > _EQUAL:
            figures = f"{getattr(given, name):.9f}, and its decisions are worth {getattr(again, name):.9f}"
            return f"{place}: {name} is {figures}"
    return None
