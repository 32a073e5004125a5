"""Schedule of invocations: starts one for every active model that is due in a cycle."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from trader.agents.budgets import Budgets
from trader.agents.conversation import InvocationLimits, Learned
from trader.agents.domain.invocations import INTERRUPTED, Failing
from trader.agents.domain.models import Model, rule_model
from trader.agents.entrants import Entrants
from trader.agents.environment import ServiceEnvironment
from trader.agents.external import ExternalAgents
from trader.agents.model_warnings import (
    ConsecutiveFailures,
    Warnings,
    model_warnings,
    spent_budget,
)
from trader.agents.observer import Observer
from trader.agents.payloads import PayloadPacker
from trader.agents.providers.providers import find_in_cooldown
from trader.agents.recorder import InvocationRecorder, RecorderServices, recovered_call
from trader.agents.services import AgentServices
from trader.agents.slots import Batch, QueuedModel, SlotName, Slots, slot_name
from trader.agents.sql.invocations import (
    insert_tool_call,
    select_failing,
    select_unrecorded_calls,
    update_interrupted,
)
from trader.agents.sql.models import upsert_model
from trader.agents.variants import limits_of
from trader.agents.verification import append_interrupted
from trader.agents.workflow import Workflow
from trader.core import tasks
from trader.core.clock import cut_to_ms, iso
from trader.core.errors import Unavailable
from trader.core.events import WorkflowProgress
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import patiently
from trader.exchange.service_level import Outcomes
from trader.market.domain.markets import STALE_AFTER

CLOSE_S: Final = 2.0
"""How long `close` waits for canceled invocations to write their records."""

UNSAVED_MAX: Final = 1_000
"""Maximum number of records kept while the database is unavailable; beyond it the oldest is dropped."""

_log = logging.getLogger("trader.agents")


class InvocationScheduler:
    """Owns every invocation. Models with the same name at the same provider share slots, and wait until one is free.

    `skipped` counts the cycles that skipped models because they were still running or waiting, and `ends` what ended
    the invocations.
    """

    def __init__(self, services: AgentServices) -> None:
        database, settings = services.database, services.settings
        self._database = database
        self._exchange = services.exchange
        self._clock = services.clock
        self._events = services.events
        self._settings = settings
        self._providers = services.providers
        self._models = services.models
        self._limits = InvocationLimits(
            settings.run_tokens_max,
            settings.answer_tokens_max,
            settings.attempt_timeout_s,
            services.invocation_limit_s,
            _thinks_until(services.market.ends_at) if settings.replay_thinking == "on" else None,
        )
        self._observer = Observer(database, services.exchange, services.market, settings, services.supplier)
        self._entrants = Entrants(database, settings, self._left_out)
        self._recorders = RecorderServices(
            database, services.events, PayloadPacker(), self._entrants, services.exchange.settle
        )
        self.external = ExternalAgents(services, self._observer, self._recorders)
        self.budgets = Budgets(
            database, settings.ai_budget_usd_per_day, settings.run_tokens_max, settings.answer_tokens_max
        )
        self._learned: dict[str, Learned] = {}
        self._failures = ConsecutiveFailures()
        self._running: dict[str, tuple[asyncio.Task[None], datetime]] = {}
        self.outcomes = Outcomes()
        self._slots = Slots(settings.max_parallel_models)
        self._dropped: list[Model] = []
        self._unsaved: deque[InvocationRecorder] = deque(maxlen=UNSAVED_MAX)
        self._is_closing = False
        self.skipped: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Close the invocations that a crash left open, and load the models; a demo without models creates them.

        It may be called again after `close`. Only one process at a time may be started on a database.
        """
        self._is_closing = False
        self._entrants.forget()
        self.budgets.forget()
        now = self._clock.now()
        async with self._database.writing() as conn:
            await ensure_partitions(conn, now)
        await self._save_unsaved()  # if this process has led before, and lost the lead with the database
        await self._close_left_open(now)
        async with self._database.connection() as conn:
            self._failures.load(await select_failing(conn, INTERRUPTED))
        await self._reload_models()
        if self._settings.demo and not self._models.by_id:
            async with self._database.transaction() as conn:
                for variant in VariantId:
                    await upsert_model(conn, rule_model(variant, now))
            await self._reload_models()
        for model in self._models.by_id.values():
            await self._exchange.open_account(model.id)
        await self.external.start(self._models.by_id)

    async def follow(self) -> None:
        """Load only the models and their costs, for a process that follows the leader."""
        await self._reload_models()
        if self.budgets.limits(self._models.by_id.values()):
            await self.budgets.follow(self._clock.now(), self._models.by_id)

    async def close(self) -> None:
        """Cancel the invocations and let them write their records."""
        self._is_closing = True
        self.external.close()
        self._slots.clear()
        for late in await tasks.end(*(task for task, _ in self._running.values()), limit_s=CLOSE_S):
            _log.error("%s did not end within %g s", late.get_name(), CLOSE_S)

    async def _close_left_open(self, now: datetime) -> None:
        """Close the invocations of a process that died, and add its unrecorded calls from the orders they placed."""
        async with self._database.transaction() as conn:
            for invocation_id, model_id in await update_interrupted(conn, INTERRUPTED, now):
                calls = await select_unrecorded_calls(conn, invocation_id, model_id)
                for call in calls:
                    await insert_tool_call(conn, recovered_call(invocation_id, call))
                await append_interrupted(conn, invocation_id)
                _log.warning(
                    "%s: invocation %s was interrupted by the end of its process; %d calls recovered from their orders",
                    model_id,
                    invocation_id,
                    len(calls),
                )

    async def _reload_models(self) -> None:
        await self._models.reload()
        self._providers.learn(self._models.by_id.values())

    # --- reading ------------------------------------------------------------------------------------------------------

    def running(self) -> Mapping[str, datetime]:
        """Return the running models, each with its start."""
        return {model_id: since for model_id, (_, since) in self._running.items()}

    def waiting(self) -> Mapping[str, datetime]:
        """Return the models waiting for a slot, each with the start of its wait."""
        return self._slots.waiting()

    def warnings(self) -> Warnings:
        """Return why models do not run, or not as configured."""
        models = self._models.by_id.values()
        self._providers.learn(models)
        return model_warnings(models, self._providers, self.budgets, self._learned, self.failing())

    def failing(self) -> Mapping[str, Failing]:
        """Return the active models that failed at least three times in a row."""
        return self._failures.failing(self._models.by_id.values())

    def with_wrong_prices(self) -> Mapping[str, str]:
        """Return the active models whose price is not what their provider charges, with the figures."""
        models = [model for model in self._models.by_id.values() if model.active]
        warnings = {model.id: self.budgets.price_warning(model) for model in models}
        return {model_id: warning for model_id, warning in warnings.items() if warning is not None}

    def in_cooldown(self) -> Mapping[str, str]:
        """Return the providers and keys that are currently unavailable to all models, with the reasons."""
        return find_in_cooldown(self._providers)

    # --- invocations --------------------------------------------------------------------------------------------------

    async def start_batch(self, now: datetime) -> list[Model]:
        """Start an invocation of every due model that is not running, without waiting for it.

        Return the due external agents.

        :raises Unavailable: the models cannot be read; nothing was started
        """
        await self._reload_models()
        await self._save_unsaved()
        if self._is_closing:
            return []
        waiting = self.waiting()
        await self.budgets.begin_cycle(now, self._models.by_id)
        models = self._models.by_id.values()
        wanted = [
            model for model in models if model.active and self.budgets.is_on_grid(model.configuration.cadence, now)
        ]
        external = [model for model in wanted if model.is_external]
        asked = [model for model in wanted if model.is_asked]
        active = [model for model in asked if self.budgets.is_due(model, now)]
        self.budgets.end_cycle(now)
        due = [model for model in active if model.id not in self._running and model.id not in waiting]
        for state, busy in (("running", self._running), ("waiting", waiting)):
            if late := [model.id for model in active if model.id in busy]:
                self.skipped[state] += len(late)
                _log.warning("cycle %s skipped for models that are still %s: %s", iso(now), state, ", ".join(late))
        if due:
            batch = Batch(tuple(model.id for model in due))
            for model in due:
                self._slots.add(QueuedModel(model, batch, now))
            for name in dict.fromkeys(slot_name(model) for model in due):
                self._fill_slots(name)
            await asyncio.sleep(0)  # let the invocations start, so that the clock waits for them
        if missed := [model for model in asked if model not in due]:
            await self._entrants.count_missed(missed, now)
        await self.external.begin_cycle(external, now)
        if self._dropped:
            dropped, self._dropped = self._dropped, []  # counted at most once, even if the commit is in doubt
            await self._entrants.count_missed(dropped, now)
        return external

    def _left_out(self, model: Model) -> Collection[str]:
        provider = self._providers.get(model.provider)
        return () if provider is None else provider.left_out(model)

    def _fill_slots(self, name: SlotName) -> None:
        """Start queued invocations while there are free slots of this name.

        An invocation that ends calls this while it is still busy, so that a clock in lockstep cannot advance between.
        """
        while not self._is_closing and (queued := self._slots.take(name)):
            batch = queued.batch
            model = self._models.by_id.get(queued.model.id)  # the model may have changed while it was queued
            tokens = self.budgets.reserve(model) if model is not None and model.active else None
            if model is None or tokens is None:  # others may have reserved the remaining budget
                self._slots.free(name)
                self._ended(batch)
                self._dropped += [model] if model is not None and model.active else []
                continue
            started_at = cut_to_ms(self._clock.now())
            learned = self._learned.setdefault(model.id, Learned())
            limits = self._limits._replace(tokens=tokens, is_capped=tokens < self._limits.tokens, learned=learned)
            invocation = self._invoke(model, batch, started_at, name, limits)
            task = tasks.start(invocation, f"invocation of {model.id}")
            self._running[model.id] = (task, started_at)

    async def _invoke(
        self, model: Model, batch: Batch, started_at: datetime, slot: SlotName, limits: InvocationLimits
    ) -> None:
        async with self._clock.busy():
            record = InvocationRecorder(self._recorders, model, started_at, self.budgets.reserved(model))
            record.term = self._exchange.term or 0  # no term is 0: nothing begins while the role is being lost
            services, restriction = (self._exchange, self._observer, self._clock), self.budgets.restriction(model)
            environment = ServiceEnvironment(record, *services, limits_of(model, limits.attempt_s), restriction)
            workflow = Workflow(record, self._providers, environment, self._events, limits)
            try:
                with patiently(), self.outcomes.watch("decisions"):
                    await workflow.execute()
            except Unavailable as error:
                _log.warning("%s: not invoked, since it could not be recorded: %s", model.id, error)
            finally:
                if record.is_unsaved:
                    self._unsaved.append(record)
                self._note_end(record)
                del self._running[model.id]
                self._slots.free(slot)
                self._ended(batch)
                self._fill_slots(slot)

    def _note_end(self, record: InvocationRecorder) -> None:
        """Count the cost of an invocation; report a spent budget, a wrong price and a truncated prompt once each."""
        model, before = record.model, self.budgets.of(record.model)
        self.budgets.settle(record.invocation)
        price_warning = self.budgets.price_warning(model)
        self.budgets.compare(model, *record.compared_costs)
        if price_warning is None and (price_warning := self.budgets.price_warning(model)) is not None:
            _log.warning("%s", price_warning)
        self._failures.add(record.invocation)
        self.ends[record.invocation.ended_by or "error"] += 1
        after = self.budgets.of(model)
        if before is not None and after is not None and before.state == "open" != after.state:
            _log.warning("%s", spent_budget(model, after))
        ended_at = record.invocation.finished_at
        if ended_at is not None and (learned := self._learned.get(model.id)) is not None:
            learned.took = ended_at - record.invocation.started_at

    def _ended(self, batch: Batch) -> None:
        batch.left -= 1
        if not batch.left:
            details = {"modelIds": list(batch.model_ids)}
            self._events.publish(WorkflowProgress("batch:complete", self._clock.now(), details))

    async def _save_unsaved(self) -> None:
        """Write the records that could not be written when their invocations ended."""
        while self._unsaved:
            record = self._unsaved.popleft()
            try:
                await record.save()
            except Unavailable:
                self._unsaved.appendleft(record)
                raise


def _thinks_until(ends_at: datetime | None) -> datetime:
    """Return when further thinking becomes pointless: orders are refused once the last prices are stale."""
    return datetime.max.replace(tzinfo=UTC) if ends_at is None else ends_at + STALE_AFTER + timedelta(milliseconds=1)
