"""Rules of seasons: their errors, their permitted amendments, and their digest."""

import hashlib
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.records import HOUR, START, make_model
from support.seasons import DAY, RULES

from trader.agents.domain.models import ModelConfiguration
from trader.portfolio.domain.board import PrimaryComparison
from trader.portfolio.domain.seasons import (
    Season,
    SeasonRecord,
    ServiceTerms,
    amendment_issues,
    entrant_issues,
    rule_issues,
    seed_digest,
    term_issues,
)

TERMS = ServiceTerms(("BTC", "ETH"), Decimal(5), Decimal(2), 200)


def recorded(*records: SeasonRecord) -> Season:
    return Season(records, [hashlib.sha256(record.canonical.encode()).digest() for record in records])


OPENED = SeasonRecord(step="opened", season=1, number=0, at=START, rules=RULES, seed_digest=seed_digest("42"))


@pytest.mark.parametrize(
    ("changed", "where", "what"),
    [
        ({"end": RULES.start - HOUR}, ("end",), "is not after the start"),
        ({"end": RULES.start}, ("end",), "is not after the start"),
        ({"start": RULES.start + timedelta(minutes=1)}, ("start",), "is not a whole hour"),
        ({"start": datetime.min.replace(tzinfo=UTC)}, ("start",), "expected a time from 1970-01-01 to 2200-01-01"),
        ({"end": datetime.max.replace(tzinfo=UTC)}, ("end",), "expected a time from 1970-01-01 to 2200-01-01"),
        ({"entry_until": RULES.end}, ("entry_until",), "is not within the season"),
        ({"entry_until": START}, ("entry_until",), "is not within the season"),
        ({"end": RULES.start + HOUR, "age_min_hours": 1}, ("entry_until",), "is not within the season"),
        ({"age_min_hours": 721}, ("age_min_hours",), "721 hours; the season has 720"),
        ({"compare": ["bestOther", "bestOther"]}, ("compare", 1), "'bestOther' is given twice"),
        (
            {"primary": PrimaryComparison(entrant="ada", against="ada", alpha=0.05)},
            ("primary", "against"),
            "'ada' would be compared with itself",
        ),
    ],
)
def test_rules_that_contradict_themselves_are_refused_with_their_place(
    changed: dict[str, Any], where: tuple[str | int, ...], what: str
) -> None:
    (issue,) = rule_issues(replace(RULES, **changed))
    assert issue.path == where
    assert what in issue.message
    assert not list(rule_issues(RULES))


@pytest.mark.parametrize(
    ("changed", "where", "what"),
    [
        ({"markets": ["BTC", "ETH", "DOGE"]}, ("markets", 2), "'DOGE' has no source of prices; MARKETS names BTC, ETH"),
        ({"markets": ["BTC"]}, ("markets",), "the service trades ETH too"),
        ({"taker_fee_bps": 4.5}, ("taker_fee_bps",), "4.5; the service has 5 (SIM_TAKER_FEE_BPS)"),
        ({"latency_ms": 0}, ("latency_ms",), "0; the service has 200 (SIM_LATENCY_MS)"),
    ],
)
def test_rules_that_the_service_does_not_comply_with_are_refused(
    changed: dict[str, Any], where: tuple[str | int, ...], what: str
) -> None:
    (issue,) = term_issues(replace(RULES, **changed), TERMS)
    assert issue.path == where
    assert what in issue.message
    assert not list(term_issues(RULES, TERMS))


def test_entrants_are_models_with_the_capital_and_the_replicates_of_the_rules() -> None:
    twins = [
        replace(make_model(f"twin-{number}"), configuration=ModelConfiguration(replicate_of="twin"))
        for number in (1, 2)
    ]
    models = [make_model("ada"), *twins]
    capitals = {"ada": Decimal(500), "twin-1": Decimal(10_000), "twin-2": Decimal(10_000)}
    said = {
        issue.message for issue in entrant_issues(replace(RULES, entrants=["ada", "bob", "twin"]), models, capitals)
    }
    assert said == {
        "the account of 'ada' has a capital of 500",
        "unknown model 'bob'; expected one of ada, twin",
        "'twin' has 2 accounts of one configuration; replicates is 1",
    }
    of_two = replace(RULES, entrants=["twin"], replicates=2)
    assert not list(entrant_issues(of_two, models, capitals))
    assert of_two.has(twins[0])
    assert not of_two.has(models[0])
    assert [issue.path for issue in entrant_issues(replace(RULES, replicates=2), models, capitals)] == [
        ("entrants",),
        ("entrants",),
    ], "without a list all models are entrants: ada has another capital, and is alone"


