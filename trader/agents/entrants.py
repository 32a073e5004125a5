"""Entrants of the models: each model's present one, and a new one whenever the configuration changes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from trader import __version__
from trader.agents.domain.entrants import FIRST, Entrant, fingerprint
from trader.agents.domain.models import Model
from trader.agents.domain.tools import tool_schemas
from trader.agents.providers.provider import base_url_of
from trader.agents.sql.entrants import (
    insert_entrant,
    select_latest_entrant,
    update_entrant_answered,
    upsert_missed_cycles,
)
from trader.agents.variants import VARIANTS, limits_of, temperature_of
from trader.core.canonical_json import canonical_json
from trader.core.money import format_decimal
from trader.database.pool import Database
from trader.settings.settings import Settings


class Entrants:
    """Caches the present entrant of each model. Only one process at a time may begin new entrants.

    `left_out` returns the fields that a model's requests omit because its provider refused them.
    """

    def __init__(
        self, database: Database, settings: Settings, left_out: Callable[[Model], Collection[str]] = lambda _: ()
    ) -> None:
        self._database = database
        self._settings = settings
        self._left_out = left_out
        self._present: dict[str, Entrant] = {}
        self._configurations: dict[str, tuple[Model, Collection[str], str]] = {}

    def forget(self) -> None:
        """Discard the loaded entrants: another process may have begun new ones."""
        self._present.clear()

    async def enter(self, model: Model, at: datetime) -> Entrant:
        """Return the model's present entrant. A changed configuration begins a new one at `at`.

        :raises Unavailable: the database did not confirm it
        """
        configuration = self._configuration(model)
        last = self._present.get(model.id)
        if last is not None and last.configuration == configuration:
            return last
        async with self._database.transaction() as conn:
            last = await select_latest_entrant(conn, model.id)
            if last is None or last.configuration != configuration:
                last = _entrant(model, FIRST if last is None else last.number + 1, configuration, None, at)
                await insert_entrant(conn, last)
        self._present[model.id] = last
        return last

    async def answered(self, entrant: Entrant, answered_by: str, at: datetime) -> Entrant:
        """Return the entrant for the model name in an answer. A changed name begins a new entrant at `at`.

        :raises Unavailable: the database did not confirm it
        """
        if entrant.answered_by == answered_by or entrant.configuration is None:
            return entrant
        known = replace(entrant, answered_by=answered_by, fingerprint=fingerprint(entrant.configuration, answered_by))
        async with self._database.transaction() as conn:
            if entrant.answered_by is None:
                await update_entrant_answered(conn, known)
            else:
                known = replace(known, number=entrant.number + 1, began_at=at)
                await insert_entrant(conn, known)
        self._present[entrant.model_id] = known
        return known

    async def count_missed(self, models: Sequence[Model], at: datetime) -> None:
        """Count a due cycle that starts no invocation of these models, which are still running or out of budget.

        :raises Unavailable: the database did not confirm it
        """
        entrants = [self._present.get(model.id) or await self.enter(model, at) for model in models]
        async with self._database.transaction() as conn:
            await upsert_missed_cycles(conn, entrants, at)

    def _configuration(self, model: Model) -> str:
        known, left_out = self._configurations.get(model.id), frozenset(self._left_out(model))
        if known is None or known[:2] != (model, left_out):
            configuration = configuration_of(model, self._settings, left_out)
            known = self._configurations[model.id] = (model, left_out, configuration)
        return known[2]


def configuration_of(model: Model, settings: Settings, left_out: Collection[str] = ()) -> str:
    """Return everything that affects how a model trades in a service with these settings, as canonical JSON, without
    its names and display fields.

    `left_out` are the fields that its requests omit because its provider refused them.
    """
    own, variant = model.configuration, VARIANTS[model.variant]
    definition = own.provider_definition
    of_provider = {} if definition is None else definition.request
    sampling = {"temperature": temperature_of(model), **of_provider, **own.request}
    return canonical_json(
        {
            "prompt": own.prompt or variant.prompt,
            "tools": tool_schemas(settings.markets, own.tools_off),
            "limits": to_builtins(limits_of(model, settings.attempt_timeout_s)),
            "variant": model.variant.value,
            "provider": model.provider,
            "routerModelName": model.router_model_name,
            "baseUrl": base_url_of(model, settings),
            "protocol": "chat" if definition is None else definition.protocol,
            "sampling": {name: value for name, value in sampling.items() if name not in left_out and value is not None},
            "tokens": {"invocation": settings.run_tokens_max, "answer": settings.answer_tokens_max},
            **({"calls": "json"} if own.calls_as_json else {}),
            **({} if own.known_context is None else {"contextTokens": own.known_context}),
            **({"params": dict(own.params)} if own.params else {}),
            **({"external": _external(model)} if model.is_external else {}),
            "cadenceSeconds": own.cadence.total_seconds(),
            "fees": {
                "takerBps": format_decimal(settings.taker_fee_bps),
                "makerBps": format_decimal(settings.maker_fee_bps),
            },
            "latencyMs": settings.latency_ms,
            "serviceVersion": __version__,
        }
    ).decode()


def _external(model: Model) -> Mapping[str, Any]:
    """Return the owner and declaration of an external agent. An agent that declares nothing equals no other.

    The key is excluded: an agent with a new key is the same agent.
    """
    owner, declared = model.configuration.owner, model.configuration.declared
    if declared is None:
        return {"owner": owner, "agent": model.id}
    return {"owner": owner, "version": declared.version, "promptDigest": declared.prompt_digest}


def first_entrant(model: Model, settings: Settings, answered_by: str | None, at: datetime) -> Entrant:
    """Return a model's first entrant, answered by the model of this name."""
    return _entrant(model, FIRST, configuration_of(model, settings), answered_by, at)


def _entrant(model: Model, number: int, configuration: str, answered_by: str | None, at: datetime) -> Entrant:
    return Entrant(
        model_id=model.id,
        number=number,
        fingerprint=fingerprint(configuration, answered_by),
        configuration=configuration,
        answered_by=answered_by,
        began_at=at,
    )
