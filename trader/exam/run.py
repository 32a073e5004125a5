"""Run of an exam: its states, the entrants who sit in them, and the file of their decisions, with which it resumes."""

import argparse
import asyncio
import hashlib
import multiprocessing
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model, contamination
from trader.agents.models_file import ANSWER_TOKENS, PROMPT_TOKENS
from trader.backtest.accounts import DecisionSource, Idle
from trader.backtest.answers import AskingEnded
from trader.backtest.cluster import client_of
from trader.backtest.models import CASSETTE, Chosen, choose_models, renewed
from trader.backtest.options import environ_of, open_source, settings_given, settings_of
from trader.backtest.sources import AiSource, RecordingStrategySource
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError, StartError
from trader.core.money import ZERO
from trader.core.variant_id import VariantId
from trader.exam.domain.law import HORIZON
from trader.exam.domain.plan import NULL_SHARE
from trader.exam.domain.scores import MOMENTS, WORLDS, PairComparison, Scale, compare, differences
from trader.exam.domain.worlds import Edge, Kind, draw_world
from trader.exam.pairs import Horizon, RecordedMoment, RecordedRoom
from trader.exam.sitting import EVERY, Examinee, Sitting, WorldRoom
from trader.market.domain.markets import INTERVALS, Interval
from trader.market.sources.rows import chosen_rows, preset_rows
from trader.settings.settings import Settings

PLAN: Final = "exam.json"
SECRET: Final = "secret"  # noqa: S105  # the name of a file
SITTINGS: Final = "sittings.jsonl"
"""The files of an exam, in its folder: what it asks, the secret of its worlds, and the decisions with their scores."""

SYMBOLS: Final = ("BTC", "ETH", "SOL")
_STILL: Final = {"REPLAY_THINKING": "off"}
_NOTHING: Final = Model(
    id="nothing", name="Hold nothing", variant=VariantId.APEX, provider="rules", router_model_name="rules/nothing",
    created_at=moment_of(0),
)  # fmt: skip
"""The entrant that leaves its account alone."""

_CHUNK: Final = 25
"""States that a process decides at once."""

_SPAN_FROM: Final = 1_767_225_600
"""1 January 2026: an estimate of the cost counts decisions from there on."""


class ExamState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a state of an exam holds: the edge of a world, or a moment of a recording."""

    number: int
    edge: Edge | None = None
    kind: Kind | None = None
    moment: RecordedMoment | None = None


class ExamPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an exam asks. `secret_digest` binds the worlds before anybody is asked."""

    secret_digest: str
    states: list[ExamState]
    edges: list[Edge]
    kind: Kind
    horizon: Horizon
    models: list[Model]
    settings: dict[str, str]
    compared: tuple[str, str] | None = None
    samples: int = 1

    @property
    def entrants(self) -> list[str]:
        """The ids of the entrants."""
        return [model.id for model in self.models]

    @property
    def is_recorded(self) -> bool:
        """Whether its states are moments of a recording."""
        return any(state.moment is not None for state in self.states)

    @property
    def scale(self) -> Scale:
        """The scale of differences between entrants."""
        return MOMENTS if self.is_recorded else WORLDS


def schedule(secret: str, count: int, edges: Sequence[Edge], kind: Kind = "planted") -> list[ExamState]:
    """Return the states of an exam, each drawn independently, so that a sequential test is exact.

    `NULL_SHARE` of them are null worlds, half of these with a picture. `kind` "reversed" plans the opposite of every
    edge.
    """
    rng = Random(f"{secret}:order")
    return [ExamState(number, *_drawn(rng, edges, kind)) for number in range(count)]


def _drawn(rng: Random, edges: Sequence[Edge], kind: Kind) -> tuple[Edge | None, Kind]:
    is_null, edge = rng.random() < NULL_SHARE, rng.choice(edges)
    return (edge if rng.random() < 0.5 else None, "null") if is_null else (edge, kind)


