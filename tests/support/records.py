"""Rows for tests of reading the records: models with runs, snapshots, trades and invocations."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID, uuid5

from support.books import DEFAULT_MARKETS

from trader.agents.domain.invocations import Invocation, InvocationStatus, ToolCall, ToolCallStatus
from trader.agents.domain.models import Model
from trader.agents.sql import invocations as agents_store
from trader.agents.sql.models import upsert_model
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection
from trader.exchange.domain.account import Account, Position, Run
from trader.exchange.domain.orders import Cause, Fill, OrderSide, Side
from trader.market.domain.markets import Market
from trader.portfolio.domain.histories import Snapshot
from trader.portfolio.sql.snapshots import insert_snapshots

START = datetime(2026, 3, 4, 0, 0, tzinfo=UTC)
"""A Wednesday."""

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
FILL = Fill(
    sequence=1, order_id=UUID(int=1), request_id=None, symbol="BTC", side=OrderSide.BUY, quantity=Decimal(1),
    price=Decimal(50_000), fee=Decimal(0), liquidation_fee=Decimal(0), maker=False, cause=Cause.ORDER, at=START,
)  # fmt: skip
_IDS = UUID("00000000-0000-0000-0000-0000000000aa")


def seen(*values: object) -> tuple[object, ...]:
    """Values as a tuple, to compare them with their expected values, such as a Decimal with an int."""
    return values


def equity_values(chunks: Sequence[bytes]) -> list[tuple[str, Decimal, datetime]]:
    """Return the records of a history in order: the model, its equity and the time."""
    records = json.loads(b"[%b]" % b",".join(chunks), parse_float=Decimal, parse_int=Decimal)
    return [
        (record["modelId"], record["netPortfolio"], datetime.fromisoformat(record["createdAt"])) for record in records
    ]


def id_of(*parts: object) -> UUID:
    return uuid5(_IDS, ":".join(str(part) for part in parts))


def make_run(account_id: str, number: int = 1, *, capital: str = "10000", at: datetime = START) -> Run:
    return Run(
        id=id_of("run", account_id, number),
        number=number,
        initial_capital=Decimal(capital),
        quote_currency="USDT",
        started_at=at,
    )


def make_account(account_id: str, cash: str = "10000", **fields: object) -> Account:
    """An account without positions that still has its initial cash."""
    run = make_run(account_id, capital=cash)
    return Account(**{"id": account_id, "run": run, "sequence": 1, "changed_at": START, **fields})  # type: ignore[arg-type]


def make_model(model_id: str, variant: VariantId = VariantId.APEX) -> Model:
    return Model(
        id=model_id,
        name=f"Model {model_id}",
        variant=variant,
        provider="rules",
        router_model_name=f"rules/{model_id}",
        created_at=START,
    )


def make_snapshot(account_id: str, at: datetime, net: Decimal | str, *, number: int = 1) -> Snapshot:
    value = Decimal(net)
    return Snapshot(
        account_id=account_id,
        run_id=id_of("run", account_id, number),
        net_portfolio=value,
        cash=Decimal(100),
        unrealized_pnl=value - 100,
        created_at=at,
        leverage=1.0,
    )


INSERT_ACCOUNT = """
INSERT INTO accounts AS a (id, created_at, changed_at) VALUES ($1, $2, $2)
ON CONFLICT (id) DO UPDATE SET sequence = a.sequence + 1
"""
END_RUN = "UPDATE runs SET ended_at = $2 WHERE account_id = $1 AND ended_at IS NULL"
INSERT_RUN = """
INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at) VALUES ($1, $2, $3, $4, $5, $6)
"""


async def add_run(conn: Connection, account_id: str, run: Run) -> None:
    """Start a run, ending the previous one."""
    await conn.execute(INSERT_ACCOUNT, account_id, run.started_at)
    await conn.execute(END_RUN, account_id, run.started_at)
    await conn.execute(
        INSERT_RUN, run.id, account_id, run.number, run.initial_capital, run.quote_currency, run.started_at
    )


async def add_model(
    conn: Connection, model_id: str, variant: VariantId = VariantId.APEX, *, capital: str = "10000"
) -> Model:
    """A model whose account is open."""
    model = make_model(model_id, variant)
    await upsert_model(conn, model)
    await add_run(conn, model_id, make_run(model_id, capital=capital))
    return model


async def add_curve(conn: Connection, model_id: str, now: datetime, percent: float = 1) -> None:
    """A value every five minutes of the last five hours, the last one so many percent above the first."""
    first = now.replace(second=0, microsecond=0) - 5 * HOUR
    await ensure_partitions(conn, first, now)
    values = [10_000 + step * 100 * percent / 59 for step in range(60)]
    await insert_snapshots(
        conn, [make_snapshot(model_id, first + 5 * n * MINUTE, f"{value:.2f}") for n, value in enumerate(values)]
    )


INSERT_TRADE = """
WITH posted AS (UPDATE accounts SET sequence = sequence + 1 WHERE id = $2)
INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged,
                    exit_notional, gross_pnl, fees, funding, net_pnl, close_reason, confidence, opened_at, funded_until,
                    closed_at)