@pytest.mark.parametrize(
    ("changed", "now", "what"),
    [
        ({}, START, "nothing is changed"),
        ({"start": RULES.start + HOUR}, RULES.start, "the season has begun"),
        ({"start": START}, START, "is in the past"),
        ({"end": RULES.end - DAY}, RULES.end - HOUR, "is in the past"),
        ({"end": RULES.end + DAY}, RULES.end, "is in the past"),
    ],
)
def test_no_amendment_changes_the_past(changed: dict[str, Any], now: Any, what: str) -> None:
    (issue,) = amendment_issues(RULES, replace(RULES, **changed), now)
    assert what in issue.message
    assert not list(amendment_issues(RULES, replace(RULES, alpha=0.01, end=RULES.end + DAY), RULES.end - HOUR))


def test_a_season_is_built_from_its_records() -> None:
    longer = replace(RULES, end=RULES.end + DAY)
    amended = SeasonRecord(step="amended", season=1, number=1, at=START + DAY, rules=longer, reason="a day was lost")
    closed = SeasonRecord(step="closed", season=1, number=2, at=START + 40 * DAY, seed="42")
    season = recorded(OPENED, amended, closed)
    assert season.rules == longer
    (amendment,) = season.amendments
    assert amendment.reason == "a day was lost"
    assert amendment.changes == [("end", RULES.end, longer.end)]
    assert season.seed == "42"
    assert seed_digest(season.seed) == OPENED.seed_digest, "whoever knew the digest can check the seed"
    states = [recorded(OPENED, amended).state(at) for at in (START, RULES.start, RULES.end, longer.end)]
    assert states == ["announced", "running", "running", "ended"]
    assert season.state(START) == "closed"


def test_the_canonical_record_round_trips_with_any_format_of_times() -> None:
    text = OPENED.canonical
    assert msgspec.json.decode(text, type=SeasonRecord) == OPENED
    assert '"capital":10000,' in text, "RFC 8785 writes a number in one way"
    assert msgspec.json.decode(text, type=SeasonRecord).canonical == text


@pytest.mark.parametrize(
    ("changed", "is_stricter"),
    [
        ({"alpha": 0.01}, True),
        ({"alpha": 0.1}, False),
        ({"coverage_min_percent": 99.0, "age_min_hours": 200}, True),
        ({"coverage_min_percent": 50.0}, False),
        ({"disqualify": ["reset", "change"]}, True),
        ({"end": RULES.end + DAY}, False),
        ({"compare": ["holdNothing"]}, False),
        ({"stopping": "decided"}, False),
        ({"alpha": 0.01, "age_min_hours": 1}, False),
    ],
)
def test_only_an_amendment_after_the_start_that_is_not_stricter_keeps_the_rules_before(
    changed: dict[str, Any], is_stricter: bool
) -> None:
    rules = replace(RULES, **changed)
    for after_start in (False, True):
        amended = SeasonRecord(
            step="amended", season=1, number=1, at=START + DAY, rules=rules, reason="x", after_start=after_start
        )
        season = recorded(OPENED, amended)
        assert season.rules == rules
        assert season.rules_before == (RULES if after_start and not is_stricter else None)


@pytest.mark.parametrize(
    "changed",
    [
        {"hour_loss_max_percent": 4.0},
        {"hour_gain_max_percent": 100.0},
        {"primary": PrimaryComparison(entrant="ada", against="bob", alpha=0.05)},
    ],
)
def test_bounds_and_primary_comparison_are_fixed_at_the_start(changed: dict[str, Any]) -> None:
    other = replace(RULES, **changed)
    assert list(amendment_issues(RULES, other, RULES.start - HOUR)) == []
    (issue,) = amendment_issues(RULES, other, RULES.start)
    assert (issue.path, "this rule is fixed" in issue.message) == ((next(iter(changed)),), True)


def test_a_primary_comparison_is_of_entrants() -> None:
    models, capitals = [make_model("ada"), make_model("bob")], dict[str, Decimal]()
    for entrants in ([], ["ada", "bob"]):
        for against, wrong in {"bob": [], "holdNothing": [], "cat": [("primary", "against")]}.items():
            primary = PrimaryComparison(entrant="ada", against=against, alpha=0.05)
            rules = replace(RULES, entrants=entrants, primary=primary)
            assert [issue.path for issue in entrant_issues(rules, models, capitals)] == wrong
    only = replace(RULES, entrants=["bob"], primary=PrimaryComparison(entrant="ada", against="bob", alpha=0.05))
    (issue,) = entrant_issues(only, models, capitals)
    assert issue.message == "'ada' is not an entrant; the entrants are bob"


def test_the_entrants_of_a_season_that_has_begun_are_fixed() -> None:
    fewer = replace(RULES, entrants=["ada"])
    assert list(amendment_issues(RULES, fewer, RULES.start - HOUR)) == []
    (issue,) = amendment_issues(RULES, fewer, RULES.start)
    assert issue.path == ("entrants",)
