"""Prompts of AI models: their own prompt, past and orders, in few tokens, most of which repeat the previous prompt."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from statistics import fmean
from typing import Any

import orjson
import pytest
from rs_bpe.bpe import openai
from support.candles import FOLDER
from support.prompts import data_of, kept_part, replayed_prompts
from support.trading_floor import Floor, calling, hold, opening

from trader.agents.domain.conversation import Turn
from trader.agents.domain.models import ModelConfiguration
from trader.agents.domain.prompt import minute_text
from trader.agents.variants import VARIANTS
from trader.core.errors import ProviderError
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.domain.orders import Order, OrderSide, OrderType


def asked(turn: Turn) -> tuple[str, dict[str, Any]]:
    """Return the system message of a turn and the data of its first user message."""
    return turn.messages[0]["content"], data_of(turn.messages[1]["content"])


async def test_a_model_sees_its_last_decisions_newest_first_and_why_calls_were_refused(
    floor: Floor,
) -> None:
    await floor.add("ada")
    for number in range(21):
        floor.provider.scripts["ada"] = [hold(f"reason {number} " + 300 * "x")]
        await floor.cycle()
    too_much = calling(opening(), opening(symbol="ETH", leverage=99), ("closePosition", {"symbol": 7}))
    floor.provider.scripts["ada"] = [too_much, hold("in")]
    await floor.cycle()
    floor.provider.scripts["ada"] = [calling(("fetchOrderBook", {"symbol": "BTC"})), calling(text="I wait.")]
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    lines = [line.partition("Z ")[2] for line in data["decisions"]]
    assert lines[-4:] == [
        "filled 0.1 at 94000.1: createPosition BTC LONG quantity 0.1 leverage 3 stop 90000 target 99000",
        "rejected (leverage): createPosition ETH LONG quantity 0.1 leverage 99 stop 90000 target 99000",
        "failed (error): closePosition",
        "holding: in",
    ]
    assert lines[-5] == "holding: reason 20…"
    assert 20 <= len(lines) <= 24
    refused, failed = data["refused"]
    assert refused.startswith("createPosition ETH LONG")
    assert ": Leverage 99 is above the 10" in refused
    assert failed.startswith("closePosition: Bad arguments:")
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    assert data["decisions"][-1].endswith("Z I wait.")
    assert "refused" not in data


async def test_a_failed_cycle_ends_the_refusals_of_the_one_before(floor: Floor) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [calling(opening(leverage=99)), hold("in")]
    (answered,) = await floor.cycle()
    floor.provider.scripts["ada"] = [ProviderError("down")]
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    assert ": Leverage 99 is above the 10" in data["refused"][0]
    floor.provider.scripts["ada"] = [hold("still")]
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    assert ("refused" in data, data["decisions"][-1].partition("Z ")[2]) == (False, "holding: in")
    assert data["lookedAt"] == minute_text(answered.invocation.started_at)


async def test_a_model_sees_its_last_note_until_its_account_is_reset(floor: Floor) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [calling(("note", {"text": "first"}), ("holding", {"reason": "flat"}))]
    await floor.cycle()
    rewritten = calling(("note", {"text": "x" * 601}), ("note", {"text": "sell the news"}))
    floor.provider.scripts["ada"] = [rewritten, hold()]
    await floor.cycle()
    _, data = asked(floor.provider.turns[1])
    assert data["note"] == "first"
    floor.provider.scripts["ada"] = [hold()]
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    assert data["note"] == "sell the news"
    assert "text: expected text of 1 to 600 characters, got" in data["refused"][0]
    await floor.see()
    await floor.exchange.reset_account("ada")
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    assert not {"note", "decisions"} & data.keys()


async def test_a_model_reads_the_order_book_that_its_order_would_meet(floor: Floor) -> None:
    await floor.add("ada")
    fetch = ("fetchOrderBook", {"symbol": "BTC"})
    floor.provider.scripts["ada"] = [calling(fetch), calling(opening(quantity=0.05)), calling(fetch), hold()]
    await floor.cycle()
    before, after = (
        orjson.loads(message["content"])
        for message in floor.provider.turns[-1].messages
        if message["role"] == "tool" and "bids" in message["content"]
    )
    assert len(before["bids"]) <= 10 >= len(before["asks"])
    assert before["bids"] == after["bids"]
    (price, quantity), (price_left, left) = before["asks"][0], after["asks"][0]
    assert (price, Decimal(quantity) - Decimal(left)) == (price_left, Decimal("0.05"))


async def test_a_model_sees_its_open_orders(floor: Floor) -> None:
    await floor.add("ada")
    await floor.exchange.open_account("ada")
    order = Order(
        account_id="ada", symbol="BTC", side=OrderSide.BUY, quantity=Decimal("0.01"), type=OrderType.LIMIT,
        limit_price=Decimal(90_000), leverage=Decimal(2),
    )  # fmt: skip
    await floor.exchange.place_orders(order)
    await floor.cycle()
    _, data = asked(floor.provider.turns[-1])
    (shown,) = data["orders"]
    assert (shown["side"], shown["remaining"], shown["limitPrice"]) == ("buy", 0.01, 90_000)


async def test_a_models_prompt_replaces_the_variants_prompt_and_keeps_the_rules(floor: Floor) -> None:
    own = ModelConfiguration(prompt="# Own\n\nDo as you like.\n", every="5m")
    await floor.add("ada", configuration=own)
    await floor.add("bob")
    await floor.cycle()
    texts = {turn.model.id: asked(turn)[0] for turn in floor.provider.turns}
    assert texts["ada"].startswith("# Own\n\nDo as you like.\n\n## Rules that are enforced\n")
    assert "You are asked every 5 minutes." in texts["ada"]
    assert texts["bob"].startswith(VARIANTS[VariantId.APEX].prompt.strip())
    assert "You are asked every minute." in texts["bob"]


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"there are no recorded candles in {FOLDER}")
async def test_prompts_fit_their_token_limit_and_repeat_the_previous_cycles_beginning(database: Database) -> None:
    """Uses recorded candles; `scripts/benchmark prompts` measures hours of them."""
    start = datetime(2025, 1, 20, 15, 1, tzinfo=UTC)
    count = openai.o200k_base().count
    for prompts in (await replayed_prompts(database, FOLDER, start, timedelta(minutes=6))).values():
        assert len(prompts) >= 6
        assert count(prompts[0]) <= 4_800
        assert max(count(prompt) for prompt in prompts[::5]) <= 6_800
        assert fmean(kept_part(before, after) for before, after in pairwise(prompts)) >= 0.85