class Examined(NamedTuple):
    """What sits in an exam: the room, the entrants, and the models behind them."""

    room: WorldRoom | RecordedRoom
    entrants: list[Examinee]
    chosen: Chosen

    @property
    def is_code(self) -> bool:
        """Whether only code decides, so that other processes can decide as well."""
        return not any(isinstance(source, AiSource) for _, source in self.chosen.models)

    async def sit(self, secret: str, state: ExamState) -> list[Sitting]:
        """Let the entrants decide in a state. Raise like `decide_once`."""
        return await sit(self.room, secret, state, self.entrants)


async def sit(
    room: WorldRoom | RecordedRoom, secret: str, state: ExamState, entrants: Sequence[Examinee]
) -> list[Sitting]:
    """Let entrants decide in a state. Raise like `decide_once`."""
    if isinstance(room, RecordedRoom):
        assert state.moment is not None, "an exam on a recording has moments"
        return await room.sit(state.number, state.moment, entrants)
    world = draw_world(secret, state.number, state.edge, state.kind or "null", room.costs)
    return await room.sit(world, entrants)


def world_room(environ: Mapping[str, str], intervals: Sequence[Interval]) -> WorldRoom:
    """Return the room of worlds with these settings."""
    settings = settings_of(environ)
    rows = preset_rows(settings.venue_preset, settings.markets_file)
    return WorldRoom(settings, chosen_rows(SYMBOLS, rows), intervals)


