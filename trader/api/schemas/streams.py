"""What the event streams send, where it is not what a procedure answers."""

from decimal import Decimal

from trader.api.schemas.common import UNSET, UnsetType, VariantId, Wire, trimmed
from trader.api.schemas.positions import Markets, PositionView, has_marks, positions_of_account
from trader.domain.account import Account, Marks, available_cash, unrealized
from trader.domain.records import Model


class Refusal(Wire):
    """The body of an answer that is neither a stream nor a report."""

    error: str


class PositionEventData(Wire, kw_only=True):
    """What one model holds. The two sums are null while a price they need is not known yet, never zero.

    An account that belongs to no model shows its id as modelId and modelName, and no variant.
    """

    model_id: str
    model_name: str
    model_variant: VariantId | UnsetType = UNSET
    positions: list[PositionView]
    total_unrealized_pnl: Decimal | None
    available_cash: Decimal | None

    @classmethod
    def of(cls, account: Account, marks: Marks, markets: Markets, model: Model | None) -> "PositionEventData":
        is_valued = has_marks(account, marks)
        return cls(
            model_id=account.id,
            model_name=account.id if model is None else model.name,
            model_variant=UNSET if model is None else model.variant,
            positions=positions_of_account(account, marks, markets, model),
            total_unrealized_pnl=trimmed(unrealized(account, marks)) if is_valued else None,
            available_cash=trimmed(available_cash(account, marks)) if is_valued else None,
        )
