"""The ladder of a live service: who may trade on its step, the caps of every order, steps down, and waiting orders."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

import msgspec

from trader.agents.domain.models import Model
from trader.agents.sql.models import select_models
from trader.core.clock import Clock
from trader.core.errors import OrderUndecided, StartError, TraderError
from trader.core.events import ApprovalWanted, EventBus
from trader.core.files import BYTES_MAX, decode_json, read_regular, replace_file
from trader.core.money import format_decimal
from trader.database.pool import Database
from trader.exchange.domain.account import Account, equity
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.orders import Order
from trader.exchange.domain.venue_orders import VenueOrder
from trader.exchange.halts import Halts
from trader.live.domain import ladder as rules
from trader.live.domain.ladder import BELOW, STEPS, Certificate, Commitment, LadderFigures, LadderRules, LadderStep
from trader.live.rehearsals import digest_of
from trader.live.sql import ladder as store
from trader.live.venues import VENUES
from trader.market.domain.markets import Market
from trader.settings.settings import Settings
from trader.settings.toml_lines import located, read_toml, struct_issues

log = logging.getLogger("trader.live")

APPROVAL_WAIT: Final = timedelta(seconds=60)
"""How long an order waits for a person, by the database's clock."""

_EXECUTION_TIME: Final = timedelta(seconds=10)
"""How long after that an order that was approved in time may still be sent."""

_LOOK_EVERY_S: Final = 1.0
VALID_FOR: Final = timedelta(days=30)


class LadderFile(NamedTuple):
    """The rules of LADDER_FILE, and their digest. The certificates are kept beside the file."""

    path: Path
    rules: LadderRules
    digest: str

    def certificate_path(self, name: str, step: LadderStep) -> Path:
        return self.path.parent / "certificates" / f"{name}.{step}.json"

    def shadowed_since(self, name: str) -> datetime | None:
        """Return when a person let an entrant into shadow; None if nobody did."""
        with suppress(OSError, ValueError):
            return _read(self.certificate_path(name, "shadow")).approved_at
        return None

    def read_certificate(self, model: Model, step: LadderStep, now: datetime) -> Certificate:
        """Return the certificate that lets a model onto a step.

        :raises StartError: it is missing, was changed, or does not fit the model, the rules or the time
        """
        file = self.certificate_path(model.id, step)
        try:
            found = _read(file)
            problem = self._problem(found, model, step)
            if problem is None and now - VALID_FOR <= found.approved_at <= now + timedelta(days=1):
                return found
        except (OSError, ValueError) as error:
            problem = str(error)
        problem = problem or f"it is of {found.approved_at:%Y-%m-%d}, not of the last {VALID_FOR.days} days"
        raise StartError(
            f"{model.id} may not be on the step {step}: it needs the certificate {file} of what it has shown on "
            f"{BELOW[step]}: {problem}. Run `trader approve {model.id}` there, or here with `--override REASON`."
        )

    def find_change(self, model: Model, step: LadderStep) -> str | None:
        """Return what has changed since a model was let onto a step; None without a certificate, too."""
        with suppress(OSError, ValueError):
            return self._problem(_read(self.certificate_path(model.id, step)), model, step)
        return None

    def _problem(self, found: Certificate, model: Model, step: LadderStep) -> str | None:
        reasons = {
            "its digest does not match its content": found.digest != _digest_of(found),
            f"it is of {found.name} on {found.step}": (found.name, found.step) != (model.id, step),
            f"it is of {found.entrant}, and {model.id} is {_entrant(model)}": found.entrant != _entrant(model),
            f"{self.path} has changed since": found.rules != self.digest,
        }
        return next((reason for reason, is_so in reasons.items() if is_so), None)

    def certify(
        self, model: Model, step: LadderStep, shown: LadderFigures, by: str, now: datetime, *, override: bool = False
    ) -> Certificate:
        """Return the certificate that lets a model onto a step.

        :raises StartError: the model has no valid certificate of the step below, and nobody overrides that
        """
        is_first = step == STEPS[1] or override
        below = "" if is_first else self.read_certificate(model, BELOW[step], now).digest
        certificate = Certificate(
            name=model.id, step=step, entrant=_entrant(model), shown=shown, rules=self.digest, below=below,
            approved_by=by, approved_at=now,
        )  # fmt: skip
        return msgspec.structs.replace(certificate, digest=_digest_of(certificate))

    def write(self, certificate: Certificate) -> None:
        """Write a certificate, from when on it counts. Raises `StartError`."""
        file = self.certificate_path(certificate.name, certificate.step)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, msgspec.json.encode(certificate))
        except OSError as error:
            raise StartError(f"{file} cannot be written: {error.strerror}") from None


def read_ladder(file: Path, markets: Iterable[Market] = ()) -> LadderFile:
    """Return the rules of a file.

    :raises SettingsError: it cannot be read, or its rules contradict themselves or the markets' minimum
    """
    text, values = read_toml(file)
    issues = [*struct_issues(LadderRules, values)]
    issues = issues or [*rules.find_contradictions(msgspec.convert(values, LadderRules), markets)]
    if issues:
        raise located(file, text, issues)
    found = msgspec.convert(values, LadderRules)
    return LadderFile(file, found, digest_of(msgspec.to_builtins(found)))


def step_at(venue: str, url: str | None) -> LadderStep:
    """Return the step of live trading at an address; any that is not the venue's test network may be real."""
    return "testnet" if url == VENUES[venue].TESTNET else "live"


def _read(file: Path) -> Certificate:
    return decode_json(read_regular(file, BYTES_MAX), Certificate)


def _digest_of(certificate: Certificate) -> str:
    return digest_of(msgspec.to_builtins(msgspec.structs.replace(certificate, digest="")))


