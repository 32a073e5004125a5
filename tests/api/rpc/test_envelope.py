import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.agents.domain.conversation import NESTED_MAX
from trader.api.envelope import BodyStyle, Unwrapped, failure, success, text_issue, unwrap
from trader.core.errors import Issue

PLAIN, ORPC = BodyStyle.PLAIN, BodyStyle.ORPC


def read(unwrapped: Unwrapped) -> tuple[BodyStyle, object]:
    assert unwrapped.issue is None
    return unwrapped.style, json.loads(bytes(unwrapped.input))


@pytest.mark.parametrize("style", [PLAIN, ORPC])
@pytest.mark.parametrize("body", [b"", b"{}", b" \n", b"{ }\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf{}"])
def test_undefined_input_is_the_empty_object_in_the_style_of_the_path(style: BodyStyle, body: bytes) -> None:
    assert read(unwrap(body, style)) == (style, {})


@pytest.mark.parametrize(
    ("path", "body", "style", "value"),
    [
        (PLAIN, b'{"a":1}', PLAIN, {"a": 1}),
        (PLAIN, b'{"json":{"a":1}}', ORPC, {"a": 1}),
        (PLAIN, b'{"json":{"a":1},"meta":[]}', ORPC, {"a": 1}),
        (PLAIN, b'{"json":{"a":1},"b":1}', PLAIN, {"json": {"a": 1}, "b": 1}),
        (PLAIN, b'{"meta":[]}', PLAIN, {"meta": []}),
        (ORPC, b'{"json":{"a":1}}', ORPC, {"a": 1}),
        (ORPC, b' { "meta" : [[1,"a"]], "json" : {"a":1} } ', ORPC, {"a": 1}),
        (ORPC, b'{"a":1}', PLAIN, {"a": 1}),
        (ORPC, b'{"meta":[]}', PLAIN, {"meta": []}),
    ],
)
def test_the_body_overrides_the_path(path: BodyStyle, body: bytes, style: BodyStyle, value: object) -> None:
    assert read(unwrap(body, path)) == (style, value)


@pytest.mark.parametrize("path", [PLAIN, ORPC])
@pytest.mark.parametrize(
    ("body", "issue_path"),
    [
        (b'{"json":null}', ()),
        (b'{"json":[]}', ()),
        (b'{"json":1}', ()),
        (b'{"json":{},"meta":null}', ("meta",)),
        (b'{"json":{},"meta":{}}', ("meta",)),
        (b'{"json":{},"meta":"x"}', ("meta",)),
    ],
)
def test_an_envelope_without_an_object_or_with_an_invalid_meta_is_refused_as_orpc(
    path: BodyStyle, body: bytes, issue_path: tuple[str, ...]
) -> None:
    style, _, issue = unwrap(body, path)
    assert style is ORPC
    assert issue is not None
    assert issue.path == issue_path


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"{",
        b'{"a":}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1} x',
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"json":{"a":1,"a":2}}',
        b'{"a":"\xff"}',
        b"\xff\xfe{\x00}\x00",
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00"}',
        b'{"\\udc00":1}',
        b'{"a":"\\u0000"}',
        b'{"a":["\\u0000"]}',
        b'{"a":"\x00"}',
        b"{'a':1}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"a":"\\x"}',
        b'{"a":01}',
    ],
)
@pytest.mark.parametrize("path", [PLAIN, ORPC])
def test_a_body_that_is_not_a_json_object_is_refused_in_the_style_of_the_path(path: BodyStyle, body: bytes) -> None:
    style, _, issue = unwrap(body, path)
    assert style is path
    assert issue is not None
    assert issue.message


def test_text_that_only_looks_like_an_escape_is_fine() -> None:
    assert text_issue(rb'{"a":"\\u0000 \\ud800 \u00e9 \ud83d\ude00"}') is None


def test_a_duplicate_is_named() -> None:
    assert text_issue(b'{"window":"7d","window":"24h"}') == Issue(("window",), "the field is given twice")


@given(st.binary(max_size=60))
def test_no_body_raises(body: bytes) -> None:
    for path in (PLAIN, ORPC):
        unwrapped = unwrap(body, path)
        if unwrapped.issue is None:
            assert isinstance(json.loads(bytes(unwrapped.input).removeprefix(b"\xef\xbb\xbf")), dict)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_an_envelope_round_trips_its_input(value: object) -> None:
    body = json.dumps({"json": {"value": value}}).encode()
    unwrapped = unwrap(body, PLAIN)
    if unwrapped.issue is None:
        assert read(unwrapped) == (ORPC, {"value": value})
    else:
        assert "\0" in json.dumps(value, ensure_ascii=False) or "\\u" in body.decode()


def test_success_is_bare_or_enveloped() -> None:
    assert success(PLAIN, b"[1]") == b"[1]"
    assert success(ORPC, b"[1]") == b'{"json":[1]}'


def test_failures_have_exactly_the_keys_of_their_style() -> None:
    issue = Issue(("a", 0), "wrong")
    issues = [{"path": ["a", 0], "message": "wrong"}]
    assert json.loads(failure(PLAIN, 400, "C", "m", [issue])) == {"error": "m", "code": "C", "issues": issues}
    assert json.loads(failure(PLAIN, 500, "C", "m")) == {"error": "m", "code": "C"}
    inner = {"defined": False, "code": "C", "status": 400, "message": "m"}
    assert json.loads(failure(ORPC, 400, "C", "m", [issue])) == {"json": inner | {"data": {"issues": issues}}}
    assert json.loads(failure(ORPC, 400, "C", "m")) == {"json": inner}


def test_json_nesting_has_a_limit() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert text_issue(nested(NESTED_MAX)) is None
    issue = text_issue(nested(NESTED_MAX + 1))
    assert issue is not None
    assert str(NESTED_MAX) in issue.message
    assert text_issue(b'{"a":[' + b"[]," * 5_000 + b'"' + b"[" * 5_000 + b'"]}') is None
