"""Calls as models and their servers write them: calls that a server left in the text, and arguments in other forms.

A call in the text is read if its form is one of `FORMS` and complete, and nothing but such calls ends the text. Any
other text that looks like a call is only noticed, so that the model can be told.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from trader.agents.domain.conversation import ModelAnswer, ToolRequest
from trader.agents.domain.tools import ARGUMENTS_MAX, TOOLS, Decision, Holding


class CallForm(NamedTuple):
    """A form of calls in text: `opening`, then JSON or, with `parameter`, tagged parameters, then `closing`.

    Without a name in the opening, the JSON names the tool of each call.
    """

    name: str
    opening: re.Pattern[str]
    closing: re.Pattern[str]
    parameter: re.Pattern[str] | None


_N: Final = r"(?:functions?\.)?(?P<name>[A-Za-z]\w*)"
_NS: Final = r"(?:\w+:|[｜|]DSML[｜|])?"
FORMS: Final = tuple(
    CallForm(
        name, re.compile(opening), re.compile(rf"\s*{closing}"), re.compile(rf"(?s)[\s,]*(?:{tag})") if tag else None
    )
    for name, opening, closing, tag in (
        ("Kimi", rf"<\|tool_call_begin\|>\s*{_N}(?::\d+)?\s*<\|tool_call_argument_begin\|>",
         r"<\|tool_call_end\|>", ""),
        ("DeepSeek", rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_N}(?:<｜tool▁sep｜>|\s*```json)",
         r"(?:```)?\s*<｜tool▁call▁end｜>", ""),
        ("Harmony", rf"(?:<\|channel\|>\w+\s+)?to=functions\.{_N}\s*(?:<\|channel\|>\w+\s*)?(?:<\|constrain\|>\s*)?"
         r"(?:json|code)?\s*(?:<\|message\|>)?", r"(?:<\|call\|>)?", ""),
        ("Mistral", rf"(?:\[TOOL_CALLS\]\s*)?(?<![\w.]){_N}(?:\[CALL_ID\]\w+)?\[ARGS\]", "", ""),
        ("named JSON", r"\[TOOL_CALLS\](?=\s*[\[{])|<\|python_tag\|>(?=\s*\{)", "", ""),
        ("Hermes", r"<tool_call>(?=\s*\{)", "</tool_call>", ""),
        ("Llama", rf"<function={_N}>(?=\s*\{{)", "</function>", ""),
        ("Qwen", rf"<function={_N}>", "</function>", r"<parameter=(?P<key>\w+)>\n?(?P<value>.*?)\n?</parameter>"),
        ("GLM", rf"<tool_call>\s*{_N}", "</tool_call>",
         r"<arg_key>\s*(?P<key>\w+)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ("invoke", rf'<{_NS}invoke name="(?P<name>\w+)"\s*>', rf"</{_NS}invoke>",
         rf'<{_NS}parameter name="(?P<key>\w+)"[^<>]*>(?P<value>.*?)</{_NS}parameter>'),
        ("FunctionGemma", rf"<start_function_call>\s*call:{_N}\{{", r"\}\s*<end_function_call>",
         r"(?P<key>\w+):(?P<escaped><escape>)?(?P<value>(?(escaped).*?|[^,{}<>]*))(?(escaped)<escape>)"),
    )
)  # fmt: skip
"""The forms in which servers that do not parse a model's calls leave them in its text."""

_TOKEN: Final = re.compile(r"<[|｜][^<>\s]{1,60}[|｜]>|\[/?TOOL_CALLS\]|</s>|</?[^<>\s]*?(?:function|tool)_calls?>")
"""A special token or an element around calls, which has no meaning without them."""

_THOUGHT: Final = re.compile(
    r"\A(?:(?!<think(?:ing)?>).)*</think(?:ing)?>|<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL
)
"""What a model thinks, which is never a call."""

CALLS_READ_MAX: Final = 16
"""Calls are read from a text with at most so many."""

_NAMES: Final = "|".join(TOOLS)
_DISTINCT: Final = "|".join(re.sub("([A-Z])", r"[_ -]?\1", name) for name in TOOLS if not name.islower())
"""The names of the tools that are not words of prose, in any case."""

_JOINED: Final = _DISTINCT.replace("[_ -]?", "_?")