def exam_environ(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings of an exam as environment variables. Market time stands still while an entrant decides."""
    if options.data is not None:
        return environ_of(options) | _STILL
    return {"SIM_SEED": "0", "MARKETS": ",".join(SYMBOLS)} | settings_given(options) | _STILL


@asynccontextmanager
async def examining(options: argparse.Namespace) -> AsyncIterator[Examined]:
    """Open what an exam needs.

    :raises SettingsError: with every mistake; without a budget, with an estimate of the cost
    """
    environ = exam_environ(options)
    async with AsyncExitStack() as stack:
        source, prices, begin = None, {}, _SPAN_FROM
        settings = settings_of(environ)
        if options.data is not None:
            _, source = await open_source(options, environ)
            prices = {symbol: recording.minutes.close[0] for symbol, recording in source.recordings.items()}
            begin = source.span.start
        span, count = range(begin, begin + options.states * HORIZON * 60), options.states * options.samples
        chosen = await choose_models(options, environ, settings, span, stack, prices, count)
        entrants = [
            Examinee(_once(model), partial(_renewed, source=each, settings=settings)) for model, each in chosen.models
        ]
        entrants.append(Examinee(_once(_NOTHING), _idle))
        room: WorldRoom | RecordedRoom
        if source is None:
            room = world_room(environ, _intervals(chosen))
        else:
            room = RecordedRoom(settings, source, _intervals(chosen), options.horizon)
        yield Examined(room, entrants, chosen)


def _idle(model: Model, ends_at: datetime) -> DecisionSource:
    return Idle()


def _once(model: Model) -> Model:
    """Return a model that is asked once in each state."""
    return replace(model, configuration=replace(model.configuration, every=EVERY))


def _renewed(model: Model, ends_at: datetime, *, source: DecisionSource, settings: Settings) -> DecisionSource:
    return renewed(model, source, settings, ends_at)


def _intervals(chosen: Chosen) -> list[Interval]:
    """Return the candle intervals that the entrants may read: all of them if there are AI models."""
    if any(isinstance(source, AiSource) for _, source in chosen.models):
        return list(INTERVALS)
    strategies = (source.strategy for _, source in chosen.models if isinstance(source, RecordingStrategySource))
    return sorted({interval for strategy in strategies for interval in strategy.intervals})


# --- the file of decisions --------------------------------------------------------------------------------------------


def begin(folder: Path, plan: ExamPlan, secret: str) -> None:
    """Write the plan and the secret of a new exam. Raises `OSError`."""
    folder.mkdir(parents=True)
    (folder / SECRET).touch(mode=0o600)
    (folder / SECRET).write_text(secret, encoding="ascii")
    (folder / PLAN).write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def read_plan(folder: Path) -> tuple[ExamPlan, str]:
    """Return the plan of an exam and its secret.

    :raises StartError: the folder has no exam, or its secret is another one
    """
    try:
        plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=ExamPlan)
        secret = (folder / SECRET).read_text(encoding="ascii")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartError(f"{folder} has no exam: {error}") from error
    if digest_of(secret) != plan.secret_digest:
        raise StartError(f"{folder / SECRET} is not the secret of this exam, whose SHA-256 is {plan.secret_digest}")
    return plan, secret


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_sittings(folder: Path, plan: ExamPlan) -> list[Sitting]:
    """Return the decisions so far, of the states in which every entrant has decided.

    The last line is left out if the exam was killed while it wrote it.

    :raises StartError: another line is not a decision
    """
    file = folder / SITTINGS
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    try:
        sittings = [msgspec.json.decode(line, type=Sitting) for line in lines[:-1]]
    except msgspec.MsgspecError as error:
        raise StartError(f"{file}: {error}") from error
    counts = Counter((each.state, each.sample) for each in sittings)
    return [each for each in sittings if counts[each.state, each.sample] == len(plan.entrants)]


class _Sheet:
    """The file of decisions, open for appending."""

    def __init__(self, folder: Path, plan: ExamPlan) -> None:
        self.sittings: list[Sitting] = []
        kept, file = read_sittings(folder, plan), folder / SITTINGS
        new = file.with_suffix(".new")
        self._file = new.open("wb", buffering=0)
        self.add(kept)
        new.replace(file)

    def add(self, sittings: Sequence[Sitting]) -> None:
        """Write decisions at once. Raises `OSError`."""
        self._file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in sittings))
        self.sittings += sittings

    def close(self) -> None:
        self._file.close()


# --- sitting ----------------------------------------------------------------------------------------------------------


class Listener(Protocol):
    """Receives what people see of a run."""

    def say(self, line: str) -> None:
        """Receive a line, such as where external agents call."""
        ...

    def show(self, done: int, count: int, spent_usd: Decimal) -> None:
        """Receive the number of finished states, the total, and what answers have cost so far."""
        ...


class ExamEnd(NamedTuple):
    """The end of a run: its plan and decisions, what was spent, and why it ended early (None: it did not)."""

    plan: ExamPlan
    sittings: list[Sitting]
    spent_usd: Decimal
    cause: Literal["verdict", "budget", "provider", "missing"] | None = None
    reason: str = ""


async def run(options: argparse.Namespace, folder: Path, listener: Listener) -> ExamEnd:
    """Let the entrants decide in the states that have no decision yet, until the plan ends or has its verdict.

    Without a plan in the folder, one is made.

    :raises StrategyError: a strategy failed
    :raises SettingsError: other entrants or settings than those of the plan
    """
    spent, sample, ended = ZERO, 0, None
    while ended is None or (ended.cause is None and sample < ended.plan.samples):
        own = _options_of(options, folder, sample, spent)
        async with examining(own) as examined:
            for line in examined.chosen.agent_lines:
                listener.say(line)
            if not (folder / PLAN).exists():
                begin(folder, *new_plan(own, examined))
            ended = await _sample(own, examined, listener)
        spent += ended.spent_usd
        sample += 1
    return ended


def _options_of(options: argparse.Namespace, folder: Path, sample: int, spent: Decimal) -> argparse.Namespace:
    """Return the options of one sample: its answers are kept apart, and it may spend what the ones before have left."""
    own = argparse.Namespace(**vars(options))
    own.out, own.sample = folder, sample
    if sample:
        place = options.cassette or folder / CASSETTE
        own.cassette = place.with_name(f"{place.name}-{sample}")
        own.budget_usd = options.budget_usd and str(Decimal(options.budget_usd) - spent)
    return own


async def _sample(options: argparse.Namespace, examined: Examined, listener: Listener) -> ExamEnd:
    """Let the entrants decide once in every state that has no decision of this sample yet."""
    plan, secret = read_plan(options.out)
    if [each.model.id for each in examined.entrants] != plan.entrants or exam_environ(options) != plan.settings:
        raise SettingsError([f"{options.out} is an exam of {', '.join(plan.entrants)} with {plan.settings}"])
    spending, sheet = examined.chosen.spending, _Sheet(options.out, plan)
    with closing(sheet):
        async with AsyncExitStack() as stack:
            examined.chosen.open_cassette(stack)
            sat = {sitting.state for sitting in sheet.sittings if sitting.sample == options.sample}
            left = [state for state in plan.states if state.number not in sat]
            chunks = _way_of(options, examined)
            try:
                async for sittings in chunks(options, examined, secret, left):
                    sheet.add([replace(each, sample=options.sample) for each in sittings])
                    done = len({(each.state, each.sample) for each in sheet.sittings})
                    listener.show(done, len(plan.states) * plan.samples, spending.spent_usd)
                    verdict = judged(plan, sheet.sittings)
                    if verdict is not None and verdict.verdict != "not distinguishable yet":
                        first, second = plan.compared or ("", "")
                        reason = f"{first} is {verdict.verdict} than {second}."
                        return ExamEnd(plan, sheet.sittings, spending.spent_usd, "verdict", reason)
            except AskingEnded as ended:
                return ExamEnd(plan, sheet.sittings, spending.spent_usd, ended.cause, str(ended))
    return ExamEnd(plan, sheet.sittings, spending.spent_usd)


def judged(plan: ExamPlan, sittings: Sequence[Sitting]) -> PairComparison | None:
    """Return the comparison that the plan asks for; None if it asks for none."""
    if plan.compared is None:
        return None
    first, second = ([each for each in sittings if each.entrant == name] for name in plan.compared)
    return compare(differences(first, second, plan.scale), plan.scale)


async def _in_this_process(
    options: argparse.Namespace, examined: Examined, secret: str, states: Sequence[ExamState]
) -> AsyncIterator[list[Sitting]]:
    """Yield the decisions of `concurrency` states at a time, in order.

    :raises AskingEnded: after the decisions of the states before
    """
    count = 1 if options.agent else options.concurrency  # an agent decides in one state at a time
    for first in range(0, len(states), count):
        part = states[first : first + count]
        results = await asyncio.gather(*(examined.sit(secret, each) for each in part), return_exceptions=True)
        failures = [each for each in results if isinstance(each, BaseException)]
        yield [sitting for each in results if not isinstance(each, BaseException) for sitting in each]
        for failure in failures:
            raise failure


async def _by_processes(
    options: argparse.Namespace, examined: Examined, secret: str, states: Sequence[ExamState]
) -> AsyncIterator[list[Sitting]]:
    """Yield the decisions of chunks of states, in order, made in `workers` processes."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        futures = [
            loop.run_in_executor(pool, sit_alone, options, secret, states[first : first + _CHUNK])
            for first in range(0, len(states), _CHUNK)
        ]
        try:
            for future in futures:
                yield msgspec.json.decode(await future, type=list[Sitting])
        finally:
            for future in futures:
                future.cancel()


