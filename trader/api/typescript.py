"""TypeScript contract of the service: types of all inputs, outputs and events, for frontends with the oRPC client.

It is made of the OpenAPI document, and that of the service's own structs. It imports types of @orpc/client only.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trader import __version__
from trader.api import rpc
from trader.api.routes import JSON

Schema = Mapping[str, Any]

_IDENTIFIER: Final = re.compile(r"^[A-Za-z_$][A-Za-z0-9_$]*$")
_PLAIN: Final = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}

HEADER: Final = f"""\
// The contract of trader {__version__}, written by the service: GET /api/contract.d.ts, or scripts/make_contract.
//
//   const link = new RPCLink({{ url: 'http://localhost:8081/api/rpc' }})
//   const client: TraderClient = createORPCClient(link)      // client.variants.getVariants()
//   const flat: TraderFlatClient = createORPCClient(link)    // flat['variants.getVariants']()
//
// A field with `?` is absent when it has no value, never null. Timestamps are ISO 8601 in UTC.
import type {{ Client, ClientContext, ORPCError }} from '@orpc/client'
"""

FOOTER: Final = """\
/** The name of every procedure, dotted. */
export type ProcedureName = keyof TraderProcedures

/** What a procedure takes. It may be left out when no field is required. */
export type InputOf<TName extends ProcedureName> = TraderProcedures[TName]['input']

/** What a procedure answers. */
export type OutputOf<TName extends ProcedureName> = TraderProcedures[TName]['output']

type ProcedureClient<TContext extends ClientContext, TName extends ProcedureName> = Client<
  TContext,
  InputOf<TName>,
  OutputOf<TName>,
  Error
>

/** The client with dotted names: `client['trading.getPositions']()`. */
export type TraderFlatClient<TContext extends ClientContext = Record<never, never>> = {
  [TName in ProcedureName]: ProcedureClient<TContext, TName>
}

/** What a failed call throws, unless the service was not reached: `error instanceof ORPCError`. */
export type TraderError = {
  [TCode in ErrorCode]: ORPCError<TCode, TCode extends 'VALIDATION_ERROR' ? { issues: InputIssue[] } : undefined>
}[ErrorCode]
"""


def declarations(document: Mapping[str, Any]) -> str:
    """Return the whole `.d.ts` of an OpenAPI document."""
    components = document["components"]
    parts = [HEADER]
    parts += [_named(name, schema) for name, schema in components["schemas"].items() if name != "Empty"]
    codes = " | ".join(_quoted(code) for code in components["responses"])
    parts.append(f"/** The `code` of an error. */\nexport type ErrorCode = {codes}\n")
    parts.append(_procedures(document["paths"]))
    parts.append(_streams(document["paths"]))
    parts += [FOOTER, _client(document["paths"])]
    return "\n".join(parts)


def _procedures(paths: Mapping[str, Any]) -> str:
    lines = ["/** Input and output of every procedure. */", "export type TraderProcedures = {"]
    for path, methods in paths.items():
        if not path.startswith(rpc.PREFIX):
            continue
        operation = methods["post"]
        media, answer = operation["requestBody"], operation["responses"]["200"]
        accepted = _type(media["content"][JSON]["schema"])
        optional = "" if media["required"] else " | undefined"
        lines += _comment(operation["summary"], operation.get("description"), indent="  ")
        lines.append(f"  {_quoted(path.removeprefix(rpc.PREFIX))}: {{")
        lines.append(f"    input: {accepted}{optional}")
        lines.append(f"    output: {_type(answer['content'][JSON]['schema'])}")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _client(paths: Mapping[str, Any]) -> str:
    """Return the nested client, spelled out so that an editor shows what each procedure does."""
    lines = ["/** The client with a level for each domain: `client.trading.getPositions()`. */"]
    lines.append("export type TraderClient<TContext extends ClientContext = Record<never, never>> = {")
    operations = [methods["post"] for path, methods in paths.items() if path.startswith(rpc.PREFIX)]
    for domain in dict.fromkeys(operation["tags"][0] for operation in operations):
        lines.append(f"  {domain}: {{")
        for operation in operations:
            name = operation["operationId"]
            if operation["tags"] == [domain]:
                lines += _comment(operation["summary"], operation.get("description"), indent="    ")
                lines.append(f"    {name.partition('.')[2]}: ProcedureClient<TContext, {_quoted(name)}>")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _streams(paths: Mapping[str, Any]) -> str:
    lines = ["/** What an event of each stream under `/api/events/` holds as the JSON text of its `data`. */"]
    lines.append("export type TraderStreams = {")
    for path, methods in paths.items():
        if path.startswith("/api/events/"):
            operation = methods["get"]
            lines += _comment(operation["summary"], operation["description"], indent="  ")
            lines.append(f"  {path.removeprefix('/api/events/')}: {_type(operation['x-event-data'])}")
    return "\n".join([*lines, "}", ""])


def _named(name: str, schema: Schema) -> str:
    comment = _comment(schema.get("description"))
    if schema.get("type") == "object":
        return "\n".join([*comment, f"export type {name} = {_object(schema, '')}", ""])
    return "\n".join([*comment, f"export type {name} = {_type(schema)}", ""])


def _comment(*paragraphs: str | None, indent: str = "") -> list[str]:
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph).replace("*/", "* /")
    if not text:
        return []
    if "\n" not in text:
        return [f"{indent}/** {text} */"]
    return [f"{indent}/**", *(f"{indent} * {line}".rstrip() for line in text.splitlines()), f"{indent} */"]


def _object(schema: Schema, indent: str) -> str:
    required = schema.get("required", ())
    lines = ["{"]
    for name, field in schema["properties"].items():
        key = name if _IDENTIFIER.match(name) else _quoted(name)
        lines += _comment(_note(field), indent=f"{indent}  ")
        if name in required:
            lines.append(f"{indent}  {key}: {_type(field)}")
        else:
            lines.append(f"{indent}  {key}?: {_type(field)} | undefined")
    return "\n".join([*lines, f"{indent}}}"])


def _note(field: Schema) -> str:
    notes = [str(field["description"])] if "description" in field else []
    if field.get("format") == "date-time":
        notes.append("ISO 8601")
    elif str(field.get("pattern", "")).startswith("^-?(0|"):
        notes.append("Decimal as text")
    if field.get("default") is not None:
        notes.append(f"Default: {json.dumps(field['default'])}")
    return ". ".join(notes)


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "Record<string, never>" if name == "Empty" else str(name)
    if "enum" in schema:
        return " | ".join(_quoted(value) for value in schema["enum"])
    if "anyOf" in schema and "type" not in schema:
        return " | ".join(dict.fromkeys(_type(option) for option in schema["anyOf"]))
    kinds = schema.get("type")
    if kinds is None:
        return "unknown"
    return " | ".join(_kinds(schema, [kinds] if isinstance(kinds, str) else kinds))


def _kinds(schema: Schema, kinds: list[str]) -> Iterator[str]:
    for kind in kinds:
        if kind == "array":
            item = _type(schema["items"])
            yield f"({item})[]" if " " in item else f"{item}[]"
        elif kind == "object":
            values = schema.get("additionalProperties")
            yield f"Record<string, {_type(values) if isinstance(values, dict) else 'unknown'}>"
        else:
            yield _PLAIN[kind]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
