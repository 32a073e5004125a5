"""Approvals by persons: of orders that wait, of steps up, and of entrants that stepped down."""

import asyncio
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.models import Model
from trader.agents.sql.models import select_models
from trader.core.clock import SystemClock
from trader.core.errors import NotFound, Precondition
from trader.database.pool import Database
from trader.exchange.domain.halts import Halt, HaltCause
from trader.exchange.sql.accounts import select_identity
from trader.exchange.sql.halts import select_halts, update_halts_lifted
from trader.live.domain.ladder import STEPS, LadderFigures, LadderStep, find_lacks
from trader.live.ladder import APPROVAL_WAIT, LadderFile, read_ladder, step_at
from trader.live.sql import ladder as store
from trader.live.sql.drift import select_drift_figures
from trader.live.sql.venue_orders import select_venue_accounts
from trader.record.domain.results import APPROVED
from trader.record.sql.chain import insert_record


class LadderStanding(NamedTuple):
    """An entrant on its step. `lacks` is what it lacks for the step `above`, None on the highest one.

    At a venue where it is new, `above` is the step of the service itself. `halt` is its step down in force.
    """

    model: Model
    step: LadderStep
    above: LadderStep | None
    shown: LadderFigures
    lacks: list[str]
    halt: Halt | None

    def __str__(self) -> str:
        drift = self.shown.drift_p95_bps
        shown = f"{self.shown.days} days, {self.shown.fills} fills, drawdown {self.shown.drawdown_percent:.2f} %" + (
            "" if drift is None else f", drift (p95) {drift:.2f} bp"
        )
        lacks = "; ".join(self.lacks) or "nothing: `trader approve` lets it climb"
        state = f"STEPPED DOWN: {self.halt.reason}" if self.halt else None
        return "; ".join(filter(None, (state, shown, self.above and f"lacks for {self.above}: {lacks}")))


class Approvals:
    """What persons approve in one database, by the rules of LADDER_FILE."""

    def __init__(self, database: Database, file: Path | None, venue: str) -> None:
        self._database = database
        self._path = file
        self._venue = venue

    async def _read(self) -> LadderFile:
        if self._path is None:
            raise NotFound("LADDER_FILE is not set: there is no ladder.")
        return await asyncio.to_thread(read_ladder, self._path)

    async def standings(self) -> dict[str, LadderStanding]:
        """Return every entrant by its name.

        :raises NotFound: there is no LADDER_FILE
        :raises SettingsError: it contradicts itself
        """
        ladder, found = await self._read(), {}
        async with self._database.reading() as conn:
            identity, bound = await select_identity(conn), await select_venue_accounts(conn)
            halts = {each.account_id: each for each in await select_halts(conn) if each.cause is HaltCause.LADDER}
            is_live = identity is not None and identity.trading_mode == "live"
            at_venue = step_at(self._venue, identity.venue_url) if identity is not None and is_live else None
            for model in await select_models(conn):
                since = None if is_live else ladder.shadowed_since(model.id)
                step = at_venue or ("paper" if since is None else "shadow")
                above = next(iter(STEPS[STEPS.index(step) + 1 :]), None)
                above = step if is_live and model.id not in bound else above
                shown = await store.select_shown(conn, model.id, since)
                lacks = [] if above is None else find_lacks(ladder.rules.of(above), shown)
                found[model.id] = LadderStanding(model, step, above, shown, lacks, halts.get(model.id))
        return found

    async def drift(self, since: datetime) -> list[list[str]]:
        """Return how far paper was from the venue's fills since `since`, and from orders in shadow, as rows of text."""
        async with self._database.reading() as conn:
            fills = await select_drift_figures(conn, since)
            shadow = await select_drift_figures(conn, since, of_shadow=True)
        return [["venue", *each.cells] for each in fills] + [["shadow", *each.cells] for each in shadow]

    async def approve(self, name: str, by: str, override: str | None = None) -> str:
        """Approve a waiting order by its ID, or an entrant by its name. Return what that did.

        An entrant that stepped down may open again; any other climbs, once it lacks nothing or with an `override`.

        :raises NotFound: no order waits under the name, and no entrant has it
        :raises Precondition: the entrant lacks something
        :raises StartError: it has no valid certificate of the step below
        """
        try:
            order_id = UUID(name)
        except ValueError:
            return await self._approve_entrant(name, by, override)
        async with self._database.transaction() as conn:
            if not await store.update_waiting_order_approved(conn, order_id, by, APPROVAL_WAIT):
                raise NotFound(f"No order waits under {name}: it lapsed, was decided, or is unknown.")
        return f"Approved the order {name}: it is sent if it still passes every check."

    async def _approve_entrant(self, name: str, by: str, override: str | None) -> str:
        ladder, standing = await self._read(), (await self.standings()).get(name)
        if standing is None:
            raise NotFound(f"There is no model {name!r}.")
        model, shown, now = standing.model, standing.shown, SystemClock().now()
        returns = standing.halt is not None
        if (step := standing.step if returns else standing.above) is None or (
            standing.lacks and override is None and not returns
        ):
            what = "a step above it" if step is None else f"for {step}: {'; '.join(standing.lacks)}"
            raise Precondition(f"{name} lacks {what}. Nothing was approved.")
        by = by if override is None or returns else f"{by}, override: {override}"
        overrides = returns or override is not None
        found = await asyncio.to_thread(ladder.certify, model, step, shown, by, now, override=overrides)
        async with self._database.transaction() as conn:
            await insert_record(conn, APPROVED, msgspec.to_builtins(found))
        # No certificate counts that the chain does not have; what failed on the way can be approved again.
        await asyncio.to_thread(ladder.write, found)
        if returns:
            async with self._database.transaction() as conn:
                await update_halts_lifted(conn, name, by, HaltCause.LADDER)
            return f"{name} may open on {step} again; what it shows counts from now on."
        return f"{name} may be on {step}: {ladder.certificate_path(name, step)}, {found.digest}"
