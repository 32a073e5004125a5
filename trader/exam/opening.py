"""Opening of an exam: the room of its states, its entrants with their decision sources, and a new plan."""

import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model, contamination
from trader.agents.models_file import ANSWER_TOKENS, PROMPT_TOKENS
from trader.backtest.accounts import DecisionSource, Idle
from trader.backtest.chosen import Chosen
from trader.backtest.models import choose_models, renewed
from trader.backtest.sources import AiSource, RecordingStrategySource
from trader.backtest.spec import (
    Conditions,
    Participants,
    conditions_of,
    environ_of,
    open_source,
    settings_given,
    settings_of,
)
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError
from trader.core.variant_id import VariantId
from trader.exam.domain.law import HORIZON
from trader.exam.domain.managed import STEPS
from trader.exam.domain.worlds import Edge, Kind, World, draw_world
from trader.exam.folder import STATES_MAX, ExamPlan, ExamState, digest_of, schedule
from trader.exam.pairs import Horizon, RecordedRoom
from trader.exam.sitting import EVERY, EVERY_STEP, Examinee, Sitting, WorldRoom
from trader.market.domain.markets import Interval
from trader.market.sources.replay import ReplaySource
from trader.market.sources.rows import chosen_rows, preset_rows
from trader.seasons.bundle import digest_code
from trader.settings.settings import Settings

SYMBOLS: Final = ("BTC", "ETH", "SOL")
STATES: Final = 700
"""Default number of states: enough to separate shares of 0.5 and 0.1 with a noise of 1 in four of five exams."""

_PLACE: Final = "MARKET_SOURCE"
"""The setting that is not part of an exam: a recording is identified by its digest, not by its folder."""

_STILL: Final = {"REPLAY_THINKING": "off"}
NOTHING: Final = Model(
    id="nothing", name="Hold nothing", variant=VariantId.APEX, provider="rules", router_model_name="rules/nothing",
    created_at=moment_of(0),
)  # fmt: skip
"""The entrant that leaves its account alone."""

_SPAN_FROM: Final = 1_767_225_600
"""1 January 2026: an estimate of the cost counts decisions from there on."""


ExamRoom = WorldRoom | RecordedRoom
"""The markets and settings in which entrants decide."""


_Count = Annotated[int, msgspec.Meta(ge=1)]


