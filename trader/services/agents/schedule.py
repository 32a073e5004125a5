"""Schedule of invocations: starts one of every active model that is due in a cycle, and reads the records."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, Literal
from uuid import UUID

from trader.clock import Clock, cut_to_ms, iso
from trader.domain.agents.conversation import Message
from trader.domain.market.markets import STALE_AFTER
from trader.domain.models import Model, VariantId, rule_model
from trader.errors import Unavailable
from trader.gateways.agents.providers import Providers, find_in_cooldown
from trader.gateways.agents.taapi import Taapi
from trader.logs import log_bug
from trader.services.agents.budgets import Budgets
from trader.services.agents.chain import append_interrupted
from trader.services.agents.entrants import Entrants
from trader.services.agents.external import ExternalAgents
from trader.services.agents.invocations import LATEST, FinishedInvocation, ModelSummary, read_messages, short_answers
from trader.services.agents.model_warnings import (
    CUT_PROMPT,
    INTERRUPTED,
    Failing,
    FailureCounts,
    model_warnings,
    spent_budget,
    warning_about,
)
from trader.services.agents.observer import Observer
from trader.services.agents.payloads import PayloadPacker
from trader.services.agents.recorder import InvocationRecorder, recovered_call
from trader.services.agents.slots import Batch, Queued, SlotName, Slots, slot_name
from trader.services.agents.workflow import INVOCATION_LIMIT_S, InvocationLimits, Workflow
from trader.services.events import EventBus, WorkflowProgress
from trader.services.exchange.protocol import Exchange
from trader.services.market.feed import MarketFeed
from trader.services.relay import RelayReader
from trader.settings import Settings
from trader.store.agents.invocations import (
    insert_tool_call,
    select_chosen_invocations,
    select_invocations,
    select_payloads,
    select_tool_calls,
    select_unrecorded_orders,
    update_interrupted,
)
from trader.store.agents.models import select_model_activity, select_models, upsert_model
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database, Page

CLOSE_S: Final = 2.0
"""How long `close` waits for cancelled invocations to write their records."""

UNSAVED_MAX: Final = 1_000
"""Records that wait for the database to come back; beyond that the oldest is dropped."""

_log = logging.getLogger("trader.agents")


class Agents:
    """Owns every invocation. Models with the same name at the same provider share slots, and wait for a free one.

    `skipped` counts the cycles that passed over models which were still running, or still waiting.
    """

    def __init__(
        self,
        database: Database,
        exchange: Exchange,
        market: MarketFeed,
        clock: Clock,
        events: EventBus,
        settings: Settings,
        providers: Providers,
        *,
        supplier: Taapi | None = None,
        invocation_limit_s: float = INVOCATION_LIMIT_S,
        leader: RelayReader | None = None,
    ) -> None:
        """With `leader` another process runs the models, and this one repeats what it warns of."""
        self._database = database
        self._exchange = exchange
        self._clock = clock
        self._events = events
        self._settings = settings
        self._providers = providers
        self._leader = leader
        self._limits = InvocationLimits(
            settings.run_tokens_max,
            settings.answer_tokens_max,
            settings.attempt_timeout_s,
            invocation_limit_s,
            _thinks_until(market.ends_at) if settings.replay_thinking == "on" else None,
        )
        self._observer = Observer(database, exchange, market, settings, supplier)
        self._packer = PayloadPacker()
        self._entrants = Entrants(database, settings, self._left_out)
        shared = self._observer, self._entrants, self._packer
        self.external = ExternalAgents(database, exchange, *shared, clock, events, settings)
        self.budgets = Budgets(
            database, settings.ai_budget_usd_per_day, settings.run_tokens_max, settings.answer_tokens_max
        )
        self._with_cut_prompts: set[str] = set()
        self._failures = FailureCounts()
        self._models: dict[str, Model] = {}
        self._reading = asyncio.Lock()
        self.version = 0
        """Increases when the models change."""

        self._running: dict[str, tuple[asyncio.Task[None], datetime]] = {}
        self._slots = Slots(settings.max_parallel_models)
        self._dropped: list[Model] = []
        self._unsaved: deque[InvocationRecorder] = deque(maxlen=UNSAVED_MAX)
        self._is_closing = False
        self.skipped: Counter[str] = Counter()

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Close the invocations that a crash left open, load the models, and in a demo without any create them.

        It may be called again after `close`. Only one process at a time may be started on a database.
        """
        self._is_closing = False
        self._entrants.forget()
        self.budgets.forget()
        now = self._clock.now()
        async with self._database.writing() as conn:
            await ensure_partitions(conn, now)
        await self._close_left_open(now)
        await self.reload_models()
        if self._settings.demo and not self._models:
            await self._create_rule_models(now)
            await self.reload_models()
        for model in self._models.values():
            await self._exchange.open_account(model.id)
        await self.external.start(self._models)

    async def follow(self) -> None:
        """Only load the models and what they cost, for a process that reads what another one trades."""
        await self.reload_models()
        if self.budgets.limits(self._models.values()):
            await self.budgets.follow(self._clock.now(), self._models)

    async def close(self) -> None:
        """Cancel the invocations and let them write their records."""
        self._is_closing = True
        self.external.close()
        self._slots.clear()
        tasks = [task for task, _ in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                _log.error("%s did not end within %g s", task.get_name(), CLOSE_S)

    async def _close_left_open(self, now: datetime) -> None:
        """Close the invocations of a process that died, and add the calls whose orders it placed but did not record."""
        async with self._database.transaction() as conn:
            for invocation_id, model_id in await update_interrupted(conn, INTERRUPTED, now):
                orders = await select_unrecorded_orders(conn, invocation_id, model_id)
                for order in orders:
                    await insert_tool_call(conn, recovered_call(invocation_id, order))
                await append_interrupted(conn, invocation_id)
                _log.warning(
                    "%s: invocation %s was interrupted by the end of its process; %d calls recovered from their orders",
                    model_id,
                    invocation_id,
                    len(orders),
                )

    async def _create_rule_models(self, now: datetime) -> None:
        async with self._database.transaction() as conn:
            for variant in VariantId:
                await upsert_model(conn, rule_model(variant, now))

    async def reload_models(self) -> None:
        """Read the models, of which commands may have added some. One reading at a time: none undoes a later one."""
        async with self._reading:
            async with self._database.connection() as conn:
                models = await select_models(conn)
            known = {model.id: model for model in models}
            self._providers.learn(models)
            if known != self._models:
                self._models = known
                self.version += 1

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Mapping[str, Model]:
        """The models by id, as of the last cycle; oldest first."""
        return MappingProxyType(self._models)

    def running(self) -> Mapping[str, datetime]:
        """Return the models that run now, and since when."""
        return {model_id: since for model_id, (_, since) in self._running.items()}

    def waiting(self) -> Mapping[str, datetime]:
        """Return the models that wait for a slot, and since when."""
        return self._slots.waiting()

    async def invocations(
        self,
        model_id: str | None = None,
        variant: VariantId | None = None,
        page: Page = LATEST,
        *,
        with_answers: bool = False,
    ) -> list[FinishedInvocation]:
        """Return finished invocations, latest first, of one model, one variant, or all (None)."""
        async with self._database.reading() as conn:
            if model_id is None and variant is None:
                invocations = await select_invocations(conn, page)
            else:
                invocations = await select_chosen_invocations(conn, model_id, variant, page)
            calls = await select_tool_calls(conn, [invocation.id for invocation in invocations])
            payloads = await select_payloads(conn, invocations) if with_answers else {}
        if any(invocation.model_id not in self._models for invocation in invocations):
            await self.reload_models()
        answers = await asyncio.to_thread(short_answers, invocations, payloads) if payloads else {}
        return [
            FinishedInvocation(
                invocation,
                self._models[invocation.model_id],
                tuple(calls.get(invocation.id, ())),
                answers.get(invocation.id),
            )
            for invocation in invocations
        ]

    async def messages(self, invocation_id: UUID) -> list[Message]:
        """Return the messages exchanged with the model in an invocation. Raise `NotFound` when there is none."""
        return await read_messages(self._database, invocation_id)

    async def model_summaries(self) -> list[ModelSummary]:
        """Return every model with its activity, oldest first."""
        await self.reload_models()
        async with self._database.connection() as conn:
            activity = await select_model_activity(conn)
        return [ModelSummary(model, *activity.get(model.id, ())) for model in self._models.values()]

    def warning(self) -> str | None:
        """Return why models do not run, or not as configured, as one text; None without a problem."""
        if self._leader is not None:
            return None if self._leader.view is None else self._leader.view.warning
        return warning_about(self._models.values(), self._providers, self.model_warnings(), self.in_cooldown())

    def model_warnings(self) -> Mapping[str, str]:
        """Return a warning for each model that has a problem, by model id."""
        if self._leader is not None:
            return {} if self._leader.view is None else self._leader.view.model_warnings
        models = self._models.values()
        return model_warnings(models, self._providers, self.budgets, self._with_cut_prompts, self.failing())

    def failing(self) -> Mapping[str, Failing]:
        """Return the active models that failed three times in a row or more often."""
        return self._failures.failing(self._models.values())

    def in_cooldown(self) -> Mapping[str, str]:
        """Return the providers and keys that no model can use at present, with the reasons."""
        return find_in_cooldown(self._providers)

    # --- invocations --------------------------------------------------------------------------------------------------

    async def start_batch(self, now: datetime) -> list[Model]:
        """Start an invocation of every active model that is not running; they go on. Return the external agents due.

        :raises Unavailable: the models cannot be read; nothing was started
        """
        await self.reload_models()
        await self._save_unsaved()
        if self._is_closing:
            return []
        waiting = self.waiting()
        await self.budgets.begin_cycle(now, self._models)
        every = [model for model in self._models.values() if model.active and self.budgets.is_asked_for(model, now)]
        external, asked = [model for model in every if model.is_external], [model for model in every if model.is_asked]
        active = [model for model in asked if self.budgets.is_due(model, now)]
        self.budgets.end_cycle(now)
        due = [model for model in active if model.id not in self._running and model.id not in waiting]
        late = [model for model in active if model.id in self._running or model.id in waiting]
        self._count_skipped("running", [model.id for model in late if model.id in self._running], now)
        self._count_skipped("waiting", [model.id for model in late if model.id in waiting], now)
        if due:
            batch = Batch(tuple(model.id for model in due))
            for model in due:
                self._slots.add(Queued(model, batch, now))
            for name in dict.fromkeys(slot_name(model) for model in due):
                self._fill_slots(name)
            await asyncio.sleep(0)  # lets the invocations start, so that the clock waits for them
        if missed := [model for model in asked if model not in due]:
            await self._entrants.count_missed(missed, now)
        await self.external.begin_cycle(external, now)
        if self._dropped:
            dropped, self._dropped = self._dropped, []  # counted once at the most, also when the commit is in doubt
            await self._entrants.count_missed(dropped, now)
        return external

    def _left_out(self, model: Model) -> Collection[str]:
        provider = self._providers.get(model.provider)
        return () if provider is None else provider.left_out(model)

    def _count_skipped(self, state: Literal["running", "waiting"], model_ids: Sequence[str], now: datetime) -> None:
        if model_ids:
            self.skipped[state] += len(model_ids)
            _log.warning("cycle %s skipped for models that are still %s: %s", iso(now), state, ", ".join(model_ids))

    def _fill_slots(self, name: SlotName) -> None:
        """Start queued invocations while there are free slots of this name.

        An invocation that ends calls this while it is still busy, so that a clock in lockstep cannot advance between.
        """
        while not self._is_closing and (queued := self._slots.take(name)):
            batch = queued.batch
            model = self._models.get(queued.model.id)  # it may have changed while it was queued
            tokens = self.budgets.reserve(model) if model is not None and model.active else None
            if model is None or tokens is None:  # others may have reserved what is left
                self._slots.free(name)
                self._ended(batch)
                self._dropped += [model] if model is not None and model.active else []
                continue
            started_at = cut_to_ms(self._clock.now())
            limits = self._limits._replace(tokens=tokens, is_capped=tokens < self._limits.tokens)
            invocation = self._invoke(model, batch, started_at, name, limits)
            task = asyncio.create_task(invocation, name=f"invocation of {model.id}")
            task.add_done_callback(log_bug)
            self._running[model.id] = (task, started_at)

    async def _invoke(
        self, model: Model, batch: Batch, started_at: datetime, slot: SlotName, limits: InvocationLimits
    ) -> None:
        async with self._clock.busy():
            shared, reserved = (
                (self._database, self._events, self._packer, self._entrants),
                self.budgets.reserved(model),
            )
            record = InvocationRecorder(*shared, model, started_at, self._exchange.settle, reserved)
            workflow = Workflow(
                record,
                self._providers,
                self._exchange,
                self._observer,
                self._clock,
                self._events,
                limits,
                self.budgets.restriction(model),
            )
            try:
                await workflow.execute()
            except Unavailable as error:
                _log.warning("%s: not invoked, since it could not be recorded: %s", model.id, error)
            finally:
                if record.is_unsaved:
                    self._unsaved.append(record)
                self._note_end(record, workflow)
                del self._running[model.id]
                self._slots.free(slot)
                self._ended(batch)
                self._fill_slots(slot)

    def _note_end(self, record: InvocationRecorder, workflow: Workflow) -> None:
        """Count the cost of an invocation, and report a spent budget and a cut prompt, each once."""
        model, before = record.model, self.budgets.of(record.model)
        self.budgets.settle(record.invocation)
        self._failures.add(record.invocation)
        after = self.budgets.of(model)
        if before is not None and after is not None and before.state == "open" != after.state:
            _log.warning("%s", spent_budget(model, after))
        if workflow.is_prompt_cut and model.id not in self._with_cut_prompts:
            self._with_cut_prompts.add(model.id)
            _log.warning("%s: %s", model.id, CUT_PROMPT)

    def _ended(self, batch: Batch) -> None:
        batch.left -= 1
        if not batch.left:
            details = {"modelIds": list(batch.model_ids)}
            self._events.publish(WorkflowProgress("batch:complete", self._clock.now(), details))

    async def _save_unsaved(self) -> None:
        """Write the records that the database could not take when their invocations ended."""
        while self._unsaved:
            record = self._unsaved.popleft()
            try:
                await record.save()
            except Unavailable:
                self._unsaved.appendleft(record)
                raise


def _thinks_until(ends_at: datetime | None) -> datetime:
    """Return when a model's thinking can no longer matter: its order is refused once the last prices are stale."""
    return datetime.max.replace(tzinfo=UTC) if ends_at is None else ends_at + STALE_AFTER + timedelta(milliseconds=1)
