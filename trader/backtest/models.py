"""Choice of the models of a backtest: rule agents, strategies, models that are asked, and recorded ones."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.mask import Mask
from trader.agents.domain.models import CODE_PROVIDERS, Model, ModelConfiguration, ModelId
from trader.agents.providers.cassette import ANSWERS, MODELS, Cassette
from trader.agents.sql.invocations import select_invocations_within, select_steps, select_tool_calls
from trader.agents.sql.models import select_models
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import DecisionSource
from trader.backtest.answers import KeptAnswers, Spending
from trader.backtest.chosen import ID_FORM, Chosen, is_masked, loaded, twin_of
from trader.backtest.run import rule_models
from trader.backtest.sources import (
    AiSource,
    RecordedInvocation,
    RecordingStrategySource,
    ReplayedDecisions,
    read_recorded_run,
    recorded_invocation,
)
from trader.backtest.spec import DECISIONS, RESULT, Participants
from trader.core.clock import iso, moment_of
from trader.core.errors import SettingsError
from trader.core.variant_id import VariantId
from trader.database.schema import open_database
from trader.settings.settings import Settings

_BATCH: Final = 1_000
"""Number of invocations whose calls are read at once."""


async def choose_models(
    entrants: Participants,
    environ: Mapping[str, str],
    settings: Settings,
    span: range,
    stack: AsyncExitStack,
    first_prices: Mapping[str, float] | None = None,
    decisions: int | None = None,
    guard: Mapping[str, int] | None = None,
) -> Chosen:
    """Return the models of the entrants. Their resources are closed with the stack.

    `environ` has the settings of the conditions, `span` the seconds in which they decide, `first_prices` the prices
    from which a mask is made, and `guard` the limits that differ from the variants' own.

    :raises SettingsError: with every mistake; without a budget, with an estimate of the cost
    """
    starts_at, ends_at = moment_of(span.start), moment_of(span.stop - 1)
    every, guard = entrants.every, guard or {}
    own: list[tuple[Model, DecisionSource]] = []
    if entrants.variants or not (
        entrants.models or entrants.models_from or entrants.strategy is not None or entrants.agents
    ):
        own = rule_models(entrants.variants or tuple(VariantId), every, starts_at, guard)
    if entrants.strategy is not None:
        own.append(_of_strategy(entrants, starts_at, guard))
    _check_exclusive(entrants)
    mask = Mask.hiding(entrants.mask, first_prices or {}, starts_at) if entrants.mask else None
    if entrants.agents or entrants.models:
        from trader.backtest import asked  # noqa: PLC0415 - so that a run that asks nobody starts without clients

    if entrants.agents:
        chosen = await asked.choose_agents(entrants, settings, (starts_at, ends_at), mask, stack)
    elif entrants.models:
        chosen = asked.choose_of_file(entrants, environ, settings, (starts_at, ends_at), stack, decisions)
    elif entrants.models_from and (Path(entrants.models_from) / ANSWERS).exists():
        cassette = Cassette(Path(entrants.models_from))
        chosen = Chosen(_from_cassette(cassette, settings, ends_at), cassette, Spending(None), is_asking=False)
    elif entrants.models_from:
        chosen = Chosen(await _replayed(entrants.models_from, starts_at, ends_at), None, Spending(None), False)
    else:
        chosen = Chosen([], None, Spending(None), is_asking=False)
    models = own + chosen.models
    if mask is not None:  # agents have their masked copies already
        plain = own if entrants.agents else models
        twins = [(twin_of(model), each) for model, each in plain]
        models += [(twin, renewed(twin, ends_at, each, settings, mask)) for twin, each in twins]
    _check_unique([model.id for model, _ in models])
    return chosen._replace(models=models)


def _check_unique(ids: Sequence[str]) -> None:
    if repeated := sorted({model_id for model_id in ids if ids.count(model_id) > 1}):
        raise SettingsError(
            [f"{', '.join(repeated)} is the id of two participants; give one of them another id or name"]
        )


def _check_exclusive(entrants: Participants) -> None:
    if entrants.models and entrants.models_from:
        raise SettingsError(["--models asks models and --models-from never does; give one of them"])
    if entrants.agents and (entrants.models or entrants.models_from):
        raise SettingsError(["--agent: not with --models or --models-from"])


def renewed(
    model: Model, ends_at: datetime, source: DecisionSource, settings: Settings, mask: Mask | None = None
) -> DecisionSource:
    """Return a source that decides as another one does, and remembers nothing; without a mask, behind the same one.

    :raises SettingsError: a strategy cannot be copied, or decisions are recorded
    """
    match source:
        case RecordingStrategySource():
            try:
                return RecordingStrategySource(model, deepcopy(source.strategy), mask or source.mask)
            except TypeError as error:
                raise SettingsError([f"{model.id} cannot be copied before it trades: {error}"]) from None
        case AiSource():
            return source.renewed(model, settings, ends_at, mask or source.mask)
    raise SettingsError(
        [f"{model.id} has only recorded decisions: it cannot decide in other states or behind a --mask"]
    )


def _of_strategy(entrants: Participants, at: datetime, guard: Mapping[str, int]) -> tuple[Model, DecisionSource]:
    """Return the model of the entrants' strategy with its decision source."""
    assert entrants.strategy is not None, "there is a strategy"
    strategy = loaded(entrants, entrants.strategy, entrants.params)
    strategy.limits = replace(VARIANTS[strategy.variant].limits, **guard)
    try:
        model_id = msgspec.convert(strategy.name, ModelId)
    except msgspec.ValidationError:
        raise SettingsError([f"{strategy.file}: {strategy.class_name}.name is {strategy.name!r}; {ID_FORM}"]) from None
    model = Model(
        id=model_id,
        name=strategy.class_name,
        variant=strategy.variant,
        provider="strategy",
        router_model_name=f"{strategy.file.name}:{strategy.class_name}",
        created_at=at,
        configuration=ModelConfiguration(every=entrants.every, params=entrants.params),
    )
    return model, RecordingStrategySource(model, strategy)


