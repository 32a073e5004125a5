"""Meaning of error answers, as providers and gateways word them."""

from typing import Any, get_args

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.agents.providers.refusals import About, context_limit, refused_field, subject_of, words_of

FIELDS = {
    "temperature", "tool_choice", "max_tokens", "usage", "reasoning_effort", "reasoning", "provider", "top_p", "seed",
    "cache_control", "parallel_tool_calls",
}  # fmt: skip


def encoded(error: Any) -> bytes:
    return orjson.dumps(error) if not isinstance(error, str) else error.encode()


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ("temperature", {"error": {"message": "no", "code": "unsupported_value", "param": "temperature"}}),
        ("temperature", {"error": {"message": "no", "code": None, "param": "temperature"}}),
        (
            "temperature",
            {
                "error": {
                    "message": "Unsupported value: 'temperature' does not support 0.7. Only the default (1) value."
                }
            },
        ),
        ("temperature", {"error": {"message": "`temperature` is deprecated for this model."}}),
        ("temperature", {"error": {"message": "temperature may only be set to 1 when thinking is on: invalid"}}),
        ("temperature", {"error": "This model does not support the temperature you sent"}),
        ("temperature", {"detail": [{"loc": ["body", "temperature"], "msg": "Extra inputs are not permitted"}]}),
        (
            "reasoning_effort",
            {
                "object": "error",
                "message": {
                    "detail": [{"type": "extra_forbidden", "loc": ["body", "reasoning_effort"], "input": "low"}]
                },
            },
        ),
        (
            "reasoning_effort",
            {"error": {"message": "Unrecognized request argument supplied: reasoning_effort", "param": None}},
        ),
        ("reasoning", {"error": {"message": "Unknown parameter: 'reasoning.effort'.", "param": "reasoning.effort"}}),
        ("reasoning", {"error": {"message": "parameter reasoning is not supported by this model"}}),
        ("provider", {"error": {"message": "Unrecognized field `provider`"}}),
        ("seed", {"error": {"message": 'unknown field "seed"'}}),
        ("parallel_tool_calls", "parallel_tool_calls is not available here"),
        (
            "top_p",
            {
                "error": {
                    "message": "Provider returned error",
                    "code": 400,
                    "metadata": {
                        "raw": '{"error":{"message":"`temperature` and `top_p` cannot both be specified: unexpected"}}'
                    },
                }
            },
        ),
        ("cache_control", {"error": {"message": "cache_control: Extra inputs are not permitted"}}),
        (
            "tool_choice",
            {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice; remove tool_choice'}},
        ),
        ("tool_choice", {"error": {"message": "Thinking may not be enabled when tool_choice forces tool use."}}),
        ("tool_choice", {"error": {"message": "Only tool_choice=auto works here"}}),
        ("tool_choice", {"error": {"message": "Tool choice must be auto"}}),
    ],
)
def test_a_field_that_is_refused_by_name_is_found(field: str, error: Any) -> None:
    refused = refused_field(encoded(error), FIELDS)
    assert refused == field or (field == "top_p" and refused == "temperature"), "either of two that exclude each other"


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "Provider returned error", "code": 400, "metadata": {"provider_name": "Lab"}}},
        {"error": {"message": "The provider does not support this model"}},
        {"error": {"message": "Your reasoning is not allowed to refer to usage of this kind"}},
        {"error": {"message": "Invalid 'messages[2].content': unexpected", "param": "messages[2].content"}},
        {"error": {"message": "lab/one is not a valid model ID", "code": 400}},
        {"error": {"message": "no", "code": "unsupported_parameter", "param": "tools"}},
        {
            "detail": [
                {"loc": ["body", "messages", 1], "msg": "invalid", "input": {"say": "'temperature' is unsupported"}}
            ]
        },
        {"error": {"message": "The temperature of this answer is fine"}},
        {},
        [],
        "",
        "<html>",
    ],
)
def test_other_errors_refuse_no_field(error: Any) -> None:
    assert refused_field(encoded(error), FIELDS) is None


