"""Answers and events of the service against its OpenAPI document, of which `contract.d.ts` keeps the types."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema_rs
import msgspec
import orjson

from trader.api import openapi
from trader.api.registry import REGISTRY, load_procedures
from trader.settings.settings import Settings

Document = dict[str, Any]

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
"""ISO 8601 with milliseconds, in UTC."""


def make_document(**environment: str) -> Document:
    load_procedures()
    document = openapi.make_document(REGISTRY, Settings.load(environment, None, demo=True))
    read: Document = orjson.loads(msgspec.json.encode(document))
    return read


@cache
def wire_document() -> Document:
    """The document of a service with the default settings; not to be changed."""
    return make_document()


def check_output(name: str, answer: Any) -> None:
    """The answer of a procedure is what the document says, without any other field."""
    responses = wire_document()["paths"][f"/api/rpc/{name}"]["post"]["responses"]
    _check(responses["200"]["content"]["application/json"]["schema"], answer)


def check_event(stream: str, data: Any) -> None:
    """The data of an event of a stream is what the document says, without any other field."""
    _check(wire_document()["paths"][f"/api/events/{stream}"]["get"]["x-event-data"], data)


def _check(schema: Mapping[str, Any], value: Any) -> None:
    validator = jsonschema_rs.validator_for(
        {**schema, "components": _strict_components()},
        formats={"date-time": lambda text: _TIME.fullmatch(text) is not None},
        validate_formats=True,
    )
    validator.validate(value)


@cache
def _strict_components() -> Document:
    """The components, to which references resolve. Unlike in the document, unknown fields are refused."""
    components: Document = orjson.loads(orjson.dumps(wire_document()["components"]))
    for component in components["schemas"].values():
        if component.get("type") == "object":
            component.setdefault("additionalProperties", False)
    return components