# --- recorded models --------------------------------------------------------------------------------------------------


def _from_cassette(cassette: Cassette, settings: Settings, ends_at: datetime) -> list[tuple[Model, DecisionSource]]:
    """Return the AI models and agents of a cassette. It names no code: a stranger may have written it."""
    if not cassette.models:
        raise SettingsError([f"--models-from: the cassette {cassette.folder} names no model in {MODELS}"])
    if code := [model.id for model in cassette.models.values() if model.provider in CODE_PROVIDERS]:
        raise SettingsError(
            [
                f"--models-from: {cassette.folder / MODELS} has {', '.join(code)}, which decide by code, and a "
                "cassette never runs any; --strategy FILE:CLASS runs your own, and --variant a rule agent"
            ]
        )
    names = {model.provider for model in cassette.models.values()}
    models = [model for model in cassette.models.values() if not is_masked(model.id, cassette.models)]
    providers = {name: KeptAnswers(name, cassette, Spending(None), None, 1) for name in names}
    return [(model, AiSource(model, providers[model.provider], settings, ends_at)) for model in models]


async def _replayed(text: str, starts_at: datetime, ends_at: datetime) -> list[tuple[Model, DecisionSource]]:
    """Return the models with recorded decisions within the period: of a database's address, or a backtest's folder."""
    if "://" in text:
        recorded = await _from_database(text, starts_at, ends_at)
    elif not (Path(text) / RESULT).exists():
        raise SettingsError(
            [
                f"--models-from is {text!r}; it must be a cassette (a folder with {ANSWERS}), the folder of a backtest "
                f"({RESULT}, {DECISIONS}), or the address of a database; no embedded database is started for it"
            ]
        )
    else:
        run, decisions = read_recorded_run(Path(text), "--models-from")
        recorded = [(model, decisions.get(model.id, [])) for model in run.models]
    # Inactive, so that a service on the database of this backtest runs no code and calls no address of theirs.
    models: list[tuple[Model, DecisionSource]] = [
        (replace(model, active=False), ReplayedDecisions(model, within))
        for model, invocations in recorded
        if (within := [each for each in invocations if starts_at <= each.started_at <= ends_at])
    ]
    if not models:
        raise SettingsError([f"--models-from: no model decided between {iso(starts_at)} and {iso(ends_at)} there"])
    return models


async def _from_database(
    dsn: str, starts_at: datetime, ends_at: datetime
) -> list[tuple[Model, list[RecordedInvocation]]]:
    recorded: list[tuple[Model, list[RecordedInvocation]]] = []
    async with open_database(dsn) as database, database.connection() as conn:
        for model in await select_models(conn):
            invocations = await select_invocations_within(conn, model.id, starts_at, ends_at)
            decided: list[RecordedInvocation] = []
            for first in range(0, len(invocations), _BATCH):
                batch = invocations[first : first + _BATCH]
                ids = [invocation.id for invocation in batch]
                steps, calls = await select_steps(conn, ids), await select_tool_calls(conn, ids)
                decided += [
                    recorded_invocation(invocation, steps.get(invocation.id, []), calls.get(invocation.id, []))
                    for invocation in batch
                ]
            recorded.append((model, decided))
    return recorded