async def _by_cluster(
    options: argparse.Namespace, examined: Examined, secret: str, states: Sequence[ExamState]
) -> AsyncIterator[list[Sitting]]:
    """Yield the decisions of chunks of states, in order, made by the workers of a Dask cluster."""
    async with client_of(options.cluster) as client:
        futures = [
            client.submit(sit_alone, options, secret, states[first : first + _CHUNK], pure=False)
            for first in range(0, len(states), _CHUNK)
        ]
        for future in futures:
            yield msgspec.json.decode(await future, type=list[Sitting])


def _way_of(options: argparse.Namespace, examined: Examined) -> "SitThrough":
    """Return where states are decided: on a cluster, in processes, or here.

    :raises SettingsError: a cluster cannot decide for others than code
    """
    if options.cluster and not examined.is_code:
        raise SettingsError(["--cluster: only for rule agents and strategies; models are asked from here"])
    if options.cluster:
        return _by_cluster
    return _by_processes if examined.is_code and options.workers > 1 else _in_this_process


SitThrough = Callable[[argparse.Namespace, Examined, str, Sequence[ExamState]], AsyncIterator[list[Sitting]]]
"""Yields the decisions of states, in order."""


def sit_alone(options: argparse.Namespace, secret: str, states: Sequence[ExamState]) -> bytes:
    """Decide in states in a process of its own, and return the decisions as JSON."""
    return asyncio.run(_sit_alone(options, secret, states))


