"""The Model Context Protocol at `POST /mcp`: the procedures of `agent` as tools, over stateless Streamable HTTP.

Each request gets its own response, one JSON object. In the revision 2026-07-28 it names its revision, its method and
its tool in headers and in `_meta`; a client of an earlier revision begins with `initialize`, which leaves no state. A
tool works like its procedure: the same input, key, guard and errors. A refusal is a result with `isError`, so that a
language model reads it; a missing or wrong key is 401.
"""

import base64
import binascii
import inspect
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

from trader import __version__
from trader.api.envelope import BodyStyle
from trader.api.json_schema import REFERENCE, components_of
from trader.api.registry import Procedure
from trader.api.requests import INFO, read_body
from trader.api.routes import JSON, answer_expectation
from trader.api.rpc import Dispatcher, Target

PATH: Final = "/mcp"
DOMAIN: Final = "agent."

MODERN: Final = "2026-07-28"
EARLIER: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Revisions whose clients begin with `initialize`, newest first."""

VERSION_HEADER: Final = "MCP-Protocol-Version"
METHOD_HEADER: Final = "Mcp-Method"
NAME_HEADER: Final = "Mcp-Name"
_META: Final = "io.modelcontextprotocol/"

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022

TOOLS_TTL_MS: Final = 3_600_000
"""How long a client may cache the list of tools, which never changes within a build."""

INSTRUCTIONS: Final = (
    "Trade crypto perpetuals on one paper account. Call getView, decide from its prompt and view before its deadline "
    "with placeOrder, closePosition and setExitPlan, then call hold. GET /skill.md describes everything."
)
NO_KEY: Final = (
    "This client sent no key, without which every tool is refused: `trader keys add` makes one, and the header "
    "`Authorization: Bearer KEY` sends it. "
)
SERVER: Final = {"name": "trader", "version": __version__}


class _Call(msgspec.Struct):
    """A JSON-RPC request or, without an id, a notification."""

    jsonrpc: str
    method: str
    id: str | int | msgspec.UnsetType | None = msgspec.UNSET
    params: dict[str, Any] = {}


class _Failure(Exception):
    """A JSON-RPC error of the protocol itself."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class McpServer:
    """Answers the requests of MCP clients with the procedures of a dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        declared = {name: each for name, each in dispatcher.procedures.items() if name.startswith(DOMAIN)}
        self._targets = {name.removeprefix(DOMAIN): Target(each, BodyStyle.PLAIN) for name, each in declared.items()}
        self._tools = [_tool(name, target.procedure) for name, target in self._targets.items()]

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the path with and without a trailing slash; any other method there returns 405."""
        return [web.post(path, self._handle, expect_handler=answer_expectation) for path in (PATH, f"{PATH}/")]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        accepted = request.headers.get(hdrs.ACCEPT, "*/*")
        if not any(kind in accepted for kind in (JSON, "application/*", "*/*")):
            return web.json_response({"error": f"only {JSON} is sent here"}, status=HTTPStatus.NOT_ACCEPTABLE)
        body = await read_body(request)
        call_id: Any = None
        is_modern = request.headers.get(VERSION_HEADER, EARLIER[0]) not in EARLIER
        try:
            call = _decoded(body)
            call_id = None if call.id is msgspec.UNSET else call.id
            if call.id is msgspec.UNSET:
                return web.Response(status=HTTPStatus.ACCEPTED)
            is_modern = is_modern or f"{_META}protocolVersion" in _meta_of(call)
            if is_modern:
                _check_envelope(request.headers, call)
            result = await self._result(request, call, is_modern=is_modern)
        except _Failure as failure:
            return _failed(call_id, failure, is_modern=is_modern)
        if isinstance(result, web.StreamResponse):
            return result
        if is_modern:
            result = {"resultType": "complete", **result, "_meta": {f"{_META}serverInfo": SERVER}}
        return web.json_response(body=msgspec.json.encode({"jsonrpc": "2.0", "id": call_id, "result": result}))

    async def _result(
        self, request: web.Request, call: _Call, *, is_modern: bool
    ) -> dict[str, Any] | web.StreamResponse:
        kept = {"ttlMs": TOOLS_TTL_MS, "cacheScope": "public"} if is_modern else {}
        match call.method:
            case "tools/call":
                return await self._called(request, call.params)
            case "tools/list":
                return {"tools": self._tools, **kept}
            case "server/discover" if is_modern:
                return {
                    "supportedVersions": [MODERN],
                    "capabilities": {"tools": {}},
                    "instructions": INSTRUCTIONS,
                    **kept,
                }
            case "initialize" if not is_modern:
                asked = call.params.get("protocolVersion")
                return {
                    "protocolVersion": asked if asked in EARLIER else EARLIER[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": SERVER,
                    "instructions": INSTRUCTIONS if hdrs.AUTHORIZATION in request.headers else NO_KEY + INSTRUCTIONS,
                }
            case "ping" if not is_modern:
                return {}
        raise _Failure(METHOD_NOT_FOUND, f"there is no method {call.method[:100]!r}")

    async def _called(self, request: web.Request, params: Mapping[str, Any]) -> dict[str, Any] | web.StreamResponse:
        """Call a tool and return its response as the result, as text and as JSON."""
        name, arguments = params.get("name"), params.get("arguments", {})
        target = self._targets.get(name) if isinstance(name, str) else None
        if target is None:
            raise _Failure(
                INVALID_PARAMS, f"unknown tool {str(name)[:100]!r}; expected one of {', '.join(self._targets)}"
            )
        body = msgspec.json.encode({} if arguments is None else arguments)
        answer = await self._dispatcher.call(target, body, request[INFO].caller, request[INFO].id)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            return web.Response(status=answer.status, body=answer.body, content_type=JSON, headers=answer.headers)
        payload = msgspec.json.decode(answer.body)
        is_error = answer.status != HTTPStatus.OK or payload.get("result") in ("rejected", "failed")
        content = [{"type": "text", "text": answer.body.decode()}]
        return {"content": content, "structuredContent": payload, "isError": is_error}


def _tool(name: str, declared: Procedure) -> dict[str, Any]:
    """Return the MCP description of a procedure as a tool. Results with `isError` need not match its output schema."""
    description, _, _ = (inspect.getdoc(declared.handler) or name).partition("\n\n:raises")
    return {
        "name": name,
        "description": " ".join(description.split()),
        "inputSchema": _schema_of(declared.input_type),
        "outputSchema": _schema_of(declared.output_type),
        "annotations": {"readOnlyHint": declared.scope == "read", "openWorldHint": False},
    }


def _schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a struct, complete in itself."""
    (schema,), components = components_of([kind])
    text = msgspec.json.encode({**components.pop(schema["$ref"].removeprefix(REFERENCE)), "$defs": components})
    whole: dict[str, Any] = msgspec.json.decode(text.replace(REFERENCE.encode(), b"#/$defs/"))
    return whole


def _decoded(body: bytes) -> _Call:
    try:
        call = msgspec.json.decode(body, type=_Call)
    except msgspec.ValidationError as error:
        raise _Failure(INVALID_REQUEST, f"not a JSON-RPC request: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _Failure(PARSE_ERROR, "the body is not JSON") from None
    if call.jsonrpc != "2.0":
        raise _Failure(INVALID_REQUEST, 'not a JSON-RPC request: "jsonrpc" must be "2.0"')
    return call


def _meta_of(call: _Call) -> Mapping[str, Any]:
    meta = call.params.get("_meta")
    return meta if isinstance(meta, dict) else {}


def _check_envelope(headers: Mapping[str, str], call: _Call) -> None:
    """Check the declarations of a request of the revision 2026-07-28, in `_meta` and in its headers."""
    meta = _meta_of(call)
    for name in ("protocolVersion", "clientCapabilities"):
        if f"{_META}{name}" not in meta:
            raise _Failure(INVALID_PARAMS, f"params._meta has no {_META}{name}")
    version = meta[f"{_META}protocolVersion"]
    pairs = [(VERSION_HEADER, version), (METHOD_HEADER, call.method)]
    if call.method == "tools/call":
        pairs.append((NAME_HEADER, call.params.get("name")))
    for name, value in pairs:
        if value is not None and _header_value(headers.get(name)) != value:
            raise _Failure(HEADER_MISMATCH, f"the header {name} does not match the body")
    if version != MODERN:
        data = {"supported": [MODERN], "requested": version}
        raise _Failure(UNSUPPORTED_VERSION, "Unsupported protocol version", data)


def _header_value(text: str | None) -> str | None:
    """Return the value of a header, which may be UTF-8 in base64: `=?base64?…?=`."""
    if text is None or not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    try:
        return base64.b64decode(text[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _failed(call_id: Any, failure: _Failure, *, is_modern: bool) -> web.Response:
    status = HTTPStatus.OK
    if is_modern or failure.code in (PARSE_ERROR, INVALID_REQUEST):
        status = HTTPStatus.NOT_FOUND if failure.code == METHOD_NOT_FOUND else HTTPStatus.BAD_REQUEST
    error = {"code": failure.code, "message": str(failure)}
    if failure.data is not None:
        error["data"] = failure.data
    return web.json_response({"jsonrpc": "2.0", "id": call_id, "error": error}, status=status)
