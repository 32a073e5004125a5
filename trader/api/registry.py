"""Registry of the procedures that the modules of `api/procedures` declare, by name."""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from trader.api.schemas.common import LongOutput
from trader.operations.domain.credentials import Scope

ProcedureHandler = Callable[..., Awaitable[Any]]
Token = Callable[[Any], object | None]
H = TypeVar("H", bound=ProcedureHandler)


@dataclass(frozen=True, slots=True)
class Procedure:
    """One remote procedure: its input, its output, and its function.

    `changes`: it changes something, so API_TOKEN guards it. `operates`: a token needs the scope `operate` for it
    instead of `trade`. `private`: readers of a public service may not call it. `paper_only`: it is refused in live
    trading. `token`: the version of the data behind its responses, if they may be cached (`api/response_cache.py`).
    `long`: its response may be long or costly, so its callers take turns (`api/turns.py`).
    `scope`: it acts on the account of its caller, an external agent, whose key needs this scope and is passed to the
    handler as its third argument.
    """

    name: str
    handler: ProcedureHandler
    input_type: type[Any]
    output_type: Any
    input_decoder: msgspec.json.Decoder[Any]
    output_decoder: msgspec.json.Decoder[Any]
    changes: bool = False
    operates: bool = False
    private: bool = False
    paper_only: bool = False
    long: bool = False
    token: Token | None = None
    scope: Scope | None = None


class Registry:
    """Procedures by dotted name, in the order of their declaration."""

    def __init__(self, procedures: Iterable[tuple[str, Procedure]] = ()) -> None:
        self._procedures = dict(procedures)

    @property
    def procedures(self) -> Mapping[str, Procedure]:
        return self._procedures

    def part(self, names: Iterable[str]) -> "Registry":
        """Return a registry with only these procedures."""
        return Registry((name, self._procedures[name]) for name in names)

    def procedure(self, name: str, **rules: Any) -> Callable[[H], H]:
        """Declare the decorated `async def (context, request: Input) -> Output` as the procedure `domain.verb`.

        The types come from its annotations; `rules` are the fields of `Procedure` that have defaults. A duplicate name
        or a contradiction raises `ValueError` at import.
        """

        def declare(handler: H) -> H:
            if name in self._procedures:
                raise ValueError(f"the procedure {name} is declared twice")
            hints = get_type_hints(handler, include_extras=True)
            output_type = hints.pop("return")
            if get_origin(output_type) is LongOutput:
                (output_type,) = get_args(output_type)
            input_type = list(hints.values())[1]
            decoders = msgspec.json.Decoder(input_type), msgspec.json.Decoder(output_type)
            declared = Procedure(name, handler, input_type, output_type, *decoders, **rules)
            if (declared.changes or declared.private or declared.scope is not None) and declared.token is not None:
                raise ValueError(f"the procedure {name} is guarded, so its responses cannot be cached")
            self._procedures[name] = declared
            return handler

        return declare


REGISTRY: Final = Registry()
procedure: Final = REGISTRY.procedure


def load_procedures() -> None:
    """Import every module of `api/procedures`, which declares its procedures."""
    package = importlib.import_module("trader.api.procedures")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
