"""Asks a model: a rule finds the moment, and a language model says which side, or none.

trader lab candles make candles
STRATEGY_API_KEY=… trader lab backtest --data candles --strategy docs/examples/ask_model.py:AskModel --param model=…
"""

import json
import os
import urllib.request
from collections.abc import Iterator

from trader.strategies import CreatePosition, Decision, ObservedMarket, Side, Strategy, VariantId, View


class AskModel(Strategy):
    variant = VariantId.APEX
    intervals = ("15m",)
    deadline_s = 60.0  # an answer takes a while

    def __init__(self, model: str, base_url: str = "https://openrouter.ai/api/v1") -> None:
        self.model, self.base_url = model, base_url

    def decide(self, view: View) -> Iterator[Decision]:
        if view.at.minute % 15 or view.at.second:  # when a candle has closed
            return
        for symbol, market in view.markets.items():
            rsi = market.indicators["15m"].rsi
            if rsi is not None and not 30 < rsi < 70 and view.position(symbol) is None and not market.stale:
                side = self._ask(market)
                if side is not None:
                    yield self._entry(view, market, side)

    def _ask(self, market: ObservedMarket) -> Side | None:
        closes = [candle.close for candle in market.candles["15m"]][-24:]
        question = f"Closes of {market.symbol}, 15 minutes apart: {closes}. Answer LONG, SHORT or NONE, nothing else."
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('STRATEGY_API_KEY')}"}
        request = urllib.request.Request(f"{self.base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=50) as response:
            answer = json.load(response)["choices"][0]["message"]["content"].strip().upper()
        return Side(answer) if answer in ("LONG", "SHORT") else None

    def _entry(self, view: View, market: ObservedMarket, side: Side) -> Decision:
        price, equity = float(market.price), float(view.account.equity)
        return CreatePosition(
            symbol=market.symbol,
            side=side,
            quantity=0.2 * equity / price,
            leverage=2,
            stop=price * (1 - 0.01 * side.direction),
            target=price * (1 + 0.02 * side.direction),
            invalidation="the move fails",
            confidence=50,
        )
