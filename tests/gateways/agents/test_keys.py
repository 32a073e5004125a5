"""Keys of a provider: rests, and scrubbing of key values from everything that is kept."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.gateways.agents.keys import KeyRing
from trader.setting_forms import Secret

KEY = "sk-live-4f9a8b7c6d5e"


def ring(*keys: str) -> KeyRing:
    return KeyRing("fake", [Secret(key) for key in keys], lambda: 0.0)


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


def test_no_repr_shows_a_key() -> None:
    keys = ring(KEY)
    assert KEY not in repr(keys)
    assert repr(keys.take()) == "Key(1)"


@pytest.mark.parametrize(
    "said",
    [
        f"<html>{KEY}</html>",
        f'{{"error": "Incorrect API key provided: {KEY}."}}',
        f'{{"error": "Incorrect API key provided: {escaped(KEY)}."}}',
        f'{{"{escaped(KEY)}": [1, {{"a": "{escaped(KEY)}"}}]}}',
        orjson.dumps({"arguments": f'{{"reason": "{escaped(KEY)}"}}'}).decode(),
        orjson.dumps({"a": orjson.dumps({"b": f'{{"reason": "{escaped(KEY)}"}}'}).decode()}).decode(),
    ],
)
def test_no_key_is_left(said: str) -> None:
    found = ring("other-key-0001", KEY).scrub(said.encode()).decode()
    while "\\" in found:
        assert KEY not in found
        found = found.encode().decode("unicode_escape")
    assert KEY not in found
    assert "***" in found


def test_a_burst_of_rate_limits_is_one_rest() -> None:
    now = 0.0
    keys = KeyRing("fake", [Secret(KEY)], lambda: now)
    key = keys.take()
    assert key is not None
    for _ in range(8):  # as many runs ask at once
        keys.rest(key, None)
    assert keys.usage.key_rests == 1
    now = 29.9
    assert keys.take() is None
    now = 30.0
    assert keys.take() is key
    keys.rest(key, None)
    now = 89.9
    assert keys.take() is None, "the next one in a row is twice as long"
    now = 90.0
    assert keys.take() is key


def test_a_rest_can_be_asked_to_last_longer() -> None:
    now = 0.0
    keys = KeyRing("fake", [Secret(KEY)], lambda: now)
    key = keys.take()
    assert key is not None
    keys.rest(key, 10)
    keys.rest(key, 20)
    now = 19.9
    assert keys.take() is None


def test_words_that_are_no_secrets_stay() -> None:
    said = b'{"index": 1, "model": "ollama", "text": "x\\n"}'
    assert ring("1", "ollama", "x").scrub(said) == said


def test_deeply_nested_json_is_unusable() -> None:
    assert ring(KEY).scrub(b"[" * 1000 + b'"\\u0041"' + b"]" * 1000) == b"***"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_an_answer_without_a_key_is_unchanged(value: object) -> None:
    said = orjson.dumps(value)
    assert ring(KEY).scrub(said) is said