_FIELDS: Final = "|".join({field for struct in TOOLS.values() for field in struct.__struct_encode_fields__})
_CALL_LIKE: Final = re.compile(
    # the markup of models for calls: special tokens, elements about calls or tools, or named as one
    r"<[|｜][^<>\s]{1,60}[|｜]>|<[^<>\s]*(?:tool|function|invoke|call)[^<>]*>|\[/?(?:TOOL_CALLS?|ARGS|tool_calls?)\]"
    rf"|<[^<>\s]{{0,30}}\b(?:{_NAMES})\b"
    # a call as in a programming language, with arguments in braces, quoted or named
    rf"|\b(?:{_NAMES})\((?:\s*[{{\"')]|\s*\w+\s*[=:])"
    # the name followed by its arguments as JSON, possibly after a colon, quotes or a code fence
    rf"|(?i:\b(?:{_NAMES})\b(?:[\"'`*:=\s]|json){{0,20}}\{{\s*[\"'])"
    # JSON containing the name of the tool
    rf"|[\"']\w{{0,20}}(?:name|function|tool|action|call)\w{{0,20}}[\"']\s*:\s*[\"'](?:functions\.)?(?:{_NAMES})[\"']"
    # a name that is no word of prose, in any case: after a mark of calls, or before named or bracketed arguments
    rf"|(?i:\b(?:tool|action|function|call|invoke|command)\w*\s*[:=]\s*\W{{0,3}}(?:{_DISTINCT})\b)"
    rf"|(?i:(?:^|[\n/@!$>#])\s{{0,20}}(?:{_DISTINCT})\b\s*(?:$|\n|[\[({{<|:]|\w+\s*[=:]))"
    # such a name in one word, followed by a field or a market
    rf"|(?i:\b(?:{_JOINED})\b(?:with|[^\w.]){{1,8}}(?:{_FIELDS}|arg\w*|param\w*|input)\b)"
    rf"|(?i:\b(?:{_JOINED}))[^\w.]{{1,4}}[A-Z]{{2,10}}\b"
    rf"|(?i:\b(?:{_DISTINCT})(?:\([^\s)]|[\s\W]{{1,3}}--\w|\b[^.!?{{\[]{{0,80}}[{{\[]\s*[\"'\w]+\s*[:=]))"
)
_FIELD_WRITTEN: Final = re.compile(rf"[\"']({_FIELDS})[\"']\s*:")


def contains_tool_call(text: str) -> bool:
    """Return whether a text, apart from thoughts, looks like a tool call in whatever form."""
    said = _THOUGHT.sub("", text)
    if _CALL_LIKE.search(said) or len(set(_FIELD_WRITTEN.findall(said))) > 1:
        return True
    bare = re.sub(r"```\w*", "", said).strip()
    return bare.startswith(("{", "[")) and bare.endswith(("}", "]")) and _FIELD_WRITTEN.search(bare) is not None


def with_calls_of_text(answer: ModelAnswer, number: int, *, is_json: bool = False) -> ModelAnswer:
    """Return the answer to step `number` with the complete calls of its text, if it has no others and ends in them.

    Beside other calls, those of further tools are counted as left out: nobody knows in which order they were meant.
    `is_json`: the model was asked for its calls as JSON.
    """
    if answer.cut_by is not None or not answer.text or len(answer.text) > 2 * ARGUMENTS_MAX:
        return answer
    said = _THOUGHT.sub("", answer.text)
    found = (_json_calls(said) if is_json else []) or _formed_calls(said)
    if answer.calls:
        left_out = {name for _, name, _ in found} & TOOLS.keys() - {call.name for call in answer.calls}
        return msgspec.structs.replace(answer, calls_left_out=answer.calls_left_out + len(left_out))
    if any(name not in TOOLS for _, name, _ in found):
        return answer
    calls = tuple(
        ToolRequest(f"text_{number}_{place}", name, arguments, form)
        for place, (form, name, arguments) in enumerate(found, 1)
    )
    return msgspec.structs.replace(answer, calls=calls)


def _json_calls(text: str) -> list[tuple[str, str, str]]:
    """Return form, name and arguments of each call in an answer that is JSON; none if it is anything else."""
    try:
        given = json.loads(re.sub(r"\A\s*```(?:json)?|```\s*\Z", "", text))
    except (ValueError, RecursionError):
        return []
    given = given["calls"] if isinstance(given, dict) and "calls" in given else given
    calls = given if isinstance(given, list) else [given]
    return _calls_in("JSON", calls[: CALLS_READ_MAX + 1]) or []


