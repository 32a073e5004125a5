"""Strategy files as models of the service: decisions, states across restarts, and processes that fail or hang."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from support.trading_floor import Floor, open_floor

from trader.agents.domain.conversation import Turn
from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.domain.models import ModelConfiguration
from trader.agents.domain.view import ObservedFill
from trader.agents.models_file import read_models
from trader.agents.providers.strategy_process import StrategyProvider, check_strategy
from trader.agents.recorder import StoredStates
from trader.agents.strategy_files import load_strategy
from trader.core.errors import DatabaseUnavailable, SettingsError
from trader.core.money import ONE, ZERO
from trader.database.pool import Database, Page
from trader.exchange.domain.orders import Cause, OrderSide
from trader.strategies import build_view

OWN = """
import os, time
from trader.strategies import ClosePosition, CreatePosition, Holding, Side, Strategy

class Own(Strategy):
    intervals = ("1h", "4h")
    deadline_s = 0.3

    def __init__(self, symbol: str):
        self.symbol, self.cycles = symbol, 0

    def decide(self, view):
        print("this is no answer")
        self.cycles += 1
        market = view.markets[self.symbol]
        assert list(market.candles) == ["1h", "4h"] and "DATABASE_URL" not in os.environ
        FAILURE
        if view.position(self.symbol) is None:
            yield CreatePosition(symbol=self.symbol, side=Side.LONG, quantity=0.1, leverage=2,
                                 stop=market.price * 9 / 10, invalidation="none", confidence=50)
        else:
            yield ClosePosition(symbol=self.symbol, fraction=0.5)
        yield Holding(reason=f"cycle {self.cycles} with {os.environ.get('STRATEGY_TEST')}")

    def save(self):
        return {"cycles": self.cycles}

    def load(self, state):
        self.cycles = state["cycles"]
"""


async def cycle(floor: Floor) -> FinishedInvocation:
    await floor.cycle(after_s=60)
    return (await floor.invocations.finished(page=Page(1)))[0]


async def add(floor: Floor, tmp_path: Path, failure: str = "pass") -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("FAILURE", failure))
    configuration = ModelConfiguration(params={"symbol": "BTC"})
    await floor.add("own", provider="strategy", router_model=f"{file}:Own", configuration=configuration)


async def test_a_strategy_trades_and_its_state_outlives_its_process(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATEGY_TEST", "one")
    monkeypatch.setenv("DATABASE_URL", "postgresql://user:secret@nowhere/trader")
    provider = StrategyProvider(StoredStates(database))
    async with open_floor(database, provider=provider) as floor:
        await add(floor, tmp_path)
        opened = await cycle(floor)
        assert (opened.invocation.status, opened.invocation.failure_reason) == ("completed", None)
        assert opened.invocation.response == "cycle 1 with one"
        assert floor.exchange.account("own").positions.keys() == {"BTC"}
        await provider.close()  # as at the end of the service; the next process finds the state in the database
        reduced = await cycle(floor)
        assert reduced.invocation.response == "cycle 2 with one"
        assert [call.type for call in reduced.tool_calls] == ["CLOSE_POSITION"]
        await provider.close()


NOTING = """
from trader.strategies import CreatePosition, Holding, Side

class Noting:
    told = ()

    def on_fill(self, fill):
        self.told = (*self.told, f"{fill.side} {fill.quantity.normalize()} {fill.symbol} by {fill.cause}")

    def decide(self, view):
        yield Holding(reason="; ".join(self.told) or "nothing")
        if not view.positions:
            yield CreatePosition(symbol="BTC", side=Side.LONG, quantity=0.1, leverage=2,
                                 stop=view.markets["BTC"].price / 2, invalidation="none", confidence=50)
"""


async def test_a_new_process_is_told_of_the_fills_since_the_last_cycle(database: Database, tmp_path: Path) -> None:
    file, provider = tmp_path / "noting.py", StrategyProvider(StoredStates(database))
    file.write_text(NOTING)
    async with open_floor(database, provider=provider) as floor:
        await floor.add("noting", provider="strategy", router_model=f"{file}:Noting")
        heard = []
        for _ in range(3):
            heard.append((await cycle(floor)).invocation.response)
            await provider.close()
        assert heard == ["nothing", "buy 0.1 BTC by order", "nothing"]


def test_a_strategy_that_gains_or_loses_on_fill_keeps_its_state_and_hears_no_old_fills(tmp_path: Path) -> None:
    fills = (ObservedFill(
        sequence=7, at=datetime(2025, 1, 6, tzinfo=UTC), symbol="BTC", side=OrderSide.BUY, quantity=ONE, price=ONE,
        fee=ZERO, maker=False, cause=Cause.STOP, order_id=None,
    ),)  # fmt: skip
    source = "class Own:\n told = None\n def decide(self, view): pass\n"
    source += " def save(self): return self.told\n def load(self, state): self.told = state\n"
    plain, noting = tmp_path / "plain.py", tmp_path / "noting.py"
    plain.write_text(source)
    noting.write_text(source + " def on_fill(self, fill): self.told = fill.sequence\n")
    view = msgspec.structs.replace(build_view({"BTC": [1, 2]}), fills=fills)

    with_hook = load_strategy(f"{noting}:Own", {})
    with_hook.load(3)
    with_hook.decide(view)
    assert with_hook.save() == {"lastFill": 7, "state": 3}
    with_hook.decide(msgspec.structs.replace(view, fills=(*fills, msgspec.structs.replace(fills[0], sequence=9))))
    assert with_hook.save() == {"lastFill": 9, "state": 9}
    without = load_strategy(f"{plain}:Own", {})
    without.load(with_hook.save())
    assert without.save() == 9


COUNTING = """
from trader.strategies import Holding

