"""Check of an exam: every state is drawn again, every decision executed again, and every score compared."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from trader.agents.domain.models import Model
from trader.agents.domain.strategy import Strategy
from trader.agents.providers.strategy_process import ConfinedStrategy
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import DecisionSource, Idle
from trader.backtest.sources import RecordingStrategySource, ReplayedDecisions, answered_by
from trader.core.errors import SettingsError, StartError
from trader.core.files import decode_json, read_regular
from trader.exam.domain.scores import UNDECIDED
from trader.exam.folder import ContradictoryExam, ExamPlan, judged, read_plan, read_states, unregistered
from trader.exam.opening import NOTHING, ExamRoom, draw_states, recorded_room, sit, world_room
from trader.exam.page import page
from trader.exam.report import CARD_FILE, REPORT_FILE, exam_card
from trader.exam.sitting import Examinee, Sitting
from trader.record.domain.chain import Anchor
from trader.seasons.bundle import digest_code
from trader.seasons.check import differences, text_differences

_EQUAL: Final = 1e-9
"""Scores that differ by less, as fractions of equity, are equal."""

_OTHER_STATES: Final = (
    "the states are not those that the secret draws for this plan: its states, entrants, their names or their "
    "configuration were others"
)


async def check(
    folder: Path,
    data: Path | None = None,
    funding: str | None = None,
    strategies: Path | None = None,
    anchors: Iterable[Anchor] | None = None,
) -> tuple[list[str], list[str]]:
    """Return what is wrong with an exam, and the entrants who were asked again; nothing is wrong if every score follows
    from the secret, the recording and the decisions, and none is missing. With `anchors` the register must be theirs.

    Rule agents decide again if the same program began the exam, and so do the strategies whose files are in the folder
    `strategies`.

    :raises SettingsError: the recording is missing or another one, or `strategies` has other files
    :raises StartError: the folder has no exam
    """
    try:
        plan, secret = read_plan(folder)
        states = read_states(folder, plan)
    except ContradictoryExam as error:
        return ([str(error)], [])
    deciders = _deciders(plan, strategies)
    intervals = {interval for each in deciders.values() for interval in each.intervals}
    room: ExamRoom
    if plan.recording is not None:
        room = await recorded_room(plan, data, funding, intervals)
    elif data is not None or funding is not None:
        raise SettingsError([f"--data and --funding: not for {folder}, an exam in worlds generated from its secret"])
    else:
        room = world_room(plan.settings, intervals, is_managed=plan.managed)
    seed = plan.seed(secret)
    drawn = draw_states(room, seed, plan)
    sittings = [sitting for state in states for sitting in state]
    if plan.states != drawn:  # then no score can follow
        return ([_OTHER_STATES, *file_differences(folder, plan, secret, sittings)], [])
    wrong = [*unregistered(folder, plan, secret, anchors), *_missing(plan, sittings)]
    for state in states:
        again = [
            Examinee(model, partial(_again, given, deciders)) for model, given in zip(plan.models, state, strict=True)
        ]
        for given, new in zip(state, await sit(room, seed, drawn[state[0].state], again), strict=True):
            difference = _difference(given, new)
            wrong += [] if difference is None else [difference]
    return ([*wrong, *file_differences(folder, plan, secret, sittings)], list(deciders))


def _deciders(plan: ExamPlan, folder: Path | None) -> dict[str, Strategy]:
    """Return the code that can decide again, by entrant. Raise `SettingsError`."""
    deciders: dict[str, Strategy] = {}
    for model in plan.models:
        if model.provider == "rules" and model.id != NOTHING.id and plan.code == digest_code():
            deciders[model.id] = VARIANTS[model.variant].agent()
        elif model.provider == "strategy" and folder is not None:
            file = folder / Path(model.router_model_name).name
            strategy = ConfinedStrategy(str(file), model.configuration.params)
            strategy.limits = VARIANTS[model.variant].limits
            if (code := plan.strategies.get(model.id, "")) != answered_by(model, strategy):
                raise SettingsError(
                    [f"--strategies: {strategy.file} has the SHA-256 {strategy.digest}, and {model.id} was {code}"]
                )
            deciders[model.id] = strategy
    return deciders


def _missing(plan: ExamPlan, sittings: Sequence[Sitting]) -> Iterator[str]:
    """Yield what the plan asks for and the decisions lack. Only the verdict on its pair ends an exam early."""
    by_sample: dict[int, list[int]] = {}
    for each in sittings:
        if each.entrant == plan.entrants[0]:
            by_sample.setdefault(each.sample, []).append(each.state)
    for sample, decided in sorted(by_sample.items()):
        if sorted(decided) != list(range(len(decided))):
            yield f"the decided states of sample {sample} are not the first ones of the plan"
    done, planned = sum(map(len, by_sample.values())), len(plan.states) * plan.samples
    if done != planned and ((verdict := judged(plan, sittings)) is None or verdict.verdict == UNDECIDED):
        yield f"{done} of {planned} planned states have decisions, and no verdict on a registered pair ended the exam"


def _again(given: Sitting, deciders: Mapping[str, Strategy], model: Model, ends_at: datetime) -> DecisionSource:
    """Return the source that decides in a state again, or repeats what was decided there."""
    decided = given.answer.decided
    if model.id in deciders:
        return RecordingStrategySource(model, deepcopy(deciders[model.id]))
    return Idle() if not decided or model.id == NOTHING.id else ReplayedDecisions(model, decided)


def file_differences(folder: Path, plan: ExamPlan, secret: str, sittings: Sequence[Sitting]) -> Iterator[str]:
    """Yield where card and report, if there are any, do not follow from the plan and the decisions.

    A report is compared if this program began the exam.

    :raises StartError: a file cannot be read
    :raises SettingsError: the report is not text
    """
    card, report = folder / CARD_FILE, folder / REPORT_FILE
    expected = exam_card(plan, sittings)
    try:
        if card.exists():
            given = decode_json(read_regular(card), object)
            for each in differences(given, msgspec.json.decode(msgspec.json.encode(expected))):
                yield f"{CARD_FILE}: {each.field} is {each.written!r}, and by the decisions {each.computed!r}"
        if report.exists() and plan.code == digest_code():
            for each in text_differences(report, page(expected.result, plan, secret, sittings).encode()):
                yield f"{REPORT_FILE}: it says {each.written!r}, and by the decisions {each.computed!r}"
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"{folder}: a file cannot be read: {error}") from None


def _difference(given: Sitting, again: Sitting) -> str | None:
    """Return how a decision differs from the same one executed again; None if it does not."""
    place = f"state {given.state}, {given.entrant}"
    for name in ("edge", "kind"):
        if getattr(given, name) != getattr(again, name):
            return f"{place}: {name} is {getattr(given, name)}, not {getattr(again, name)}"
    if msgspec.json.encode(given.answer.decided) != msgspec.json.encode(again.answer.decided):
        return f"{place}: the decision is {_calls(given)}, and when asked again it is {_calls(again)}"
    if (given.answer.refused, given.answer.reasons) != (again.answer.refused, again.answer.reasons):
        return f"{place}: refused are {list(given.answer.refused)}, not {list(again.answer.refused)}"
    for name in ("value", "risk", "score", "oracle"):
        if abs(getattr(given, name) - getattr(again, name)) > _EQUAL:
            figures = f"{getattr(given, name):.9f}, and its decisions are worth {getattr(again, name):.9f}"
            return f"{place}: {name} is {figures}"
    return None


def _calls(sitting: Sitting) -> str:
    calls = [call for decided in sitting.answer.decided for step in decided.steps for call in step.calls]
    return f"{msgspec.json.encode(calls).decode():.300}"
