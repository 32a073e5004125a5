"""Calls of commands within a test: their output and exit code."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Awaitable[Said]]