async def _sit_alone(options: argparse.Namespace, secret: str, states: Sequence[ExamState]) -> bytes:
    async with examining(options) as examined:
        chunks = [each async for each in _in_this_process(options, examined, secret, states)]
    return msgspec.json.encode([sitting for chunk in chunks for sitting in chunk])


def new_plan(options: argparse.Namespace, examined: Examined) -> tuple[ExamPlan, str]:
    """Return the plan of a new exam, and its secret.

    :raises SettingsError: an entrant to compare does not take part, the budget does not pay one state, or a model may
        know the moments
    """
    if problems := list(_unpayable(examined.chosen)):
        raise SettingsError(problems)
    if any(model.id == _NOTHING.id for model, _ in examined.chosen.models):
        raise SettingsError([f"{_NOTHING.id} is the entrant that leaves its account alone; give yours another id"])
    secret = options.secret or secrets.token_hex(16)
    entrants = [each.model.id for each in examined.entrants]
    compared = options.compare or None
    if unknown := [name for name in compared or () if name not in entrants]:
        raise SettingsError(
            [f"--compare: {', '.join(unknown)} does not take part; those who do are {', '.join(entrants)}"]
        )
    kind: Kind = "reversed" if options.reversed else "planted"
    if isinstance(examined.room, RecordedRoom):
        moments = examined.room.draw(secret, options.states)
        states = [ExamState(number, moment=moment) for number, moment in enumerate(moments)]
        if problems := list(_contaminated(examined.chosen, min(each.at for each in moments))):
            raise SettingsError(problems)
    else:
        states = schedule(secret, options.states, options.edges, kind)
    plan = ExamPlan(
        secret_digest=digest_of(secret),
        states=states,
        edges=list(options.edges),
        kind=kind,
        horizon=options.horizon,
        models=[each.model for each in examined.entrants],
        settings=exam_environ(options),
        compared=compared,
        samples=options.samples,
    )
    return plan, secret


def _contaminated(chosen: Chosen, first: int) -> Iterator[str]:
    """Yield what forbids the models that may know the moments, of which the first is at this second."""
    for model, source in chosen.models:
        said = contamination(model.configuration.training_cutoff, moment_of(first))
        if model.is_ai and isinstance(source, AiSource) and source.mask is None and said != "after cut-off":
            yield (
                f"{model.id}: the moments begin at {iso(moment_of(first))}, and its training_cutoff is "
                f"{model.configuration.training_cutoff or 'not stated'}; --mask symbols,dates,scale hides them, or "
                "give a recording from after the cut-off"
            )


def _unpayable(chosen: Chosen) -> Iterator[str]:
    """Yield why the budget cannot pay one decision of each model that has a price."""
    budget, prices = (
        chosen.spending.budget_usd,
        [model.configuration.price for model, _ in chosen.models if model.is_ai],
    )
    known = [price.cost(PROMPT_TOKENS, 0, ANSWER_TOKENS) for price in prices if price is not None]
    if budget is not None and known and sum(known) > budget:
        yield f"--budget-usd is {budget}, and one decision of each model takes about {sum(known):.4f} USD"