def _entrant(model: Model) -> str:
    return f"{model.provider} {model.router_model_name} as {model.variant}"


class Ladder:
    """Keeps the entrants of a live service to the rule of its step."""

    def __init__(
        self, database: Database, clock: Clock, halts: Halts, events: EventBus, file: LadderFile, settings: Settings
    ) -> None:
        self._database = database
        self._clock = clock
        self._halts = halts
        self._events = events
        self._file = file
        self._settings = settings
        self.step = step_at(settings.venue, settings.venue_url)
        self._rule = file.rules.of(self.step)
        assert self._rule.caps is not None, "a step that sends orders has caps"
        self._caps = self._rule.caps

    async def admit(self, account_id: str) -> None:
        """Let a model that is new here onto the step of this service. Raise `StartError` without its certificate."""
        async with self._database.connection() as conn:
            model = next(model for model in await select_models(conn) if model.id == account_id)
        found = await asyncio.to_thread(self._file.read_certificate, model, self.step, self._clock.now())
        log.warning("LADDER: %s is on %s, as %s approved: %s", account_id, self.step, found.approved_by, found.digest)

    async def refusal(
        self, account_id: str, order: VenueOrder, marks: Mapping[str, Decimal], recorded: int | None = None
    ) -> str | None:
        """Return the cap that an order which may open would exceed; `recorded` is its client index once it has one."""
        if order.reduce_only:
            return None
        without = None if recorded is None else (account_id, recorded)
        async with self._database.connection() as conn:
            committed = await store.select_commitments(conn, self._clock.now(), without)
        return rules.refusal_by_caps(self._caps, account_id, committed, marks, _usd(account_id, order, marks))

    async def watch(self, account: Account, marks: Mapping[str, Decimal], difference: str | None, term: int) -> None:
        """Halt an account whose rule is broken, until a person approves it again."""
        if any(halt.cause is HaltCause.LADDER and halt.covers(account.id) for halt in self._halts.in_force):
            return
        present = equity(account, marks) if account.positions.keys() <= marks.keys() else None
        async with self._database.reading() as conn:
            shown = await store.select_shown(conn, account.id, equity=present)
            committed = await store.select_commitments(conn, self._clock.now())
            models = {model.id: model for model in await select_models(conn)}
        breaches = rules.find_breaches(self._rule, msgspec.structs.replace(shown, difference=difference))
        held = [each for each in committed if each.state == "held"]
        breaches += filter(None, [rules.refusal_by_caps(self._caps, account.id, held, {})])
        if account.id in models and (change := self._file.find_change(models[account.id], self.step)) is not None:
            breaches.append(f"its certificate does not hold: {change}")
        if breaches:
            reason = f"stepped down from {self.step}: {'; '.join(breaches)}"
            log.error("%s %s", account.id, reason)
            await self._halts.halt(account.id, HaltCause.LADDER, reason, "ladder", term=term)

    # Orders that wait for a person

    async def refusal_to_decide(
        self, order: Order, sending: VenueOrder, marks: Mapping[str, Decimal], is_approved: bool | None
    ) -> str | None:
        """Return why an order is not sent: the cap that it would exceed, or that nobody approved it in time.

        :raises OrderUndecided: it is above the limit, and waits, or another one of its account does
        """
        wait_s = APPROVAL_WAIT.seconds
        if is_approved is False:
            return f"nobody approved it within {wait_s} s"
        refusal = await self.refusal(order.account_id, sending, marks)
        usd, most = _usd(order.account_id, sending, marks), self._caps.approve_above
        if refusal or is_approved or most is None or usd <= most or sending.reduce_only:
            return refusal
        order_id = uuid4()
        named = msgspec.structs.replace(order, client_order_id=order.client_order_id or f"approval:{order_id}")
        async with self._database.writing() as conn:
            is_new = await store.insert_waiting_order(conn, order_id, named)
        if is_new:
            what = f"{order.side} {format_decimal(sending.quantity)} {order.symbol} for {usd:.2f} USD"
            how = f"{self._settings.server_url}/#/system?approve={order_id} or `trader approve {order_id}`"
            text = f"{what} waits {wait_s} s for approval: {how}"
            log.warning("%s: %s", order.account_id, text)
            self._events.publish(ApprovalWanted(self._clock.now(), order.account_id, text))
        raise OrderUndecided(f"An order of {order.account_id} waits at most {wait_s} s for a person.", wait_s)

    async def carry_out(self, place: Callable[[Order, bool], Awaitable[None]]) -> None:
        """Place the orders that a person approved, after the same checks as any other, and refuse those that lapsed.

        :raises TraderError: an order could not be decided now; the next call continues
        """
        async with self._database.connection() as conn:
            decided = await store.select_decided_orders(conn, APPROVAL_WAIT, APPROVAL_WAIT + _EXECUTION_TIME)
        for order_id, order, is_approved in decided:
            with suppress(OrderUndecided):  # it was sent
                await place(order, is_approved)
            log.warning("%s: the order %s waits no more", order.account_id, order_id)
            async with self._database.writing() as conn:
                await store.update_waiting_order_closed(conn, order_id)

    async def follow(self, place: Callable[[Order, bool], Awaitable[None]]) -> None:
        """Carry out what persons approve, forever."""
        while True:
            try:
                await self.carry_out(place)
            except TraderError as error:
                log.warning("orders that wait for approval are looked at again: %s", error)
            await asyncio.sleep(_LOOK_EVERY_S)


def _usd(account_id: str, order: VenueOrder, marks: Mapping[str, Decimal]) -> Decimal:
    return Commitment(account_id, order.symbol, order.side, order.quantity, order.price).usd(marks)
