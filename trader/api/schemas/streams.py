"""What the event streams send, where it is not what a procedure answers."""

from trader.api.schemas.common import VariantId, Wire


class StreamRefusal(Wire):
    """The body of an answer that is no stream."""

    error: str


class LiveSnapshot(Wire):
    """The worth of a model now. `net_portfolio = cash + unrealized_pnl`."""

    model_id: str
    model_name: str
    variant: VariantId
    net_portfolio: int | float
    cash: int | float
    unrealized_pnl: int | float
    created_at: str
