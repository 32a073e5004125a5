"""The operator's halt, its end, and what operators look at, on the wire."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from trader.api.schemas.common import From, Input, Timestamp, Wire
from trader.api.schemas.simulator import AccountId
from trader.exchange.domain.halts import REASON_MAX
from trader.exchange.halts import Keeper


class HaltInput(Input, kw_only=True):
    """`account_id` is one account; absent: all of them. `by` is who halts, for the record.

    `place` is the `host:port/name` of the database, or the folder of the embedded one, of the service that the caller
    means: a service with other data refuses the call.
    """

    account_id: AccountId | None = None
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_MAX)]
    by: Annotated[str, Meta(min_length=1, max_length=200)] = "an operator"
    place: str | None = None


class ResumeInput(Input, kw_only=True):
    """`account_id` is one account; absent: the halt of all accounts together. `by` is who lifts it, for the record."""

    account_id: AccountId | None = None
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_MAX)] = "requested by an operator"
    by: Annotated[str, Meta(min_length=1, max_length=200)] = "an operator"


class ResumeOutput(Wire, kw_only=True):
    """`lifted` are the causes of the lifted halts, empty if there was none; `message` says so in plain text."""

    account_id: str | UnsetType = UNSET
    lifted: list[str]
    message: str


class ApproveInput(Input, kw_only=True):
    """`name` is an entrant, or the ID of an order that waits. `by` is who approves it, for the record."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    by: Annotated[str, Meta(min_length=1, max_length=200)] = "an operator"


class ApproveOutput(Wire, kw_only=True):
    """What was approved, in plain text."""

    message: str


class LadderRow(Wire, kw_only=True):
    """An entrant on its step of the ladder; `text` says what it has shown there, and what it lacks for the next one."""

    name: str
    step: str
    text: str


class GetLadderOutput(Wire, kw_only=True):
    """The entrants on the ladder; none without `LADDER_FILE`."""

    entrants: list[LadderRow]


class CostOfDay(Wire, kw_only=True):
    """The known cost of a model's invocations that began on a day (UTC). `isPartial`: part of it is unknown."""

    day: Annotated[str, From(convert=lambda day: day.date().isoformat())]
    model_id: str
    usd: Annotated[float, From(convert=float)]
    is_partial: bool


class ModelActivityRow(Wire, kw_only=True):
    """A model's finished invocations: how many failed, and the last failure.

    `medianSeconds` and `slowSeconds` are the median and the 95 % quantile of the durations of the latest 1,000.
    """

    model_id: str
    invocations: int
    failed: int
    median_seconds: Annotated[float, From("median_s")]
    slow_seconds: Annotated[float, From("slow_s")]
    last_failure: str | None


class RefusalsOfRule(Wire, kw_only=True):
    """How many calls a rule refused, and of how many models."""

    rule: str
    calls: int
    models: int


class PastHaltRow(Wire, kw_only=True):
    """A halt, in force while `liftedAt` is null; of all accounts without `accountId`."""

    account_id: str | UnsetType = UNSET
    cause: str
    reason: str
    halted_by: str
    halted_at: Timestamp
    lifted_by: str | None
    lifted_at: Timestamp | None


class PastAlarmRow(Wire, kw_only=True):
    """A notice of an alarm: it fired, was resolved, or is a single event."""

    at: Timestamp
    since: Timestamp
    state: str
    cause: str
    subject: str
    message: str


class GetActivityOutput(Wire, kw_only=True):
    """Activity since `since`, the start of a day (UTC). `halts` and `alarms` are limited to the latest 200 each.

    `drift` is the table of `trader lab drift` in text, with `venue` or `shadow` before each row.
    """

    since: Timestamp
    costs: list[CostOfDay]
    models: list[ModelActivityRow]
    refusals: list[RefusalsOfRule]
    halts: list[PastHaltRow]
    alarms: list[PastAlarmRow]
    drift: list[list[str]]


class HaltOutput(Wire, kw_only=True):
    """A halt in force. `kept_in` says where it is stored: in `memory`, it is lost if the service is killed.

    `message` says so in plain text. `command_id` is the command that cancels resting orders; absent if the halt was in
    force before.
    """

    account_id: str | UnsetType = UNSET
    kept_in: Keeper
    message: str
    command_id: str | UnsetType = UNSET
