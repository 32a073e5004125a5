"""Keys of a provider: cooldowns, and scrubbing of key values from everything that is stored."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.chat_server import MODEL, Timer

from trader.agents.domain.models import Model
from trader.agents.providers.keys import (
    KEY_REFUSED,
    MODEL_REFUSED,
    OUT_OF_CREDIT,
    OVERLOADED,
    RATE_LIMITED,
    UNAFFORDABLE,
    Key,
    KeyRefusal,
    KeyRing,
)
from trader.settings.forms import Secret

KEY = "sk-live-4f9a8b7c6d5e"
TWO = replace(MODEL, id="n", router_model_name="lab/two")


def ring(*keys: str, timer: Timer | None = None) -> KeyRing:
    return KeyRing("fake", [Secret(key) for key in keys], timer or Timer())


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


def test_no_repr_shows_a_key() -> None:
    keys = ring(KEY)
    assert KEY not in repr(keys)
    assert repr(keys.take(MODEL)) == "Key(1)"


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
def test_no_key_remains_after_scrubbing(said: str) -> None:
    scrubbed = ring("other-key-0001", KEY).scrub(said.encode()).decode()
    while "\\" in scrubbed:
        assert KEY not in scrubbed
        scrubbed = scrubbed.encode().decode("unicode_escape")
    assert KEY not in scrubbed
    assert "***" in scrubbed


def refuse(
    keys: KeyRing, model: Model, refusal: KeyRefusal, retry_after_s: float | None = None, *, times: int = 1
) -> Key:
    """Take a key for a model, and refuse its requests."""
    key = keys.take(model)
    assert key is not None
    for _ in range(times):
        keys.cool_down(key, model, refusal, "why", retry_after_s)
    return key


def test_a_burst_of_rate_limits_is_one_cooldown(timer: Timer) -> None:
    keys = ring(KEY, timer=timer)
    key = refuse(keys, MODEL, RATE_LIMITED, times=8)  # as when many runs ask concurrently
    assert keys.usage.cooldowns == {"rate_limited": 1}
    timer.now += 29.75
    assert keys.take(MODEL) is None
    timer.now += 0.25
    assert keys.take(MODEL) is key


def test_a_later_refusal_can_extend_a_cooldown(timer: Timer) -> None:
    keys = ring(KEY, timer=timer)
    key = refuse(keys, MODEL, RATE_LIMITED, 10)
    keys.cool_down(key, MODEL, RATE_LIMITED, "429", 20)
    timer.now += 19.75
    assert keys.take(MODEL) is None
    assert keys.free_in_s(MODEL) == 0.25


@pytest.mark.parametrize("refusal", [RATE_LIMITED, MODEL_REFUSED, OVERLOADED])
def test_a_refusal_about_a_model_leaves_the_key_usable_for_others(refusal: KeyRefusal) -> None:
    keys = ring(KEY)
    key = refuse(keys, MODEL, refusal, 10)
    assert keys.take(MODEL) is None
    assert keys.take(TWO) is key
    assert (keys.free_in_s(MODEL), keys.free_in_s(TWO)) == (10, 0)


def test_a_refusal_about_one_models_requests_leaves_the_key_usable_for_its_namesakes() -> None:
    keys = ring(KEY)
    refuse(keys, MODEL, UNAFFORDABLE, 10)
    assert [keys.free_in_s(model) for model in (MODEL, replace(MODEL, id="n"), TWO)] == [10, 0, 0]


@pytest.mark.parametrize("refusal", [OUT_OF_CREDIT, KEY_REFUSED])
def test_a_model_that_a_key_refused_retries_after_its_own_cooldown(timer: Timer, refusal: KeyRefusal) -> None:
    keys = ring(KEY, timer=timer)
    for rest_s in (600, 1200, 2400, 3600, 3600):
        key = keys.take(TWO)
        assert key is not None, "another model is never in cooldown for it"
        keys.accepted(key, TWO)
        assert refuse(keys, MODEL, refusal, 5) is key, "it is tried again"
        assert keys.take(MODEL) is None
        assert keys.free_in_s(MODEL) == rest_s, "whatever a Retry-After says"
        assert (keys.in_cooldown(), keys.outage()) == ({}, None), "it answers another model"
        timer.now += rest_s
    key = keys.take(MODEL)
    assert key is not None
    keys.accepted(key, MODEL)
    keys.cool_down(key, MODEL, refusal, "402")
    timer.now += 600
    assert keys.take(MODEL) is key, "an answer resets it"


@pytest.mark.parametrize("refusal", [OUT_OF_CREDIT, KEY_REFUSED])
def test_a_refusal_counts_for_the_whole_key_until_any_model_is_answered(refusal: KeyRefusal) -> None:
    keys = ring(KEY)
    key = refuse(keys, MODEL, refusal)
    assert keys.in_cooldown() == {"key 1": f"{refusal.words} (why)"}
    assert keys.outage() == f"key 1 {refusal.words} (why)"
    assert keys.take(TWO) is key
    keys.accepted(key, TWO)
    assert (keys.in_cooldown(), keys.outage()) == ({}, None)
    assert keys.free_in_s(MODEL) == 600, "the model that was refused waits"


@pytest.mark.parametrize("refusal", [OUT_OF_CREDIT, KEY_REFUSED])
def test_an_answer_to_a_refused_model_ends_the_cooldowns_of_the_others(timer: Timer, refusal: KeyRefusal) -> None:
    keys = ring(KEY, timer=timer)
    key = refuse(keys, MODEL, refusal)
    timer.now += 300
    keys.cool_down(key, TWO, refusal, "why")
    timer.now += 300
    assert keys.take(MODEL) is key
    keys.accepted(key, MODEL)
    assert keys.free_in_s(TWO) == 0


def test_an_account_that_answers_nobody_is_probed_once_a_minute(timer: Timer) -> None:
    keys = ring(KEY, timer=timer)
    for model in (MODEL, TWO):
        refuse(keys, model, OUT_OF_CREDIT)
    for _ in range(3):
        timer.now += 59.75
        assert keys.take(TWO) is None
        timer.now += 0.25
        refuse(keys, TWO, OUT_OF_CREDIT)
        assert keys.take(MODEL) is None, "one probe at a time"


def test_a_cooldown_that_began_during_a_request_stays() -> None:
    keys = ring(KEY)
    keys.accepted(refuse(keys, MODEL, RATE_LIMITED, 120), MODEL)
    assert keys.free_in_s(MODEL) == 120


def test_the_reason_states_the_state_of_each_key() -> None:
    keys = ring(KEY, "other-key-0001", "other-key-0002")
    for refusal in (RATE_LIMITED, OUT_OF_CREDIT, KEY_REFUSED):
        refuse(keys, MODEL, refusal)
    assert keys.unavailable_reason(MODEL) == (
        "fake cannot be asked for lab/one now: key 1 is rate-limited (why) and is in cooldown for 30 s; "
        "key 2 is out of credit (why) and is in cooldown for 600 s; "
        "key 3 was refused (why) and is in cooldown for 600 s"
    )
    assert keys.outage() is None, "key 1 is in cooldown for one model only"


def test_words_that_are_not_secrets_stay() -> None:
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
