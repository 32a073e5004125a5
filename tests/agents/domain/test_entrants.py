"""Entrants: the fingerprint covers everything that affects how a model trades, and nothing else."""

import hashlib
import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.records import make_model
from support.scripted import make_settings

from trader.agents.domain.entrants import EntrantRecord, fingerprint
from trader.agents.domain.models import Declared, Model, ModelConfiguration
from trader.agents.entrants import configuration_of
from trader.core.canonical_json import canonical_json
from trader.core.variant_id import VariantId

MODEL = replace(make_model("one"), provider="openai", router_model_name="lab/zero")
SETTINGS = make_settings(OPENAI_API_KEY="sk-x")


def _configuration(model: Model = MODEL, left_out: Collection[str] = (), **settings: str) -> str:
    given = make_settings(OPENAI_API_KEY="sk-x", **settings) if settings else SETTINGS
    return configuration_of(model, given, left_out)


def configured(**fields: Any) -> Model:
    return replace(MODEL, configuration=ModelConfiguration(**fields))


def test_the_fingerprint_is_the_sha_256_of_canonical_json() -> None:
    whole = json.loads(_configuration()) | {"answeredBy": "lab/one"}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert fingerprint(_configuration(), "lab/one") == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        _configuration(configured(prompt="Trade!")),
        _configuration(configured(decision_age_max_s=9)),
        _configuration(configured(temperature=0.2)),
        _configuration(configured(request={"seed": 7})),
        _configuration(configured(every="5m")),
        _configuration(configured(tools_off=("note",))),
        _configuration(configured(context_tokens=9_000)),
        _configuration(configured(calls="json")),
        _configuration(replace(MODEL, variant=VariantId.SOVEREIGN)),
        _configuration(replace(MODEL, provider="nim")),
        _configuration(replace(MODEL, router_model_name="lab/two")),
        _configuration(left_out=["temperature"]),
        _configuration(OPENAI_BASE_URL="https://other.example/v1"),
        _configuration(RUN_TOKENS_MAX="50000"),
        _configuration(ANSWER_TOKENS_MAX="4000"),
        _configuration(SIM_TAKER_FEE_BPS="9"),
        _configuration(SIM_MAKER_FEE_BPS="9"),
        _configuration(SIM_LATENCY_MS="9"),
        _configuration(MARKETS="BTC,DOGE"),
    ],
)
def test_everything_that_affects_trading_changes_the_fingerprint(other: str) -> None:
    assert fingerprint(other, "lab/one") != fingerprint(_configuration(), "lab/one")


def test_another_version_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _configuration()
    monkeypatch.setattr("trader.agents.entrants.__version__", "9.9")
    assert _configuration() != before


def test_unsent_fields_are_not_part_of_the_fingerprint() -> None:
    assert _configuration(configured(request={"temperature": None})) == _configuration(left_out=["temperature"])
    assert "temperature" not in json.loads(_configuration(left_out=["temperature"]))["sampling"]


def test_the_answering_model_changes_the_fingerprint() -> None:
    assert len({fingerprint(_configuration(), name) for name in (None, "lab/one", "lab/one-2026")}) == 3


def test_names_and_display_fields_do_not_change_the_fingerprint() -> None:
    renamed = replace(MODEL, id="two", name="Two", logo="x", active=False, venue_account_index="3")
    assert _configuration(renamed) == _configuration()
    assert _configuration(SIM_TAKER_FEE_BPS="5.0") == _configuration()


def test_external_agents_with_equal_declarations_and_owner_share_a_fingerprint() -> None:
    def of(agent: str, owner: str | None, declared: Declared | None) -> str:
        own = ModelConfiguration(owner=owner, declared=declared)
        return _configuration(replace(MODEL, id=agent, provider="external", configuration=own))

    said = Declared(version="2", prompt_digest="ab" * 32)
    assert of("scout", "alice", said) == of("twin", "alice", said)
    others = [of("scout", "bob", said), of("scout", "alice", Declared(version="3")), of("scout", "alice", Declared())]
    silent = [of("scout", "alice", None), of("twin", "alice", None)]
    assert len({of("scout", "alice", said), *others, *silent}) == 6


@given(st.integers(-(2**63), 2**64 - 1))
def test_whole_numbers_of_any_size_have_a_canonical_form(number: int) -> None:
    assert float(json.loads(canonical_json({"seed": [number]}))["seed"][0]) == float(number)
    assert canonical_json(number) == canonical_json(float(number))


@pytest.mark.parametrize(
    ("decided", "due", "coverage", "is_ranked"),
    [(0, 0, None, False), (19, 20, 95.0, True), (189, 200, 94.5, False), (7, 7, 100.0, True)],
)
def test_an_entrant_below_95_percent_coverage_has_no_rank(
    decided: int, due: int, coverage: float | None, is_ranked: bool
) -> None:
    record = EntrantRecord(1, "f", None, decided, due)
    assert (record.coverage_percent, record.is_ranked) == (coverage, is_ranked)