def _formed_calls(text: str) -> list[tuple[str, str, str]]:
    """Return form, name and arguments of each call; none unless every call is complete and they end the text."""
    found: list[tuple[str, str, str]] = []
    position, outside = 0, ""
    while starts := [match.start() for form in FORMS if (match := form.opening.search(text, position))]:
        start = min(starts)
        read = next((read for form in FORMS if (read := _read(form, text, start)) is not None), None)
        outside += text[position:start]
        is_quoted = _TOKEN.sub("", outside).rstrip().endswith("`")
        if read is None or is_quoted or len(found) > CALLS_READ_MAX:
            return []
        found, position = found + read[0], read[1]
    before, after = (_TOKEN.sub("", part) for part in (outside, text[position:]))
    is_alone = not after.strip() and not contains_tool_call(before) and before.count("```") % 2 == 0
    return found if is_alone else []


def _read(form: CallForm, text: str, start: int) -> tuple[list[tuple[str, str, str]], int] | None:
    """Return the calls of this form at `start`, and where they end; None if there is no complete one."""
    opening = form.opening.match(text, start)
    if opening is None:
        return None
    end, named = opening.end(), opening.groupdict().get("name")
    given: Any = {}
    if form.parameter is None:
        try:
            given, end = json.JSONDecoder().raw_decode(text, end + len(text[end:]) - len(text[end:].lstrip()))
        except (ValueError, RecursionError):
            return None
    else:
        while (part := form.parameter.match(text, end)) is not None and part["key"] not in given:
            given[part["key"]], end = part["value"], part.end()
    closing = form.closing.match(text, end)
    if closing is None:
        return None
    calls = given if isinstance(given, list) else [given if named is None else {"name": named, "arguments": given}]
    read = _calls_in(form.name, calls)
    return None if read is None else (read, closing.end())


def _calls_in(form: str, calls: Sequence[Any]) -> list[tuple[str, str, str]] | None:
    """Return form, name and arguments of each of these calls; None if one of them is not complete."""
    read = []
    for call in (each if isinstance(each, dict) else {} for each in calls):
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return None
        read.append((form, name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return read


# Arguments in other forms

_SIDES: Final = {"BUY": "LONG", "SELL": "SHORT"}


def readable(request: ToolRequest) -> ToolRequest:
    """Return a model's call with its arguments in the form of the tool's fields, where their meaning is certain.

    `sent` keeps what the model wrote. Values without a certain meaning stay, and are refused when the call is decoded.
    """
    struct = TOOLS.get(request.name)
    if struct is None or len(request.arguments) > ARGUMENTS_MAX:
        return request
    try:
        first = given = msgspec.json.decode(request.arguments)
        for _ in range(2):
            given = msgspec.json.decode(given) if isinstance(given, str) else given
        read = dict(_read_fields(struct, given)) if isinstance(given, dict) else given
        if read == first:
            return request
        arguments = msgspec.json.encode(read).decode()
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeEncodeError):
        return request
    return msgspec.structs.replace(request, arguments=arguments, sent=request.arguments)


def _read_fields(struct: type[Decision], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    for name, value in given.items():
        field = fields.get(name)
        if field is None:
            if struct is not Holding:
                yield name, value
            continue
        read = _read_value(field.type, value)
        if not field.required and _is_absent(field.type, value):
            continue
        is_share = name == "confidence" and isinstance(read, float) and 0 < read < 1
        yield name, round(read * 100, 9) if is_share else read


def _is_absent(form: Any, value: Any) -> bool:
    """Return whether a value of an optional field stands for none: no text, `null` as text, or a 0 that it refuses."""
    written = value.strip().lower() if isinstance(value, str) else value
    if written in ("", "null", "none"):
        return True
    with suppress(TypeError, ValueError):
        return not isinstance(value, bool) and float(written) == 0 and not _fits(form, value)
    return False


def _read_value(form: Any, value: Any) -> Any:
    """Return a text as the number, choice or time that it is, if the field takes that; else the value."""
    if not isinstance(value, str) or _fits(form, value):
        return value
    written = value.strip()
    choices: list[Any] = [written, written.upper(), written.lower(), _SIDES.get(written.upper())]
    with suppress(msgspec.DecodeError):
        number = msgspec.json.decode(written)
        choices += [number] if not isinstance(number, str | bool) else []
    with suppress(ValueError):
        moment = datetime.fromisoformat(written)  # the fields ask for UTC
        choices += [(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()] if len(written) > 10 else []
    return next((choice for choice in choices if choice is not None and _fits(form, choice)), value)


def _fits(form: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError:
        return False
    return True
