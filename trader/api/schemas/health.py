"""Reports of the health endpoints."""

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from trader.api.schemas.common import BudgetUse, Timestamp, Wire, iso, or_unset
from trader.domain.exchange.halts import Halt


class HaltInForce(Wire, kw_only=True):
    """A halt: no position is opened or added to for the account, or, if absent, for any. `since` is real time."""

    account_id: str | UnsetType = UNSET
    cause: str
    reason: str
    since: Timestamp

    @classmethod
    def of(cls, halt: Halt) -> "HaltInForce":
        return cls(account_id=or_unset(halt.account_id), cause=halt.cause.value, reason=halt.reason, since=iso(halt.at))


def halts_in_force(halts: Sequence[Halt]) -> list[HaltInForce] | UnsetType:
    """Return the halts on the wire; absent when there are none."""
    return [HaltInForce.of(halt) for halt in halts] or UNSET


class HealthReport(Wire):
    """`GET /health`. `schedulers` holds whether each of the three is running; `halts` is absent when nothing is halted.

    A halt is deliberate and leaves the service healthy. `reconciliation` is there in live trading when books and venue
    disagree: by account, why nothing is opened for it. Then the service is unhealthy and an operator has to look.
    `reasons` is there when the service is unhealthy, in words. `lagSeconds` is how old the newest record is that a
    process has of the leader which it follows; absent on the leader.
    """

    status: Literal["healthy", "unhealthy"]
    timestamp: Timestamp
    schedulers: dict[str, bool]
    reasons: list[str] | UnsetType = UNSET
    reconciliation: dict[str, str] | UnsetType = UNSET
    halts: list[HaltInForce] | UnsetType = UNSET
    lag_seconds: float | UnsetType = UNSET


class LiveReport(Wire):
    """`GET /health/live`: the process answers, whatever else is wrong."""

    status: Literal["alive"]
    timestamp: Timestamp


class DatabaseHealth(Wire):
    """`latency_ms` is null when the database did not answer."""

    ok: bool
    latency_ms: float | None


class MarketHealth(Wire):
    """`last_update_at` is null before the first update. `trouble` says why there are no prices, if so."""

    source: str
    last_update_at: Timestamp | None
    stale: bool
    trouble: str | UnsetType = UNSET


class StreamHealth(Wire):
    subscribers: int
    capacity: int


class SchedulerHealth(Wire):
    """Times are null before the first run; `last_error` is null when the last run went well."""

    running: bool
    interval_ms: int
    runs: int
    failures: int
    skipped: int
    last_started_at: Timestamp | None
    last_finished_at: Timestamp | None
    last_duration_ms: int | None
    last_error: str | None
    next_due_at: Timestamp | None


class ModelRunning(Wire):
    model_id: str
    running_for_seconds: float


class ModelWaiting(Wire):
    model_id: str
    waiting_for_seconds: float


class ModelFailing(Wire):
    """A model whose last invocations failed, three or more in a row; `reason` is that of the last one."""

    model_id: str
    failures: int
    reason: str


class AlarmFiring(Wire):
    """An alarm that fires: it began `count` times since then. `consequences` are the alarms that it explains."""

    cause: str
    subject: str
    message: str
    since: Timestamp
    count: int
    consequences: list[str]


class SchedulersReport(Wire):
    """`GET /health/schedulers`. Of several processes one leads and trades; the others stand by, or only read.

    `modelsWaiting` are the models that wait for a slot (`MAX_PARALLEL_MODELS`); absent without any.
    `modelsFailing` failed three times in a row or more often, and `providersResting` are the AI providers and keys that
    no model can use now, with the reasons; both are absent when there are none, and leave the service healthy.
    `budgets` are those of the models that have one, by id. `lagSeconds` is that of `GET /health`. `alarms` are those
    that fire now; absent without any.
    """

    timestamp: Timestamp
    started_at: Timestamp
    uptime_seconds: float
    trading_mode: str
    role: Literal["leader", "standby", "reader"]
    database: DatabaseHealth
    market: MarketHealth
    streams: dict[str, StreamHealth]
    schedulers: dict[str, SchedulerHealth]
    models_running: list[ModelRunning]
    models_waiting: list[ModelWaiting] | UnsetType = UNSET
    models_failing: list[ModelFailing] | UnsetType = UNSET
    providers_resting: dict[str, str] | UnsetType = UNSET
    budgets: dict[str, BudgetUse] | UnsetType = UNSET
    halts: list[HaltInForce] | UnsetType = UNSET
    lag_seconds: float | UnsetType = UNSET
    alarms: list[AlarmFiring] | UnsetType = UNSET
