"""What AI models are asked: their own prompt, reasons and orders, in few tokens, of which most are those of before."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import orjson
import pytest
from rs_bpe.bpe import openai
from support.candles import FOLDER
from support.floor import Floor, hold
from support.prompts import kept_part, replayed_prompts

from trader.domain.agents.conversation import Turn
from trader.domain.exchange.orders import Order, OrderSide, OrderType
from trader.domain.models import ModelConfiguration, VariantId
from trader.store.database.pool import Database
from trader.variants import VARIANTS


def asked(turn: Turn) -> tuple[str, dict[str, Any]]:
    """Return the system message of a turn and the data of its first user message."""
    return turn.messages[0]["content"], orjson.loads(turn.messages[1]["content"])


async def test_a_model_is_shown_its_last_three_reasons_newest_first(floor: Floor) -> None:
    await floor.add("ada")
    for number in range(5):
        floor.provider.scripts["ada"] = [hold(f"reason {number} " + 300 * "x")]
        await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    assert [text[:8] for _, text in data["reasons"]] == ["reason 3", "reason 2", "reason 1"]
    assert all(len(text) == 160 for _, text in data["reasons"])


async def test_a_model_is_shown_its_open_orders(floor: Floor) -> None:
    await floor.add("ada")
    await floor.exchange.open_account("ada")
    order = Order(
        account_id="ada", symbol="BTC", side=OrderSide.BUY, quantity=Decimal("0.01"), type=OrderType.LIMIT,
        limit_price=Decimal(90_000), leverage=Decimal(2),
    )  # fmt: skip
    await floor.exchange.place_order(order)
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    (shown,) = data["orders"]
    assert (shown["side"], shown["remaining"], shown["limitPrice"]) == ("buy", 0.01, 90_000)


async def test_a_prompt_of_its_own_replaces_that_of_the_variant_and_keeps_the_rules(floor: Floor) -> None:
    own = ModelConfiguration(prompt="# Own\n\nDo as you like.\n", every="5m")
    await floor.add("ada", configuration=own)
    await floor.add("bob")
    await floor.cycle()
    texts = {turn.model.id: asked(turn)[0] for turn in floor.provider.turns}
    assert texts["ada"].startswith("# Own\n\nDo as you like.\n\n## Rules that are enforced\n")
    assert "You are asked every 5 minutes." in texts["ada"]
    assert texts["bob"].startswith(VARIANTS[VariantId.APEX].prompt.strip())
    assert "You are asked every minute." in texts["bob"]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"there are no recorded candles in {FOLDER}")
async def test_prompts_fit_their_tokens_and_repeat_those_of_the_cycle_before(database: Database) -> None:
    """Of recorded candles; `scripts/benchmark prompts` measures hours of them."""
    start = datetime(2025, 1, 20, 15, 1, tzinfo=UTC)
    count = openai.o200k_base().count
    for prompts in (await replayed_prompts(database, FOLDER, start, timedelta(minutes=14))).values():
        assert len(prompts) >= 14
        assert max(count(prompt) for prompt in prompts[::5]) <= 6_500
        kept = [kept_part(before, after) for before, after in pairwise(prompts)]
        assert sum(part >= 0.8 for part in kept) >= 0.9 * len(kept)
