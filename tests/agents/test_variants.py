"""The variants: as listed in the specification, and with prompts that name only existing things."""

import colorsys
import re
from datetime import timedelta
from importlib.resources import files
from typing import Any

import msgspec
import orjson
import pytest
from support.records import make_model

from trader.agents import variants
from trader.agents.domain.models import ModelConfiguration
from trader.agents.domain.prompt import GLOSSARY, cadence_text, rules_text
from trader.agents.domain.tools import TOOLS, tool_schemas
from trader.agents.domain.view import (
    LastAction,
    ObservedAccount,
    ObservedMarket,
    ObservedPosition,
    ObservedStats,
    ObservedTrade,
    View,
)
from trader.agents.variants import VARIANTS
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import ExitPlan, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import INTERVALS

SPECIFIED = [
    ("Apex", "Apex (Kelly Engine)", 0.7, "#a855f7",
     "Aggressive, 10x leverage, VWAP momentum validation, squeeze trading, Kelly-criterion sizing"),
    ("Trendsurfer", "Trendsurfer (Momentum)", 0.5, "#06b6d4",
     "Trend follower, ADX above 25 filter, Kijun-Sen trailing stops"),
    ("Contrarian", "Contrarian (Reverter)", 0.6, "#e11d48",
     "Mean reversion in ranging markets, ADX below 25, fade toward VWAP"),
    ("Sovereign", "Sovereign (Adaptive)", 0.8, "#eab308",
     "Regime-adaptive allocator blending trend and range strategies"),
]  # fmt: skip
LEVERAGE = {"Apex": 10, "Trendsurfer": 5, "Contrarian": 3, "Sovereign": 5}
SHOWN = (
    View,
    ObservedAccount,
    ObservedPosition,
    ObservedTrade,
    ObservedStats,
    ObservedMarket,
    LastAction,
    ExitPlan,
    Indicators,
)
SIDES = {side.value for side in Side}
PLACES = {
    "candleCloses",
    "candlesAgo",
    "cost",
    "decisions",
    "entries",
    "from",
    "lookedAt",
    "refused",
    "relativeVolume",
    "session",
}
"""Names of the prompt's own tables and figures."""

TECHNICAL = ("MACD", "stochastic", "OBV", "Ichimoku cloud", "Fibonacci", "moving average", "order flow", "news")

every_variant = pytest.mark.parametrize("variant", VariantId)


def names_of(*structs: Any) -> set[str]:
    return {field.encode_name for struct in structs for field in msgspec.structs.fields(struct)}


KNOWN = names_of(*SHOWN) | names_of(*TOOLS.values()) | PLACES | TOOLS.keys() | INTERVALS.keys() | SIDES


def test_the_public_fields_match_the_specification() -> None:
    listed = [(v.id.value, v.label, v.temperature, v.color, v.description) for v in VARIANTS.values()]
    assert listed == SPECIFIED


def test_every_variant_has_its_limits() -> None:
    assert {v.id.value: v.limits.leverage_max for v in VARIANTS.values()} == LEVERAGE
    for definition in VARIANTS.values():
        limits = definition.limits
        assert (limits.position_notional_max, limits.day_loss_max_percent, limits.reversal_cycles) == (5, 10, 3)


def test_a_build_that_lacks_a_variant_does_not_import() -> None:
    three = [VARIANTS[variant] for variant in VariantId][:3]
    with pytest.raises(ValueError, match="every variant must be defined once"):
        variants.by_id(*three)
    with pytest.raises(ValueError, match="every variant must be defined once"):
        variants.by_id(*three, three[0])


def test_a_variant_without_a_part_cannot_be_made() -> None:
    whole = msgspec.structs.asdict(VARIANTS[VariantId.APEX])
    for name in whole:
        with pytest.raises(TypeError, match=name):
            variants.Variant(**{field: value for field, value in whole.items() if field != name})


def test_a_missing_or_empty_prompt_does_not_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "files", lambda _package: tmp_path)
    with pytest.raises(FileNotFoundError):
        variants.read_prompt(VariantId.APEX)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "apex.md").write_text(" \n")
    with pytest.raises(ValueError, match="prompt of Apex is empty"):
        variants.read_prompt(VariantId.APEX)


