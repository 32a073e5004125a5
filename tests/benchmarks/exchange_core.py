"""Speed of the exchange's pure core on one core, each figure beside a plain reference loop of the same run.

    python tests/benchmarks/exchange_core.py

Market orders: orders that walk three levels of a book, so each is three fills; the reference does the same walk and
the same sums on bare local variables. Review: one update of every market for 1,000 accounts of 3 positions with
exit plans; the reference computes nothing but the equity and maintenance of each.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from time import process_time

from trader.domain.exchange import rules as exchange
from trader.domain.exchange.account import Account, Run
from trader.domain.exchange.ledger import Rules, row_id
from trader.domain.exchange.orders import ExitPlan, Order, OrderSide
from trader.domain.exchange.tick_rules import Moment, apply_tick
from trader.domain.market.markets import MARKETS, PLAIN_FUNDING_RATE, Book, Level, Quote

AT = datetime(2025, 2, 3, 1, 30, tzinfo=UTC)
RULES = Rules(dict(MARKETS), Decimal("0.0005"), Decimal("0.0002"))
PRICES = {"BTC": Decimal("98000.5"), "ETH": Decimal("2785.12"), "SOL": Decimal("207.123")}
ACCOUNTS, ORDERS, LEVELS, ROUNDS = 1_000, 1_000, 3, 25
FILLS_GOAL, REVIEW_GOAL_MS = 50_000, 50.0


def rate_of_hour(symbol: str, boundary: datetime) -> Decimal:
    return PLAIN_FUNDING_RATE


def moment_at(at: datetime, shift: int = 0) -> Moment:
    quotes = {}
    for symbol, price in PRICES.items():
        tick, mid = MARKETS[symbol].tick, price + shift * MARKETS[symbol].tick
        bids = tuple(Level(mid - n * tick, Decimal("0.5")) for n in range(1, 11))
        asks = tuple(Level(mid + n * tick, Decimal("0.5")) for n in range(1, 11))
        quotes[symbol] = Quote.of(Book(symbol, at, bids, asks))
    return Moment(at, quotes, {symbol: quote.mark for symbol, quote in quotes.items()}, frozenset(quotes))


def open_account(name: str, capital: int = 10_000_000) -> Account:
    run = Run(id=row_id(name, 0), number=1, initial_capital=Decimal(capital), quote_currency="USDT", started_at=AT)
    return Account(id=name, run=run, sequence=0, changed_at=AT)


def market_order(side: OrderSide, symbol: str = "BTC", plan: ExitPlan | None = None) -> Order:
    return Order(
        account_id="speed", symbol=symbol, side=side, quantity=Decimal("1.2"), leverage=Decimal(5), exit_plan=plan
    )


def place_orders() -> int:
    """Buys and sells in turn, each on a new book; gives the number of fills."""
    account, fills = open_account("speed"), 0
    orders = market_order(OrderSide.BUY), market_order(OrderSide.SELL)
    for number, moment in enumerate(MOMENTS):
        posting = exchange.place(account, orders[number % 2], moment, RULES, rate_of_hour)
        account = posting.account
        fills += len(posting.fills)
    return fills


def plain_orders() -> int:
    """The same walks, sums and fees without an account: what the arithmetic alone costs."""
    cash = cost = held = Decimal(0)
    fills = 0
    for number, moment in enumerate(MOMENTS):
        book, left = moment.quotes["BTC"].book, Decimal("1.2")
        for level in book.bids if number % 2 else book.asks:
            quantity = min(left, level.quantity)
            notional = quantity * level.price
            cash -= notional * RULES.taker_rate
            cost += -notional if number % 2 else notional
            held += -quantity if number % 2 else quantity
            left -= quantity
            fills += 1
            if not left:
                break
    return fills


def accounts_with_positions() -> list[Account]:
    accounts = []
    for number in range(ACCOUNTS):
        account = open_account(f"account-{number}")
        for symbol, price in PRICES.items():
            plan = ExitPlan(stop=price * Decimal("0.9"), target=price * Decimal("1.1"))
            order = market_order(OrderSide.BUY, symbol, plan)
            account = exchange.place(account, order, moment_at(AT), RULES, rate_of_hour).account
        accounts.append(account)
    return accounts


def review_all(accounts: list[Account], moment: Moment) -> None:
    for account in accounts:
        assert apply_tick(account, moment, RULES, rate_of_hour) is None


def plain_review(accounts: list[Account], moment: Moment) -> None:
    marks, markets = moment.marks, RULES.markets
    for account in accounts:
        equity = account.run.initial_capital + account.realized - account.fees + account.funding
        maintenance = Decimal(0)
        for symbol, position in account.positions.items():
            value = position.quantity * marks[symbol]
            equity += value - position.entry_notional
            maintenance += value * markets[symbol].maintenance_rate
        assert equity > maintenance


def fastest(action: Callable[[], object]) -> float:
    """Processor seconds of the fastest of several rounds, so that what else runs on the machine does not count."""
    times = []
    for _ in range(ROUNDS):
        begin = process_time()
        action()
        times.append(process_time() - begin)
    return min(times)


MOMENTS = [moment_at(AT + timedelta(milliseconds=number)) for number in range(ORDERS)]


def main() -> None:
    fills = place_orders()
    assert fills == plain_orders() == ORDERS * LEVELS
    engine, plain = fills / fastest(place_orders), fills / fastest(plain_orders)
    print(f"fills per second     {engine:>12,.0f}   goal ≥ {FILLS_GOAL:,}   bare loop {plain:,.0f}")
    accounts, later = accounts_with_positions(), moment_at(AT + timedelta(seconds=1), shift=10)
    ours = fastest(lambda: review_all(accounts, later)) * 1000
    reference = fastest(lambda: plain_review(accounts, later)) * 1000
    print(f"review of {ACCOUNTS:,} × 3   {ours:>10.1f} ms   goal < {REVIEW_GOAL_MS:g} ms  bare loop {reference:.1f} ms")


if __name__ == "__main__":
    main()
