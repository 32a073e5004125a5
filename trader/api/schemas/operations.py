"""The operator's halt on the wire."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from trader.api.schemas.common import Input, Wire
from trader.api.schemas.simulator import AccountId
from trader.exchange.domain.halts import REASON_MAX


class HaltInput(Input, kw_only=True):
    """`account_id` is one account; absent: all of them. `by` is who halts, for the record.

    `place` is the `host:port/name` of the database, or the folder of the embedded one, of the service that the caller
    means: a service with other data refuses the call.
    """

    account_id: AccountId | None = None
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_MAX)]
    by: Annotated[str, Meta(min_length=1, max_length=200)] = "an operator"
    place: str | None = None


class HaltOutput(Wire, kw_only=True):
    """A halt in force. `kept_in` says where it is stored: in `memory`, it is lost if the service is killed.

    `message` says so in plain text. `command_id` is the command that cancels resting orders; absent if the halt was in
    force before.
    """

    account_id: str | UnsetType = UNSET
    kept_in: Literal["database", "file", "memory"]
    message: str
    command_id: str | UnsetType = UNSET
