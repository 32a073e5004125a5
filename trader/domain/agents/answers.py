"""Answers without a tool call: whether the text is a refusal, or has a tool call that was written as prose."""

import re
from typing import Final

from trader.domain.agents.conversation import ModelAnswer
from trader.domain.agents.tools import TOOLS

REFUSAL_CHARACTERS: Final = 200
"""Characters of a refusal that the reason of a failure quotes."""

_NAMES: Final = "|".join(TOOLS)
_TOOL_CALL: Final = re.compile(
    # the markup in which open models write calls that their server did not parse
    r"<[|｜]?/?(?:tool[_▁]calls?|function[_▁]calls?|tool_use|invoke)\b|<function=|\[TOOL_CALLS\]"
    # a call as in a programming language, its arguments in braces, quoted or named
    rf"|\b(?:{_NAMES})\((?:\s*[{{\"')]|\s*\w+\s*[=:])"
    # the name and then its arguments as JSON, perhaps with a colon, quotes or the fence of a code block between
    rf"|\b(?:{_NAMES})\b(?:[\"'`*:=\s]|json){{0,20}}\{{\s*[\"']"
    # JSON that names the tool
    rf"|[\"'](?:name|function|tool|tool_name|action|recipient_name)[\"']\s*:\s*[\"'](?:functions\.)?(?:{_NAMES})[\"']"
)
_REFUSAL: Final = re.compile(
    r"\W*(?:I(?:['’]m| am) sorry,? (?:but )?|Sorry,? (?:but )?|Unfortunately,? )?I(?:['’]m| am)? "
    r"(?:can(?:no|['’])?t|can not|won['’]t|will not|unable to|not able to|must decline to) "
    r"(?:assist|comply|continue|engage|fulfil|give|help|offer|participate|provide|support)",
    re.IGNORECASE,
)


def contains_tool_call(text: str) -> bool:
    """Return whether a text has a tool call in one of the forms in which models write them as prose."""
    return _TOOL_CALL.search(text) is not None


def refusal_in(answer: ModelAnswer) -> str | None:
    """Return the beginning of a refusal: one that the protocol marks, or a text that begins like one."""
    words = " ".join((answer.text or "").split())[:REFUSAL_CHARACTERS]
    return words if answer.is_refusal or _REFUSAL.match(words) else None