def test_every_prompt_belongs_to_a_variant() -> None:
    names = {entry.name for entry in files("trader.agents").joinpath("prompts").iterdir()}
    assert names == {f"{variant.lower()}.md" for variant in VariantId}


@pytest.mark.parametrize(("own", "age_s"), [((None, None), 120), ((300, None), 300), ((300, 60), 60)])
def test_a_decision_may_be_as_old_as_the_time_limit_of_its_model(
    own: tuple[int | None, int | None], age_s: int
) -> None:
    configuration = ModelConfiguration(attempt_timeout_s=own[0], decision_age_max_s=own[1])
    model = msgspec.structs.replace(make_model("ada"), configuration=configuration)
    assert variants.limits_of(model, 120).decision_age_max_s == age_s


@every_variant
def test_a_prompt_names_only_existing_things(variant: VariantId) -> None:
    prompt = VARIANTS[variant].prompt
    assert prompt.count("`") % 2 == 0
    named = set(re.findall(r"`([^`]*)`", prompt))
    assert named
    assert named <= KNOWN, f"unknown: {sorted(named - KNOWN)}"
    assert not [word for word in TECHNICAL if word.lower() in prompt.lower()]


@every_variant
def test_a_prompt_names_the_intervals_that_its_models_see(variant: VariantId) -> None:
    definition = VARIANTS[variant]
    assert set(re.findall(r"`([^`]*)`", definition.prompt)) & INTERVALS.keys() == set(definition.intervals)


@every_variant
def test_no_field_name_appears_outside_backticks(variant: VariantId) -> None:
    """A camelCase word in plain text would escape the check of names."""
    plain = re.sub(r"`[^`]*`", "", VARIANTS[variant].prompt)
    assert re.findall(r"\b[a-z]+[A-Z]\w*", plain) == []


@every_variant
def test_a_prompt_covers_role_edge_rules_limits_exits_and_tools(variant: VariantId) -> None:
    definition = VARIANTS[variant]
    prompt = definition.prompt
    assert prompt.startswith(f"# {variant}\n")
    for heading in ("## Your edge", "## How you trade", "## Size", "## Exits"):
        assert heading in prompt
    assert re.search(rf"(at most|up to) {definition.limits.leverage_max}\b", prompt)
    for tool in TOOLS.keys() - {"updateExitPlan", "fetchOrderBook", "note", "placeOrder", "cancelOrder"}:
        assert f"`{tool}`" in prompt
    for word in ("`invalidation`", "`confidence`", "stop"):
        assert word in prompt


@every_variant
def test_every_text_for_models_names_only_existing_things(variant: VariantId) -> None:
    """The guard's rules and the tools' descriptions, in addition to the prompt: names in backticks and camelCase."""
    told = [
        rules_text(VARIANTS[variant].limits),
        orjson.dumps(tool_schemas(("BTC",))).decode(),
        GLOSSARY,
        cadence_text(timedelta(minutes=5), "15m"),
    ]
    for text in told:
        named = set(re.findall(r"`([^`]*)`", text)) | set(re.findall(r"\b[a-z]+[A-Z]\w*", text))
        assert named <= KNOWN | {"additionalProperties", "anyOf", "id", "buy", "sell", "long", "short"}, (
            f"unknown: {sorted(named)}"
        )
    assert {"leverageMax", "lastAction", "dayLossPercent", "stale"} <= set(re.findall(r"`([^`]*)`", told[0]))


def test_each_model_has_a_constant_color_near_its_variants_that_means_neither_gain_nor_loss() -> None:
    models = [make_model(f"m{number}", variant) for number in range(50) for variant in VariantId]
    colors = [variants.color_of(model) for model in models]
    assert colors == [variants.color_of(model) for model in models]
    assert len(set(colors)) > 190
    for model, color in zip(models, colors, strict=True):
        hue, own = (
            360 * colorsys.rgb_to_hls(*(int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]
            for shade in (color, variants.VARIANTS[model.variant].color)
        )
        assert abs(hue - own) < 45
        assert 28 < hue < 66 or 174 < hue < 342, "neither the red of losses nor the green of gains"
    chosen = msgspec.structs.replace(models[0], configuration=ModelConfiguration(color="#123456"))
    assert variants.color_of(chosen) == "#123456"
