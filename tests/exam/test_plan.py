"""The plan of an exam promises what exams then keep."""

from pathlib import Path

import msgspec
import orjson
import pytest

from trader.__main__ import main
from trader.exam.domain.plan import in_moments, in_worlds, outlook
from trader.seasons.card import AccountCard


def test_larger_differences_and_less_noise_need_fewer_states() -> None:
    fewer, usual, more = (
        outlook(in_worlds(first, 0.3, noise), 300, exams=100).most or 10**6
        for first, noise in ((0.6, 0.5), (0.5, 0.5), (0.5, 1.0))
    )
    assert fewer < usual < more


def test_equal_entrants_are_separated_in_at_most_half_of_the_level() -> None:
    seen = outlook(in_worlds(0.4, 0.4, 0.7), 3000)
    assert seen.most is seen.median is None
    assert seen.called <= 0.04


def test_moments_of_a_recording_take_the_states_that_the_method_states() -> None:
    """Two entrants with Sharpe ratios of 2.6 and 0.3 and a correlation of 0.67: about 15,000 hours."""
    seen = outlook(in_moments(2.6, 0.3, 0.67, 60), 18_000, exams=60)
    assert seen.called >= 0.7
    assert 12_000 <= (seen.most or 10**6) <= 18_000


def test_promise_that_cannot_be_kept_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exam", "plan", "--shares", "0.5,0.3", "--noise", "0.5", "--states", "600", "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["called"] >= 0.8
    assert main(["exam", "plan", "--shares", "0.5,0.45", "--states", "300"]) == 1
    assert "separate them" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ("--shares", "nan,0.3"),
        ("--shares", "0.5"),
        ("--shares", "0.5,inf"),
        ("--noise", "-1"),
        ("--noise", "nan"),
        ("--sharpes", "2,nan"),
        ("--correlation", "1.5"),
        ("--usd", "-3"),
        ("--seconds", "inf"),
        ("--states", "0"),
    ],
)
def test_an_invalid_number_is_refused(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exam", "plan", *options]) == 2
    assert f"argument {options[0]}: expected" in capsys.readouterr().err


def test_the_noise_of_a_plan_is_a_pilots_or_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pilot = tmp_path / "pilot"
    assert main(["exam", "run", "--workers", "1", "--states", "12", "--secret", "s", "--out", str(pilot)]) == 0
    deviations = []
    for given in ((), ("--noise", "1"), ("--pilot", str(pilot))):
        capsys.readouterr()
        main(["exam", "plan", *given, "--json"])
        deviations.append(orjson.loads(capsys.readouterr().out)["deviation"])
    assert deviations[0] == deviations[1] != deviations[2] > 0
    assert main(["exam", "plan", "--pilot", str(tmp_path)]) == 1


def test_an_exam_and_a_season_are_related_by_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exam, season = tmp_path / "exam", tmp_path / "winter"
    assert main(["exam", "run", "--workers", "1", "--states", "10", "--secret", "s", "--out", str(exam)]) == 0
    season.mkdir()
    capsys.readouterr()
    assert main(["exam", "report", str(exam), "--json"]) == 0
    shares = {each["entrant"]: each["share"]["share"] for each in orjson.loads(capsys.readouterr().out)["entrants"]}
    accounts = [
        AccountCard(
            model_id=name, provider="rules", router_model="rules/a", initial_capital=100.0, equity=100 + share,
            drawdown=None, fills=0, maker=None, traded=0.0, fees=0.0, funding=0.0, model_cost_usd=None,
            cycles_decided=0, cycles_due=0,
        )
        for name, share in (*shares.items(), ("z", 9.0))
    ]  # fmt: skip
    (season / "card.json").write_bytes(msgspec.json.encode({"accounts": accounts}))
    assert main(["exam", "relate", str(exam), str(season)]) == 0
    assert f"of {len(shares)} entrants: +1.00, 95 % from" in capsys.readouterr().out
    (season / "card.json").write_bytes(msgspec.json.encode({"accounts": accounts[:4]}))
    assert main(["exam", "relate", str(exam), str(season)]) == 2
    assert "at least 5 entrants" in capsys.readouterr().err
    (season / "card.json").write_bytes(b"{}")
    assert main(["exam", "relate", str(exam), str(season)]) == 1
