"""The plan of an exam promises what exams then keep."""

import orjson
import pytest

from trader.__main__ import main
from trader.exam.domain.plan import in_moments, in_worlds, outlook


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
