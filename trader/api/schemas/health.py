"""Reports of the health endpoints."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, UnsetType

from trader.api.schemas.common import BudgetUse, From, Timestamp, Wire
from trader.exchange.domain.halts import Halt


class HaltInForce(Wire, kw_only=True):
    """A halt: no position is opened or increased for the account, or, if absent, for any. `since` is real time."""

    account_id: str | UnsetType = UNSET
    cause: str
    reason: str
    since: Annotated[Timestamp, From("at")]


def halts_in_force(halts: Sequence[Halt]) -> list[HaltInForce] | UnsetType:
    """Return the halts on the wire; absent if there are none."""
    return [HaltInForce.from_attributes(halt) for halt in halts] or UNSET


class AlarmFiring(Wire):
    """A condition that operators should know: it has started `count` times since `since`.

    It is `firing` once it was reported, until it is resolved. A `pending` one holds now: it has just begun, or another
    alarm explains it, whose `consequences` list it.
    """

    cause: Annotated[str, From("alarm.cause.kind")]
    subject: Annotated[str, From("alarm.cause.subject")]
    state: Annotated[
        Literal["pending", "firing"],
        From("reported_s", lambda reported_s: "pending" if reported_s is None else "firing"),
    ]
    message: Annotated[str, From("alarm.text")]
    since: Timestamp
    count: int
    consequences: Annotated[list[str], From(convert=list)]


class HealthReport(Wire):
    """`GET /health`. `schedulers` says whether each of the three is running; `halts` is absent if nothing is halted.

    A halt is deliberate and leaves the service healthy. `reconciliation` is present in live trading if books and venue
    disagree: for each account, why its openings are blocked. The service is then unhealthy and needs an operator.
    `reasons` is present if the service is unhealthy, in plain text. `lagSeconds` is the age of a follower's newest
    record from its leader; absent on the leader. `alarms` is the list of `GET /health/schedulers`: a service that works
    may still have models that fail.
    """

    status: Literal["healthy", "unhealthy"]
    timestamp: Timestamp
    schedulers: dict[str, bool]
    reasons: list[str] | UnsetType = UNSET
    reconciliation: dict[str, str] | UnsetType = UNSET
    halts: list[HaltInForce] | UnsetType = UNSET
    lag_seconds: float | UnsetType = UNSET
    alarms: list[AlarmFiring] | UnsetType = UNSET


class LiveReport(Wire):
    """`GET /health/live`: the process responds, whatever else is wrong."""

    status: Literal["alive"]
    timestamp: Timestamp


class DatabaseHealth(Wire):
    """`latency_ms` is null if the database did not respond."""

    ok: bool
    latency_ms: float | None


class MarketHealth(Wire):
    """`last_update_at` is null before the first update. `trouble` says why there are no prices, if there are none."""

    source: str
    last_update_at: Timestamp | None
    stale: bool
    trouble: str | UnsetType = UNSET


class StreamHealth(Wire):
    subscribers: int
    capacity: int


class SchedulerHealth(Wire):
    """Times are null before the first run; `last_error` is null if the last run succeeded."""

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
    """A model whose last three or more invocations failed; `reason` is the last failure's."""

    model_id: str
    failures: int
    reason: str


class SchedulersReport(Wire):
    """`GET /health/schedulers`. Of several processes one leads and trades; the others stand by, or only read.

    `modelsWaiting` are the models waiting for a slot (`MAX_PARALLEL_MODELS`); absent without any. `modelsFailing` have
    failed at least three times in a row, and `providersResting` are the AI providers and keys that no model can use
    now, with the reasons; both are absent if empty, and leave the service healthy. `budgets` are the models' budgets by
    id. `lagSeconds` is the same as in `GET /health`. `alarms` are the present conditions that operators should know,
    those of the leader included; absent without any.
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
