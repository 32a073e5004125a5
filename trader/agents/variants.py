"""The variants, each with public fields, a prompt (`prompts/<id>.md`), limits, intervals and a rule agent.

A missing part fails at import, so the service never starts with an incomplete variant.
"""

import colorsys
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import msgspec

from trader.agents.domain.models import Model
from trader.agents.domain.rules.apex import Apex
from trader.agents.domain.rules.common import RuleAgent
from trader.agents.domain.rules.contrarian import Contrarian
from trader.agents.domain.rules.sovereign import Sovereign
from trader.agents.domain.rules.trendsurfer import Trendsurfer
from trader.agents.domain.view import VariantLimits
from trader.core.variant_id import VariantId
from trader.market.domain.markets import Interval

_HUES: Final[Mapping[VariantId, tuple[int, int]]] = {
    VariantId.APEX: (240, 292),
    VariantId.TRENDSURFER: (176, 230),
    VariantId.CONTRARIAN: (304, 340),
    VariantId.SOVEREIGN: (30, 64),
}
"""The hues of each variant's models, in degrees, beside its own: neither the green of gains nor the red of losses."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A named trading strategy. Only `id` is a stable reference; label, description and color are for display.

    `temperature` is the sampling temperature of its AI models. `intervals` are the candle and indicator intervals in
    the views of its AI models; the first ones are the rule agent's, and the only ones on which it decides.
    """

    id: VariantId
    label: str
    description: str
    temperature: float
    color: str
    prompt: str
    limits: VariantLimits
    intervals: tuple[Interval, ...]
    agent: type[RuleAgent]


def read_prompt(variant_id: VariantId) -> str:
    """Return the prompt of a variant.

    :raises FileNotFoundError: this build has no prompt for the variant
    :raises ValueError: the prompt is empty
    """
    text = files("trader.agents").joinpath("prompts", f"{variant_id.lower()}.md").read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"the prompt of {variant_id} is empty")
    return text


def by_id(*variants: Variant) -> Mapping[VariantId, Variant]:
    """Return the variants by id, in the order of the enum.

    :raises ValueError: an id of the enum is missing or duplicated
    """
    ids = [variant.id for variant in variants]
    if ids != list(VariantId):
        raise ValueError(f"every variant must be defined once, in the order {list(VariantId)}; defined are {ids}")
    return MappingProxyType({variant.id: variant for variant in variants})


VARIANTS: Final = by_id(
    Variant(
        id=VariantId.APEX,
        label="Apex (Kelly Engine)",
        description=("Aggressive, 10x leverage, VWAP momentum validation, squeeze trading, Kelly-criterion sizing"),
        temperature=0.7,
        color="#a855f7",
        prompt=read_prompt(VariantId.APEX),
        limits=Apex.limits,
        intervals=(*Apex.intervals, "5m", "4h"),
        agent=Apex,
    ),
    Variant(
        id=VariantId.TRENDSURFER,
        label="Trendsurfer (Momentum)",
        description="Trend follower, ADX above 25 filter, Kijun-Sen trailing stops",
        temperature=0.5,
        color="#06b6d4",
        prompt=read_prompt(VariantId.TRENDSURFER),
        limits=Trendsurfer.limits,
        intervals=(*Trendsurfer.intervals, "1h", "4h"),
        agent=Trendsurfer,
    ),
    Variant(
        id=VariantId.CONTRARIAN,
        label="Contrarian (Reverter)",
        description="Mean reversion in ranging markets, ADX below 25, fade toward VWAP",
        temperature=0.6,
        color="#e11d48",
        prompt=read_prompt(VariantId.CONTRARIAN),
        limits=Contrarian.limits,
        intervals=(*Contrarian.intervals, "5m", "4h"),
        agent=Contrarian,
    ),
    Variant(
        id=VariantId.SOVEREIGN,
        label="Sovereign (Adaptive)",
        description="Regime-adaptive allocator blending trend and range strategies",
        temperature=0.8,
        color="#eab308",
        prompt=read_prompt(VariantId.SOVEREIGN),
        limits=Sovereign.limits,
        intervals=(*Sovereign.intervals, "4h"),
        agent=Sovereign,
    ),
)
"""Every variant of this build, in canonical order."""


def limits_of(model: Model, attempt_timeout_s: int) -> VariantLimits:
    """Return the guard's limits for a model; `attempt_timeout_s` is the service's time limit of one attempt."""
    own = model.configuration
    age_s = own.decision_age_max_s or own.attempt_timeout_s or attempt_timeout_s
    return msgspec.structs.replace(VARIANTS[model.variant].limits, decision_age_max_s=age_s)


def temperature_of(model: Model) -> float:
    """Return the temperature with which an AI model is asked: its own, or its variant's."""
    own = model.configuration.temperature
    return VARIANTS[model.variant].temperature if own is None else own


def color_of(model: Model) -> str:
    """Return a model's color: the configured one, or one derived from its id within its variant's hues."""
    return model.configuration.color or _derived_color(model.id, model.variant)


@lru_cache(maxsize=4096)
def _derived_color(model_id: str, variant: VariantId) -> str:
    low, high = _HUES[variant]
    hue, lightness, *_ = (byte / 255 for byte in hashlib.sha256(model_id.encode()).digest())
    parts = colorsys.hls_to_rgb((low + hue * (high - low)) / 360, 0.4 + 0.28 * lightness, 0.75)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
