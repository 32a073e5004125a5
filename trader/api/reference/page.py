"""Reference page: the OpenAPI document as one HTML page, whose script searches, copies and calls procedures.

A vendored viewer would need a weaker content security policy: Scalar, Redoc and RapiDoc show nothing unless inline
styles are allowed and Trusted Types are not required. With the document they are five to twenty times as large.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

import mistune

from trader.api.dashboard.assets import FOLDER
from trader.api.json_schema import Schema

Document = Mapping[str, Any]

_MARKDOWN: Final = mistune.create_markdown(escape=True, plugins=["table"])


def to_html(text: str) -> str:
    """Return Markdown as HTML, with all text escaped. Wide tables scroll."""
    return str(_MARKDOWN(text)).replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")


def inline(text: str) -> str:
    """Return inline Markdown as HTML."""
    return str(_MARKDOWN(" ".join(text.split()))).strip().removeprefix("<p>").removesuffix("</p>")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that already are HTML."""
    shown = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{shown}</tbody></table></div>'


def render(document: Document) -> str:
    """Return the page of an OpenAPI document."""
    return _Page(document).html()


class _Page:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._components: Mapping[str, Any] = document["components"]
        self._server: str = document["servers"][0]["url"].rstrip("/")
        self._operations = [
            (path, method, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def html(self) -> str:
        info = self._document["info"]
        sections = "\n".join(self._section(tag) for tag in self._document["tags"])
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])} {escape(info["version"])}: reference</title>
<link rel="icon" href="{FOLDER}/icon.svg">
<link rel="stylesheet" href="{FOLDER}/base.css">
<link rel="stylesheet" href="{FOLDER}/reference.css">
<script src="{FOLDER}/theme.js"></script>
<script type="module" src="{FOLDER}/reference.js"></script>
</head>
<body>
<div class="layout">
<nav aria-label="Contents">
<h1>{escape(info["title"])} <small>{escape(info["version"])}</small></h1>
<input type="search" placeholder="Search, fields too ( / )" aria-label="Search">
<details open><summary>Contents</summary>
<ul><li><a href="/">Dashboard</a></li><li><a href="#introduction">Introduction</a></li>
<li><a href="openapi.json">openapi.json</a></li></ul>
{"".join(self._contents(tag["name"]) for tag in self._document["tags"])}
</details>
</nav>
<main>
<section class="introduction" id="introduction">
<h1>{escape(info["summary"])}</h1>
{to_html(info["description"])}
</section>
{sections}
</main>
</div>
</body>
</html>
"""

    def _of_tag(self, tag: str) -> Iterator[tuple[str, str, Any]]:
        return (operation for operation in self._operations if tag in operation[2]["tags"])

    def _contents(self, tag: str) -> str:
        items = "".join(
            f'<li><a href="#{operation["operationId"]}">{escape(_short(path))}</a></li>'
            for path, _, operation in self._of_tag(tag)
        )
        return f"<div data-group><h2>{escape(tag)}</h2><ul>{items}</ul></div>"

    def _section(self, tag: Mapping[str, str]) -> str:
        articles = "\n".join(self._article(*operation) for operation in self._of_tag(tag["name"]))
        return (
            f"<section data-group><h2>{escape(tag['name'])}</h2><p>{inline(tag['description'])}</p>{articles}</section>"
        )

    def _article(self, path: str, method: str, operation: Mapping[str, Any]) -> str:
        parts = [
            f'<h3><span class="method {method}">{method.upper()}</span>'
            f'<a href="#{operation["operationId"]}">{escape(path)}</a></h3>',
            f"<p>{inline(operation['summary'])}</p>",
            to_html(operation.get("description", "")),
        ]
        if "security" in operation:
            needs = "may need" if {} in operation["security"] else "needs"
            parts.append(f'<p class="note">Changes something: {needs} <code>Authorization: Bearer …</code>.</p>')
        if "requestBody" in operation:
            parts += self._input(path, operation)
        if "x-event-data" in operation:
            parts.append(f"<h4>Data of an event</h4>{self._body(operation['x-event-data'])}")
        answer = operation["responses"]["200"]["content"].get("application/json")
        if answer is not None:
            parts.append(f"<h4>Answer</h4>{self._body(answer['schema'])}")
        parts.append(self._others(operation["responses"]))
        return f'<article class="panel" id="{operation["operationId"]}">{"".join(parts)}</article>'

    def _input(self, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
        media = operation["requestBody"]["content"]["application/json"]
        yield f"<h4>Input</h4>{self._body(media['schema'])}"
        example = json.dumps(media.get("example", {}))
        yield f"<pre><code>curl -s {escape(self._server + path)} -d '{escape(example, quote=False)}'</code></pre>"
        yield f'<p class="note">With the oRPC client: <code>{escape(operation["x-orpc-path"])}</code></p>'
        yield _trial(path, example, changes="security" in operation)

    def _others(self, responses: Mapping[str, Any]) -> str:
        """Return the table of errors."""
        rows = []
        for status, response in responses.items():
            if status == "200":
                continue
            name = response["$ref"].rpartition("/")[2] if "$ref" in response else ""
            shared = self._components["responses"].get(name, {})
            text = response.get("description") or shared["description"]
            rows.append([status, f"<code>{name}</code>" if name else "", inline(" ".join(text.split()))])
        return f"<h4>Errors</h4>{table(['status', 'code', 'meaning'], rows)}" if rows else ""

    def _resolved(self, schema: Schema) -> Schema:
        reference = schema.get("$ref")
        return schema if reference is None else self._components["schemas"][reference.rpartition("/")[2]]

    def _body(self, schema: Schema) -> str:
        """Return a schema in full: its description and its fields."""
        schema = self._resolved(schema)
        if schema.get("type") == "array":
            return f'<p class="note">A list, each:</p>{self._body(schema["items"])}'
        if "anyOf" in schema:
            return "".join(self._kind(self._resolved(option)) for option in schema["anyOf"])
        text = to_html(schema.get("description", ""))
        if not schema.get("properties"):
            nothing = schema.get("additionalProperties") is False
            return text + ('<p class="note">No fields.</p>' if nothing else f'<p class="type">{self._type(schema)}</p>')
        return text + self._fields(schema)

    def _kind(self, schema: Schema) -> str:
        """Return one of several schemas that differ in `type`."""
        name = schema["properties"]["type"]["enum"][0]
        text = inline(schema.get("description", ""))
        return f"<details><summary><code>{escape(name)}</code> {text}</summary>{self._fields(schema)}</details>"

    def _fields(self, schema: Schema) -> str:
        required = schema.get("required", ())
        rows = "".join(self._row(name, field, name in required) for name, field in schema["properties"].items())
        return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'

    def _row(self, name: str, field: Schema, is_required: bool) -> str:
        kind = "name" if is_required else "name optional"
        notes = [inline(str(field["description"]))] if "description" in field else []
        limits = _limits(field)
        if limits and field.get("description", "Default: ").startswith("Default: "):
            notes.append(limits)
        nested = "".join(self._nested(inner) for inner in self._objects(field))
        text = f'<span class="type">{self._type(field)}</span> {"; ".join(notes)}{nested}'
        return f'<tr><td class="{kind}">{escape(name)}</td><td>{text}</td></tr>'

    def _nested(self, schema: Schema) -> str:
        if not schema.get("properties"):
            return ""
        text = inline(" ".join(schema.get("description", "").split()))
        note = f'<p class="note">{text}</p>' if text else ""
        return f"<details><summary>Fields of {escape(schema['title'])}</summary>{note}{self._fields(schema)}</details>"

    def _objects(self, schema: Schema) -> Iterator[Schema]:
        """Yield the objects that a field may hold, at any depth of lists and alternatives."""
        schema = self._resolved(schema)
        if schema.get("type") == "object":
            values = schema.get("additionalProperties")
            if isinstance(values, dict):
                yield from self._objects(values)
            yield schema
        for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
            yield from self._objects(inner)

    def _type(self, schema: Schema) -> str:
        """Return a short description of the type, as HTML."""
        schema = self._resolved(schema)
        if "enum" in schema:
            return " | ".join(escape(json.dumps(value), quote=False) for value in schema["enum"])
        if "anyOf" in schema and "type" not in schema:
            return " | ".join(self._type(option) for option in schema["anyOf"])
        kinds = schema.get("type", "anything")
        return " | ".join(self._kind_name(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _kind_name(self, kind: str, schema: Schema) -> str:
        if kind == "array":
            return f"list of {self._type(schema['items'])}"
        if kind == "object":
            values = schema.get("additionalProperties")
            return (
                f"names to {self._type(values)}" if isinstance(values, dict) else escape(schema.get("title", "object"))
            )
        if kind == "string":
            return "time" if schema.get("format") == "date-time" else "decimal text" if _is_decimal(schema) else "text"
        return {"integer": "whole number", "boolean": "true | false"}.get(kind, kind)


def _trial(path: str, example: str, *, changes: bool) -> str:
    """Return the form in which a procedure is tried out."""
    name, given = escape(path), escape(example)
    token = (
        '<input type="text" autocomplete="off" placeholder="API_TOKEN, if one is set" aria-label="API_TOKEN">'
        if changes
        else ""
    )
    send = "Send; this changes something" if changes else "Send"
    return (
        f'<details class="try" data-path="{name}"><summary>Try it</summary><div>'
        f'<textarea aria-label="Input of {name}" spellcheck="false">{given}</textarea>'
        f'{token}<button class="button" type="button">{send}</button><pre hidden></pre></div></details>'
    )


def _is_decimal(schema: Schema) -> bool:
    return str(schema.get("pattern", "")).startswith("^-?(0|")


def _limits(field: Schema) -> str:
    words = {
        "exclusiveMinimum": "above {}",
        "minimum": "from {}",
        "maximum": "up to {}",
        "minLength": "at least {} characters",
        "maxLength": "at most {} characters",
        "maxItems": "at most {} entries",
    }
    return ", ".join(word.format(field[key]) for key, word in words.items() if key in field)


def _short(path: str) -> str:
    return path.removeprefix("/api/rpc/").removeprefix("/api/events/")
