"""An agent's memory: whole figures, the exit plan of its entries, and refusals of the last cycle only."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trader.agents.domain.memory import LINE_MAX, PastCall, PastCycle, remember, shortened
from trader.agents.domain.tools import CreatePosition, PlaceOrder, PlannedExit
from trader.exchange.domain.orders import Side

NOW = datetime(2025, 1, 2, 12, tzinfo=UTC)
FILLED: dict[str, Any] = {"filledQuantity": "0.123456789", "averagePrice": "106521.30000001"}


def line_of(decision: dict[str, Any], result: dict[str, Any] = FILLED, status: Any = "ok") -> str:
    call = PastCall("CREATE_POSITION", status, [decision], [result])
    (decided,) = remember(None, [PastCycle(NOW, None, [call])], NOW).decisions
    return decided.text


def test_a_line_about_an_entry_has_its_whole_figures_and_its_exit_plan() -> None:
    entry = {
        "symbol": "BTC", "side": "SHORT", "quantity": 0.123456789, "leverage": 3, "stop": 108_001.25,
        "target": 103_480.75, "invalidation": "it rises", "invalidationPrice": 108_500, "confidence": 55,
        "timeExit": "2025-01-02T14:00:00Z",
    }  # fmt: skip
    figures = "BTC SHORT quantity 0.123456789 leverage 3 stop 108001.25 target 103480.75 timeExit 2025-01-02T14:00:00Z"
    assert line_of(entry) == f"filled 0.123456789 at 106521.3: createPosition {figures}"
    refused = line_of(entry, {"rule": "leverage", "reason": "too much"}, "rejected")
    assert refused == f"rejected (leverage): createPosition {figures}"


def test_a_line_about_an_agents_order_has_its_exit_plan() -> None:
    order = {
        "clientOrderId": "1", "symbol": "ETH", "side": "buy", "quantity": 0.5, "type": "limit", "limitPrice": 3300.5,
        "leverage": None, "reduceOnly": False, "exitPlan": {"stop": 3200, "target": None}, "confidence": None,
    }  # fmt: skip
    assert line_of(order, {"averagePrice": None}) == "placeOrder ETH buy quantity 0.5 limitPrice 3300.5 stop 3200"
    assert line_of({**order, "reduceOnly": True, "exitPlan": None}, {}).endswith("limitPrice 3300.5 reduceOnly")
    plan = {"stop": 3200, "trailingDistance": 50, "targets": [{"price": 3500, "fraction": 0.5}]}
    line = line_of({**order, "postOnly": True, "exitPlan": plan}, {})
    assert line.endswith("limitPrice 3300.5 postOnly stop 3200 trailingDistance 50 targets 0.5 at 3500")


def test_a_line_about_a_pair_has_both_orders() -> None:
    orders = [{"clientOrderId": None, "symbol": "ETH", "side": side, "quantity": 0.5} for side in ("buy", "sell")]
    call = PastCall("CREATE_POSITION", "ok", orders, [FILLED, {**FILLED, "averagePrice": "2000"}])
    (line,) = remember(None, [PastCycle(NOW, None, [call])], NOW).decisions
    words = "placeOrder ETH buy quantity 0.5 and placeOrder ETH sell quantity 0.5"
    assert line.text == f"filled 0.123456789 at 106521.3 and 0.123456789 at 2000: {words}"
    refused = call._replace(status="rejected", results=[{"rule": "stop", "reason": "none"}])
    assert remember(None, [PastCycle(NOW, None, [refused])], NOW).decisions[0].text.startswith("rejected (stop): place")


def test_the_arguments_of_a_line_exist() -> None:
    names = {*CreatePosition.__struct_encode_fields__, *PlaceOrder.__struct_encode_fields__}
    assert {"symbol", "side", "quantity", "leverage", "stop", "target", "timeExit", "limitPrice", "reduceOnly"} <= names
    assert {"stop", "target", "timeExit"} <= {*PlannedExit.__struct_encode_fields__}
    assert Side.SHORT.value == "SHORT"


@given(
    st.lists(st.sampled_from(["BTC", "1234.5678", "-0.12%", "σ", "94,000", "2025-01-02T12:00Z"]), max_size=40),
    st.booleans(),
)
def test_a_long_text_ends_with_a_whole_word(words: list[str], has_lines: bool) -> None:
    text = ("\n" if has_lines else " ").join(words)
    line = shortened(text, LINE_MAX)
    assert len(line) <= LINE_MAX
    kept = line.removesuffix("…").split()
    assert kept == words[: len(kept)]
    assert line.endswith("…") == (len(kept) < len(words))


@given(st.from_regex(r"[A-Z]{1,3}(:[0-9]{1,9}\.[0-9]{1,5}){1,12}", fullmatch=True))
def test_a_long_word_is_not_cut_within_a_figure(word: str) -> None:
    line = shortened(word, LINE_MAX)
    assert line == word or not re.search(r"\d…$", line)


def test_refused_calls_are_of_the_last_cycle_only() -> None:
    result = {"rule": "position", "reason": "there is none"}
    refused = PastCall("CLOSE_POSITION", "rejected", [{"symbol": "BTC"}], [result])
    cycles = [PastCycle(NOW, None, [refused])]
    assert remember(None, cycles, NOW).refused == ("closePosition BTC: there is none",)
    failed_since = NOW + timedelta(minutes=1)
    assert remember(None, cycles, failed_since).refused == ()
    assert remember(None, cycles, failed_since).looked_at == NOW