class ExamDesign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The states of an exam, and how they are decided.

    In `managed` worlds entrants decide in several steps. `compare` is the pair whose verdict ends it. Code decides in
    `workers` processes, AI models in `concurrency` states at once.
    """

    states: Annotated[int, msgspec.Meta(ge=1, le=STATES_MAX)] = STATES
    horizon: Horizon = "4h"
    edges: Annotated[tuple[Edge, ...], msgspec.Meta(min_length=1)] = tuple(Edge)
    kind: Kind = "planted"
    managed: bool = False
    samples: _Count = 1
    secret: Annotated[str, msgspec.Meta(pattern="^[ -~]{1,200}$")] | None = None
    compare: tuple[str, str] | None = None
    workers: _Count = 1
    concurrency: _Count = 4


class ExamSpec(ExamDesign, frozen=True, kw_only=True):
    """An exam in the folder `out`: its conditions, and who takes it. `sample` counts the passes through the states."""

    conditions: Conditions
    entrants: Participants
    out: Path
    sample: int = 0

    def check(self) -> None:
        """Check what excludes each other. Raises `SettingsError` with every mistake."""
        conditions, entrants = self.conditions, self.entrants
        asking = {"--budget-usd": entrants.budget_usd, "--batch": entrants.is_batched}
        problems = [f"{name}: only with --models" for name, given in asking.items() if given and not entrants.models]
        if conditions.data is None:
            moments = {
                "--market": bool(conditions.market),
                "--from": conditions.start is not None,
                "--to": conditions.end is not None,
                "--mask": bool(entrants.mask),
            }
            problems += [f"{name}: only with --data" for name, is_given in moments.items() if is_given]
        else:
            is_reversed, why = self.kind == "reversed", "not with --data"
            problems += [f"--reversed: {why}, which has no planted edges"] if is_reversed else []
            problems += [f"--managed: {why}, whose moments have a single decision"] if self.managed else []
        if self.compare is not None and self.compare[0] == self.compare[1]:
            problems.append(f"--compare: {self.compare[0]} twice; it must name two different entrants")
        if problems:
            raise SettingsError(problems)


class Examined(NamedTuple):
    """The parts of an open exam: the room, the entrants, and the models behind them."""

    room: ExamRoom
    entrants: list[Examinee]
    chosen: Chosen

    @property
    def recording(self) -> str | None:
        """The digest of the recording; None in worlds."""
        return self.room.digest if isinstance(self.room, RecordedRoom) else None

    @property
    def strategies(self) -> dict[str, str]:
        """The class of each strategy by its model, with the first digits of the SHA-256 of its file."""
        return {
            model.id: source.answered_by
            for model, source in self.chosen.models
            if isinstance(source, RecordingStrategySource)
        }


async def sit(room: ExamRoom, secret: str, state: ExamState, entrants: Sequence[Examinee]) -> list[Sitting]:
    """Let entrants decide in a state. Raise like `decide`."""
    if isinstance(room, RecordedRoom):
        assert state.moment is not None, "an exam on a recording has moments"
        return await room.sit(state.number, state.moment, entrants)
    return await room.sit(world_of(room, secret, state), entrants)


def world_of(room: WorldRoom, secret: str, state: ExamState) -> World:
    """Return the world of a state."""
    kind = state.kind or "null"
    return draw_world(secret, state.number, state.edge, kind, room.costs, is_managed=room.is_managed)


def world_room(environ: Mapping[str, str], intervals: Collection[Interval], *, is_managed: bool = False) -> WorldRoom:
    """Return the room of worlds, managed ones or others, with these settings."""
    settings = settings_of(environ)
    rows = preset_rows(settings.venue_preset, settings.markets_file)
    return WorldRoom(settings, chosen_rows(SYMBOLS, rows), intervals, is_managed=is_managed)


def exam_environ(conditions: Conditions) -> dict[str, str]:
    """Return the settings of an exam as environment variables. Market time stands still while an entrant decides."""
    if conditions.data is not None:
        return {name: text for name, text in environ_of(conditions).items() if name != _PLACE} | _STILL
    return {"SIM_SEED": "0", "MARKETS": ",".join(SYMBOLS)} | settings_given(conditions) | _STILL


async def recorded_room(
    plan: ExamPlan, data: Path | None, funding: str | None, intervals: Collection[Interval]
) -> RecordedRoom:
    """Return the room of an exam on a recording, whose decisions are to be checked.

    :raises SettingsError: the recording is missing, or is another one
    :raises StartError: it cannot be read
    """
    symbols = plan.settings["MARKETS"]
    if data is None:
        raise SettingsError([f"--data is missing: the candles of {symbols} from which the moments were drawn"])
    _, source = await _open_candles(conditions_of(data, {"funding": funding}), plan.settings)
    room = RecordedRoom(settings_of(plan.settings), source, intervals, plan.horizon)
    if room.digest != plan.recording:
        raise SettingsError(
            [
                f"--data: the candles and funding rates of {symbols} in {data} have the SHA-256 {room.digest}, and the "
                f"exam was on those with {plan.recording}; give the same recording, and the same --funding"
            ]
        )
    return room


async def _open_candles(conditions: Conditions, environ: Mapping[str, str]) -> tuple[Settings, ReplaySource]:
    """Raise `SettingsError` also for a recording of books."""
    settings, source = await open_source(conditions, environ)
    if isinstance(source, ReplaySource):
        return settings, source
    raise SettingsError(
        [f"--data: {conditions.data} is a recording of books; an exam draws its moments from 1-minute candles"]
    )


@asynccontextmanager
async def examining(spec: ExamSpec) -> AsyncIterator[Examined]:
    """Open what an exam needs.

    :raises SettingsError: with every mistake; without a budget, with an estimate of the cost
    """
    environ = exam_environ(spec.conditions)
    async with AsyncExitStack() as stack:
        source, prices, begin = None, {}, _SPAN_FROM
        settings = settings_of(environ)
        if spec.conditions.data is not None:
            _, source = await _open_candles(spec.conditions, environ)
            prices = {symbol: recording.minutes.close[0] for symbol, recording in source.recordings.items()}
            begin = source.span.start
        steps = STEPS if spec.managed else 1
        span, count = range(begin, begin + spec.states * HORIZON * 60), spec.states * spec.samples * steps
        participants = replace(spec.entrants, confined=True)
        chosen = await choose_models(participants, environ, settings, span, stack, prices, count)
        entrants = [
            Examinee(_paced(model, spec), partial(renewed, source=each, settings=settings))
            for model, each in chosen.models
        ]
        entrants.append(Examinee(_paced(NOTHING, spec), _idle))
        room: ExamRoom
        if source is None:
            room = world_room(environ, chosen.intervals, is_managed=spec.managed)
        else:
            room = RecordedRoom(settings, source, chosen.intervals, spec.horizon)
        yield Examined(room, entrants, chosen)


def _idle(model: Model, ends_at: datetime) -> DecisionSource:
    return Idle()


def _paced(model: Model, spec: ExamSpec) -> Model:
    """Return a model that is asked once in each state, or in each step of a managed world."""
    every = EVERY_STEP if spec.managed else EVERY
    return replace(model, configuration=replace(model.configuration, every=every))


def new_plan(spec: ExamSpec, examined: Examined) -> tuple[ExamPlan, str]:
    """Return the plan of a new exam, and its secret.

    :raises SettingsError: an entrant to compare does not take part, the budget does not pay one state, or a model may
        know the moments
    """
    if problems := list(_unpayable(examined.chosen, STEPS if spec.managed else 1)):
        raise SettingsError(problems)
    if any(model.id == NOTHING.id for model, _ in examined.chosen.models):
        raise SettingsError([f"{NOTHING.id} is the entrant that leaves its account alone; give yours another id"])
    secret = spec.secret or secrets.token_hex(16)
    entrants = [each.model.id for each in examined.entrants]
    compared = spec.compare
    if unknown := [name for name in compared or () if name not in entrants]:
        raise SettingsError(
            [f"--compare: {', '.join(unknown)} does not take part; those who do are {', '.join(entrants)}"]
        )
    plan = ExamPlan(
        secret_digest=digest_of(secret),
        states=[ExamState(number) for number in range(spec.states)],
        edges=list(spec.edges),
        kind=spec.kind,
        managed=spec.managed,
        horizon=spec.horizon,
        models=[each.model for each in examined.entrants],
        strategies=examined.strategies,
        settings=exam_environ(spec.conditions),
        compared=compared,
        samples=spec.samples,
        recording=examined.recording,
        code=digest_code(),
    )
    plan = replace(plan, states=draw_states(examined.room, plan.seed(secret), plan))
    moments = [state.moment.at for state in plan.states if state.moment is not None]
    if moments and (problems := list(_contaminated(examined.chosen, min(moments)))):
        raise SettingsError(problems)
    return plan, secret


def draw_states(room: ExamRoom, seed: str, plan: ExamPlan) -> list[ExamState]:
    """Return as many states as a plan has, drawn from its seed: moments of a recording, or worlds.

    :raises SettingsError: the recording has too few moments
    """
    if isinstance(room, RecordedRoom):
        return [ExamState(number, moment=moment) for number, moment in enumerate(room.draw(seed, len(plan.states)))]
    return schedule(seed, len(plan.states), plan.edges, plan.kind)


def _contaminated(chosen: Chosen, first: int) -> Iterator[str]:
    """Yield why each model that may know the moments is refused; the first moment is at this second."""
    for model, source in chosen.models:
        said = contamination(model.configuration.training_cutoff, moment_of(first))
        if model.is_ai and isinstance(source, AiSource) and source.mask is None and said != "after cut-off":
            yield (
                f"{model.id}: the moments begin at {iso(moment_of(first))}, and its training_cutoff is "
                f"{model.configuration.training_cutoff or 'not stated'}; --mask symbols,dates,scale hides them, or "
                "give a recording from after the cutoff"
            )


def _unpayable(chosen: Chosen, steps: int) -> Iterator[str]:
    """Yield why the budget cannot pay the decisions of each model that has a price in one state."""
    budget, prices = (
        chosen.spending.budget_usd,
        [model.configuration.price for model, _ in chosen.models if model.is_ai],
    )
    known = [steps * price.cost(PROMPT_TOKENS, 0, ANSWER_TOKENS) for price in prices if price is not None]
    if budget is not None and known and sum(known) > budget:
        yield f"--budget-usd is {budget}, and the decisions of each model in one state take about {sum(known):.4f} USD"
