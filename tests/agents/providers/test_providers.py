"""The costs and limits of models by their provider's protocol."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from msgspec.structs import replace

from trader.agents.domain.models import Model, ModelConfiguration, ProviderDefinition, TokenPrice, rule_model
from trader.agents.providers.provider import PROTOCOLS, highest_cost, own_answer_limit
from trader.core.variant_id import VariantId

PRICE = TokenPrice(input=3, cached=0.3, output=15)


def model_of(protocol: str, **request: int) -> Model:
    definition = ProviderDefinition(name="lab", base_url="http://127.0.0.1:1", protocol=protocol)
    configuration = ModelConfiguration(provider_definition=definition, request=request)
    model = rule_model(VariantId.APEX, datetime(2025, 1, 1, tzinfo=UTC))
    return replace(model, provider="lab", configuration=configuration)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_highest_cost_assumes_that_all_input_is_written_to_a_charging_cache(protocol: str) -> None:
    charged = Decimal("0.00525") if protocol == "messages" else Decimal("0.0045")
    assert highest_cost(model_of(protocol), PRICE, 1_000, 100) == charged
    assert highest_cost(model_of(protocol), replace(PRICE, cache_write=6), 1_000, 100) == Decimal("0.0075")
    hourly = model_of(protocol)
    hourly = replace(hourly, configuration=replace(hourly.configuration, cache_ttl="1h"))
    charged = Decimal("0.0075") if protocol == "messages" else Decimal("0.0045")
    assert highest_cost(hourly, PRICE, 1_000, 100) == charged


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_answer_limit_is_read_from_the_field_of_the_protocol(protocol: str) -> None:
    field = PROTOCOLS[protocol].limit_fields[-1]
    assert own_answer_limit(model_of(protocol, **{field: 700})) == 700
    assert own_answer_limit(model_of(protocol, words=700)) is None
