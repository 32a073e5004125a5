"""What the event streams send, where it is not what a procedure answers."""

from trader.api.schemas.common import Wire


class Refusal(Wire):
    """The body of an answer that is neither a stream nor a report."""

    error: str