@pytest.mark.parametrize(
    ("about", "status", "error"),
    [
        ("rate", 429, {"error": {"message": "Rate limit reached for gpt in organization o on tokens per min"}}),
        ("rate", 429, ""),
        ("credit", 429, {"error": {"type": "insufficient_quota", "message": "see billing"}}),
        ("credit", 402, ""),
        ("credit", 403, {"code": "x", "error": "Your team has used all available credits"}),
        ("key", 401, ""),
        ("key", 400, {"code": "Client specified an invalid argument", "error": "Incorrect API key provided: ***."}),
        ("request", 403, {"choices": [{"message": {}}], "error": {"code": 403}}),
        ("request", 400, {"error": {"message": "max_tokens must be at most 4096"}}),
        ("request", 400, {"error": {"message": "Invalid token in the JSON schema"}}),
        ("request", 404, {"error": {"message": "The model `x` does not exist", "code": "model_not_found"}}),
    ],
)
def test_the_subject_of_a_refusal(about: str, status: int, error: Any) -> None:
    """The faults that `test_fault_table.py` does not cover."""
    assert subject_of(status, encoded(error)) == about


WORDS = st.sampled_from(["temperature", "is not supported", "'seed'", "api key", "invalid", "insufficient_quota", "x"])
ERRORS = st.recursive(
    st.none() | st.integers() | st.text() | st.lists(WORDS).map(" ".join),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["error", "message", "code", "param", "x"]), inner),
)


@given(status=st.integers(400, 499), content=st.binary() | ERRORS.map(msgspec.json.encode))
def test_no_error_is_too_odd_to_be_read(status: int, content: bytes) -> None:
    assert subject_of(status, content) in get_args(About)
    assert refused_field(content, FIELDS) in {*FIELDS, None}
    assert len(words_of(content)) <= 300


def test_words_of_an_error_are_its_message_or_its_body() -> None:
    assert words_of(encoded({"error": {"code": "x", "message": "too\n many"}})) == "too many"
    assert words_of(encoded({"message": "plain"})) == "plain"
    assert words_of(b"<html>\n no") == "<html> no"
    assert words_of(b"") == words_of(b"null") == words_of(b"{}") == ""


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        (8192, {"error": {"message": "This model's maximum context length is 8192 tokens. However, your messages "
                "resulted in 9000 tokens.", "param": "messages", "code": "context_length_exceeded"}}),
        (4096, {"object": "error", "message": "'max_tokens' or 'max_completion_tokens' is too large: 5000. This "
                "model's maximum context length is 4096 tokens and your request has 4000 input tokens", "code": 400}),
        (4096, {"message": "The decoder prompt (length 5000) is longer than the maximum model length of 4096."}),
        (4096, {"error": {"code": 400, "message": "request (5000 tokens) exceeds the available context size (4096 "
                "tokens), try increasing it", "n_prompt_tokens": 5000, "n_ctx": 4096}}),
        (0, {"error": "the request exceeds the available context size. try increasing the context size"}),
        (0, {"error": {"message": "the input length exceeds the context length", "type": "api_error"}}),
        (8000, {"type": "error", "error": {"message": "prompt is too long: 9500 tokens > 8000 maximum"}}),
        (8000, {"error": {"message": "input length and `max_tokens` exceed context limit: 7000 + 2000 > 8000"}}),
        (8192, {"error": {"message": "The input token count (9000) exceeds the maximum number of tokens allowed "
                "(8192)."}}),
        (8192, {"message": "Prompt contains 9000 tokens and 0 draft tokens, too large for model with 8192 maximum "
                "context length", "type": "invalid_request_prompt", "code": "3051"}),
        (4096, {"error": "Trying to keep the first 5000 tokens when context the overflows. However, the model is "
                "loaded with context length of only 4096 tokens, which is not enough."}),
        (4097, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097. Given: 9000"}),
        (0, {"error": {"message": "prompt is too long: maximum context length is 900000"}}),  # which explains nothing
        (None, {"error": {"message": "max_tokens is too large: 100000. This model supports at most 16384 completion "
                "tokens, whereas you provided 100000."}}),
        (None, {"error": {"message": "Unsupported value: 'temperature' does not support 0.7 in this context"}}),
    ],
)  # fmt: skip
def test_a_refusal_tells_the_context_that_was_exceeded(limit: int | None, error: Any) -> None:
    assert context_limit(encoded(error), 10_000) == limit


@given(st.binary(max_size=200))
def test_any_refusal_is_read(content: bytes) -> None:
    assert context_limit(b"context length " + content, 10_000) is not None