VALUES ($1, $2, $3, 'BTC', $4, 'CLOSED', $5, $6, $7, $8, $9, $10, $11, $12, $13, 'order', $14, $15, $15, $16)
"""


async def add_trade(
    conn: Connection,
    account_id: str,
    closed_at: datetime,
    *,
    gross: str = "10",
    fees: str = "1",
    funding: str = "0",
    notional: str = "1000",
    side: str = "LONG",
    leverage: int | None = None,
    confidence: int | None = None,
    held: timedelta = HOUR,
    number: int = 1,
    label: object = "",
    quantity: str = "0.01",
) -> UUID:
    """A completed trade of BTC."""
    gain, entry = Decimal(gross), Decimal(notional)
    trade_id = id_of("trade", account_id, closed_at, label)
    await conn.execute(
        INSERT_TRADE,
        trade_id,
        account_id,
        id_of("run", account_id, number),
        side,
        Decimal(quantity),
        entry,
        entry / (leverage or 1),
        leverage is not None,
        entry + gain if side == "LONG" else entry - gain,
        gain,
        Decimal(fees),
        Decimal(funding),
        gain - Decimal(fees) + Decimal(funding),
        confidence,
        closed_at - held,
        closed_at,
    )
    return trade_id


async def add_invocation(
    conn: Connection,
    model_id: str,
    at: datetime,
    status: InvocationStatus = "completed",
    *,
    calls: tuple[ToolCallStatus, ...] = (),
) -> UUID:
    """Add a run as the service records it: opened, its tool calls, closed."""
    invocation = Invocation(
        id=id_of("invocation", model_id, at),
        model_id=model_id,
        status=status,
        started_at=at,
        finished_at=None if status == "running" else at + timedelta(seconds=5),
        failure_reason="it broke" if status in ("failed", "timeout") else None,
    )
    await agents_store.insert_invocation(conn, invocation)
    for number, call_status in enumerate(calls, start=1):
        await add_tool_call(conn, invocation.id, number, call_status, at)
    if status != "running":
        await agents_store.update_invocation(conn, invocation)
    return invocation.id


async def add_tool_call(
    conn: Connection, invocation_id: UUID, number: int, status: ToolCallStatus, at: datetime
) -> None:
    call = ToolCall(
        id=id_of("call", invocation_id, number),
        invocation_id=invocation_id,
        number=number,
        type="HOLDING",
        status=status,
        metadata={"raw": {"reason": "wait"}, "decisions": [], "results": []},
        created_at=at,
    )
    await agents_store.insert_tool_call(conn, call)


class FakeExchange:
    """The part of the exchange that the records use: accounts and marks, controlled by the test."""

    term = 0
    """As in a database that no service has used."""

    def __init__(self, *accounts: Account, marks: Mapping[str, str] | None = None) -> None:
        self.accounts: dict[str, Account] = {account.id: account for account in accounts}
        self.known_marks = {symbol: Decimal(mark) for symbol, mark in (marks or {}).items()}

    @property
    def markets(self) -> Mapping[str, Market]:
        return DEFAULT_MARKETS

    def marks(self) -> Mapping[str, Decimal]:
        return self.known_marks

    def account(self, account_id: str) -> Account:
        return self.accounts.get(account_id) or make_account(account_id)

    def put(self, account: Account) -> None:
        self.accounts[account.id] = account


def make_position(symbol: str = "BTC", *, quantity: str = "0.1", entry: str = "50000") -> Position:
    """A long position with its whole notional as margin."""
    notional = Decimal(quantity) * Decimal(entry)
    return Position(
        id=id_of("position", symbol),
        symbol=symbol,
        side=Side.LONG,
        quantity=Decimal(quantity),
        entry_notional=notional,
        margin=notional,
        opened_at=START,
        funded_until=START,
    )