class Counting:
    count = 0

    def decide(self, view):
        self.count += 1
        yield Holding(reason=f"cycle {self.count}")

    def save(self):
        return None if self.count == 4 else self.count

    def load(self, state):
        self.count = state
"""


class FailingStates(StoredStates):
    """A store whose saves fail a given number of times, after the commit or instead of it."""

    fail: Literal["before", "after"] | None = None
    turn: Turn

    async def save(self, state: Any, turn: Turn, replaced: datetime | None) -> datetime | None:
        fail, self.fail, self.turn = self.fail, None, turn
        if fail == "before":
            raise DatabaseUnavailable("locked")
        saved = await super().save(state, turn, replaced)
        if fail == "after":
            raise DatabaseUnavailable("not answering")
        return saved


async def test_a_strategy_and_its_stored_state_never_part(database: Database, tmp_path: Path) -> None:
    """Neither after failed saves, nor under a clock set back, nor after others have led; no state is one as well."""
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)
    states = FailingStates(database)
    provider = StrategyProvider(states)
    async with open_floor(database, provider=provider) as floor:
        await floor.add("counting", provider="strategy", router_model=f"{file}:Counting")

        async def decided() -> str | None:
            done = (await cycle(floor)).invocation
            stored = await states.load("counting")
            assert stored is not None
            if done.status == "completed":
                assert done.response == f"cycle {stored.state or 4}"
            return done.response

        assert await decided() == "cycle 1"
        states.fail = "before"
        assert await decided() is None
        assert await decided() == "cycle 2"
        states.fail = "after"
        assert await decided() is None
        async with database.connection() as conn:  # a clock was ahead, and is right again
            await conn.execute("UPDATE strategy_states SET decided_at = decided_at + interval '3 hours'")
        assert await decided() == "cycle 4", "its state is none from here on"
        stored = await states.load("counting")
        assert stored is not None
        assert stored.state is None
        await provider.close()
        assert await decided() == "cycle 1"
        taken = await states.load("counting")
        assert taken is not None
        await states.save(40, states.turn, taken.decided_at)
        assert await decided() == "cycle 41", "another process has led meanwhile"
        late = await states.save(7, states.turn, taken.decided_at)
        assert late is None, "a save of the earlier leader comes too late"
        assert await decided() == "cycle 42"
        await provider.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("1 / 0", "own.py:18: decide raised ZeroDivisionError: division by zero"),
        ("while True: pass", "own.py:18: decide took longer than its deadline_s of 0.3 s"),
        (
            "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); time.sleep(60)",
            "the strategy's process did not answer within 1.3 s",
        ),
        ("os._exit(3)", "the strategy's process has ended"),
    ],
)
async def test_a_failing_or_hanging_process_loses_only_its_own_cycle(
    database: Database, tmp_path: Path, failure: str, reason: str
) -> None:
    provider = StrategyProvider(StoredStates(database))
    async with open_floor(database, provider=provider) as floor:
        await add(floor, tmp_path, f"if view.at.minute == 2:\n            {failure}")
        assert (await cycle(floor)).invocation.status == "completed"
        failed = await cycle(floor)
        assert failed.invocation.status == "failed"
        assert reason in (failed.invocation.failure_reason or "")
        again = await cycle(floor)
        assert (again.invocation.status, again.invocation.response) == ("completed", "cycle 2 with None")
        await provider.close()


def test_the_models_file_accepts_a_strategy_next_to_it_and_names_its_mistakes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("FAILURE", "pass"))
    file, row = tmp_path / "models.toml", 'id = "own"\nvariant = "Apex"\nprovider = "strategy"\n'
    file.write_text(f'[[models]]\n{row}router_model = "own.py:Own"\nparams = {{symbol = "BTC"}}\nnetwork = true\n')
    (entry,) = read_models(file, None)
    assert entry.router_model == f"{tmp_path / 'own.py'}:Own"
    assert entry.configuration.params == {"symbol": "BTC"}
    assert entry.configuration.network
    file.write_text(
        f'[[models]]\n{row}router_model = "own.py:Own"\nparams = {{size = 1}}\nprice = {{input = 1, output = 1}}\n'
    )
    with pytest.raises(SettingsError) as raised:
        read_models(file, None)
    assert "Own has no parameter 'size'; it has symbol" in str(raised.value)
    assert "only an AI model has it, not strategy" in str(raised.value)
    assert os.fspath(tmp_path) in str(raised.value)


def test_a_service_refuses_a_history_longer_than_it_keeps(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("deadline_s", "history = 1000\n    deadline_s"))
    assert check_strategy(f"{file}:Own", {"symbol": "BTC"}) == []
    file.write_text(OWN.replace("deadline_s", "history = 1001\n    deadline_s"))
    assert check_strategy(f"{file}:Own", {"symbol": "BTC"}) == [
        f"{file}: Own.history is 1001; a service shows at most 1000 closed candles of each interval"
    ]
