"""Season plans: more days, a larger edge, and replicates with independent noise all raise the power."""

from trader.portfolio.domain.board import BoardRules
from trader.seasons.domain.plan import Power, SeasonOutline, plan_season

DAYS = (90, 180)


def powers(outline: SeasonOutline, *replicates: int) -> list[Power]:
    return list(plan_season(outline, replicates, DAYS, seasons=20))


def test_a_plan_says_when_four_of_five_seasons_detect_the_edge() -> None:
    nothing, baseline, other = powers(SeasonOutline(models=2, sharpe=12, days=180), 1)
    assert (nothing.question, baseline.question, other.question) == ("holdNothing", "baseline", "otherModel")
    assert 0 < nothing.called[0] < nothing.called[1]
    assert nothing.called[1] >= 0.8
    assert nothing.days_needed is not None
    assert 90 < nothing.days_needed <= 180
    assert other.called[1] < nothing.called[1], "a difference has the variance and the unseen loss of both"


def test_a_season_without_power_says_so() -> None:
    for power in powers(SeasonOutline(models=8, sharpe=1, days=180), 1, 5):
        assert power.called == [0.0, 0.0]
        assert power.days_needed is None


def test_replicates_remove_their_own_noise_and_leverage_costs_days() -> None:
    outline = SeasonOutline(models=2, sharpe=6, own_noise=0.9, volatility=0.02, days=180)
    single, several, *_ = powers(outline, 1, 10)
    assert several.called[1] > single.called[1]
    leveraged, *_ = powers(outline._replace(leverage=4), 10)
    assert leveraged.called[1] < several.called[1]


def test_a_season_with_fewer_comparisons_or_a_larger_alpha_decides_sooner() -> None:
    every = SeasonOutline(models=8, sharpe=10, days=180)
    least = every._replace(rules=BoardRules(["holdNothing"], level=0.2))
    assert (every.family, least.family) == (52, 8)
    (nothing,), (slower, *_) = powers(least, 1), powers(every, 1)
    assert nothing.question == slower.question == "holdNothing"
    assert nothing.called[0] > slower.called[0]
    alone = SeasonOutline(models=1, sharpe=1, rules=BoardRules(["bestOther"]))
    assert alone.questions == [], "there is no other model"


def test_a_baseline_has_no_replicates_so_its_own_noise_stays() -> None:
    outline = SeasonOutline(models=2, sharpe=12, own_noise=0.9, volatility=0.02, days=180)
    _, baseline, other = powers(outline, 10)
    assert baseline.days_needed is not None
    assert other.days_needed is not None
    assert baseline.days_needed > other.days_needed
