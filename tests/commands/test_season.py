"""The commands of seasons."""

import json

import pytest

from trader.__main__ import main


def test_a_plan_is_printed_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "season",
        "plan",
        "--models",
        "2",
        "--sharpe",
        "12",
        "--days",
        "90",
        "--seasons",
        "10",
        "--replicates",
        "2",
    ]
    assert main(words) == 0
    assert "2 entrants, 7 comparisons" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["days"] == [30, 60, 90]
    assert [power["question"] for power in answer["powers"]] == ["holdNothing", "otherModel"]


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--models", "0", "--models: 0 is not from 1 to 1000"),
        ("--days", "5000", "--days: 5000 is not from 30 to 1095"),
        ("--noise", "-1", "--noise: -1 is not from 0 to 100"),
    ],
)
def test_a_plan_of_impossible_figures_says_what_is_allowed(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"--models": "8", "--sharpe": "3", option: value}
    assert main(["season", "plan", *(f"{name}={each}" for name, each in words.items())]) != 0
    assert why in capsys.readouterr().err
