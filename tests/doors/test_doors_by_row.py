"""A setting, a procedure, a stream, a market, a preset and a variant are each one row, as docs/doors.md says."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import orjson
import pytest
from support.process import ROOT


class EditedCopy:
    """A copy of `trader` in a separate folder, run by a separate process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Bytecode included: only edited files are compiled again.
        shutil.copytree(ROOT / "trader", folder / "trader")
        shutil.copy(ROOT / "schema.sql", folder)

    def insert(self, file: str, text: str, *, before: str) -> None:
        """Insert text before the only occurrence of another text in a file of the package."""
        path = self.folder / "trader" / file
        whole = path.read_text(encoding="utf-8")
        assert whole.count(before) == 1, f"{file} has {before!r} {whole.count(before)} times"
        path.write_text(whole.replace(before, text + before), encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        (self.folder / "trader" / file).write_text(text, encoding="utf-8")

    def fails(self, code: str) -> str:
        """Run code that fails. Return the last line of its error."""
        done = self._run(code)
        assert done.returncode, done.stdout
        return done.stderr.strip().splitlines()[-1]

    def shows(self, code: str) -> object:
        """Run code. Return the JSON that it prints."""
        done = self._run(code)
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout)

    def _run(self, code: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, "-c", f"import json\n{code}"],
            cwd=self.folder, env=environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip


pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tmp_path: Path) -> EditedCopy:
    return EditedCopy(tmp_path)


DOCUMENT = f"""
import sys
sys.path.append({str(ROOT / "scripts")!r})
import make_contract, msgspec
from trader.api import openapi
from trader.api.registry import REGISTRY, load_procedures
from trader.settings.settings import Settings
load_procedures()
document = json.loads(msgspec.json.encode(openapi.make_document(REGISTRY, Settings.load({{}}, None, demo=True))))
contract = make_contract.declarations(document)
"""
LOAD = "from trader.settings.settings import Settings\nload = lambda **texts: Settings.load(texts, None, demo=True)\n"


def test_a_setting_is_a_field(copy: EditedCopy) -> None:
    field = """    greeting: Annotated[str, Variable(
        "GREETING", "hello", forms.one_of("hello", "goodbye"), "What the service says.")]
"""
    copy.insert("settings/settings.py", field, before="    port: Annotated[int, Variable(\n")
    assert copy.shows(LOAD + 'print(json.dumps([load().greeting, load(GREETING="goodbye").greeting]))') == [
        "hello", "goodbye",
    ]  # fmt: skip
    assert "GREETING: expected one of hello, goodbye" in copy.fails(LOAD + 'load(GREETING="moin")')
    listed = """
import contextlib, io
from trader.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(["check", "--settings", "--demo"])
print(json.dumps(out.getvalue()))
"""
    assert "GREETING  " in str(copy.shows(listed))


def test_a_procedure_is_a_decorated_function_and_its_structs(copy: EditedCopy) -> None:
    copy.write(
        "api/procedures/greetings.py",
        textwrap.dedent('''
        """Greetings."""

        from trader.api.context import Context
        from trader.api.registry import procedure
        from trader.api.schemas.common import Input, Wire


        class GreetInput(Input):
            """Whom to greet."""

            name: str


        class GreetOutput(Wire):
            """The greeting."""

            text: str


        @procedure("greetings.greet")
        async def greet(context: Context, request: GreetInput) -> GreetOutput:
            """Greet somebody."""
            return GreetOutput(text=f"hello {request.name}")
        '''),
    )
    call = """
import asyncio
from types import SimpleNamespace
from trader.api.envelope import BodyStyle
from trader.api.rpc import Dispatcher, Target
from trader.operations.access import ANYBODY

dispatcher = Dispatcher(REGISTRY, SimpleNamespace(settings=Settings.load({}, None, demo=True)))
target = Target(dispatcher.procedures["greetings.greet"], BodyStyle.PLAIN)
answer = asyncio.run(dispatcher.call(target, b'{"name": "Ada"}', ANYBODY, "1"))
"""
    shown = copy.shows(
        DOCUMENT + call + 'print(json.dumps([list(document["paths"]), contract, json.loads(answer.body)]))'
    )
    assert isinstance(shown, list)
    assert "/api/rpc/greetings.greet" in shown[0]
    assert "GreetOutput" in shown[1]
    assert shown[2] == {"text": "hello Ada"}


def test_a_stream_is_a_row(copy: EditedCopy) -> None:
    copy.insert(
        "api/stream_table.py",
        '    EventStream("greetings", "Greetings", "Sent at a new price.", list[str], _greetings, (PricesChanged,)),\n',
        before='    EventStream(\n        "workflow",\n',
    )
    copy.insert(
        "api/stream_table.py",
        'async def _greetings(context: Context) -> list[str]:\n    return ["hello"]\n\n\n',
        before="STREAMS: Final = (\n",
    )
    subscribe = """
import asyncio
from datetime import UTC, datetime
from trader.api.stream_table import state_loaders
from trader.api.streams import Broadcasters
from trader.api.subscriber import Subscriber
from trader.core.clock import SystemClock
from trader.core.events import EventBus

async def subscribed():
    hubs = Broadcasters(state_loaders(None), EventBus(), SystemClock())
    await hubs.all["greetings"].start()
    subscriber = Subscriber()
    hubs.all["greetings"].add(subscriber)
    await subscriber.wait(10)
    message = subscriber.take()
    await hubs.close()
    return message.decode()
"""
    shown = copy.shows(
        DOCUMENT + subscribe + 'print(json.dumps([list(document["paths"]), contract, asyncio.run(subscribed())]))'
    )
    assert isinstance(shown, list)
    assert "/api/events/greetings" in shown[0]
    assert "greetings: string[]" in shown[1]
    assert shown[2] == 'data: ["hello"]\n\n'


MARKET = """        SimulatedMarket(
            _market("LINK", "0.001", "0.1", 10, "0.05"),
            Character(level=20, beta=1.3, own_volatility=0.6, minute_volume=150_000),
            Calm(half_spread_bp=0.9{depth}),
        ),
"""
QUOTE = """
from trader.market.sources.rows import preset_rows
from trader.market.sources.synthetic import SyntheticSource
settings = load(MARKETS="BTC,LINK")
source = SyntheticSource(7, settings.markets, preset_rows(settings.venue_preset, None))
print(json.dumps(float(source.tick(1_750_000_000).quotes["LINK"].mark)))
"""


def test_a_market_that_ships_is_a_row_and_one_that_lacks_its_depth_does_not_import(copy: EditedCopy) -> None:
    before = '        SimulatedMarket(\n            _market("DOGE"'
    copy.insert("market/domain/markets.py", MARKET.format(depth=", depth=50_000"), before=before)
    mark = copy.shows(LOAD + QUOTE)
    assert isinstance(mark, float)
    assert 5 < mark < 80
    copy.insert("market/domain/markets.py", MARKET.format(depth="").replace("LINK", "UNI"), before=before)
    assert "missing 1 required positional argument: 'depth'" in copy.fails("import trader.market.domain.markets")


PRESET = """
[dydx]
markets = [
  { symbol = "BTC", tick = "1", lot = "0.0001", min_notional = "5", leverage_max = 20, maintenance_rate = "0.03" },
]

[dydx.presets]
dydx = { SIM_TAKER_FEE_BPS = "5.5" }
"""
SOURCES = '\n[dydx.sources]\n"fees" = "its page of fees, without a date"\n'
FIGURES = """
from trader.market.sources.rows import preset_rows
settings = load(VENUE_PRESET="dydx")
print(json.dumps([str(settings.taker_fee_bps), str(preset_rows(settings.venue_preset, None)["BTC"].rules.tick)]))
"""


def test_a_preset_is_a_row_with_sources(copy: EditedCopy) -> None:
    file = copy.folder / "trader" / "market" / "presets.toml"
    shipped = file.read_text(encoding="utf-8")
    file.write_text(shipped + PRESET + SOURCES, encoding="utf-8")
    assert copy.shows(LOAD + FIGURES) == ["5.5", "1"]
    file.write_text(shipped + PRESET, encoding="utf-8")
    assert "missing required field `sources`" in copy.fails(LOAD)
    file.write_text(shipped + PRESET.replace('tick = "1", ', "") + SOURCES, encoding="utf-8")
    assert "missing required field `tick`" in copy.fails(LOAD + FIGURES)


VARIANT = """    Variant(
        id=VariantId.CAUTIOUS,
        label="Cautious",
        description="Holds",
        temperature=0.1,
        color="#123456",
        prompt=read_prompt(VariantId.CAUTIOUS),
        limits=Apex.limits,
        intervals=Apex.intervals,
        agent=Apex,
    ),
"""


STORED = """
import asyncio
import os
from datetime import UTC, datetime
from trader.agents.domain.models import Model
from trader.agents.sql.models import select_models, upsert_model
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.database.schema import apply_schema

async def stored():
    database = await Database.connect(os.environ["DOOR_DSN"])
    await apply_schema(database)
    ada = Model(
        id="ada", name="Ada", variant=VariantId.CAUTIOUS, provider="rules", router_model_name="rules/cautious",
        created_at=datetime(2025, 1, 1, tzinfo=UTC),
    )
    async with database.transaction() as conn:
        await upsert_model(conn, ada)
        models = await select_models(conn)
    await database.close()
    return [model.variant for model in models]

print(json.dumps(asyncio.run(stored())))
"""


def test_a_variant_is_one_definition_for_its_id(copy: EditedCopy, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.insert("core/variant_id.py", '    CAUTIOUS = "Cautious"\n', before='    SOVEREIGN = "Sovereign"\n')
    assert "every variant must be defined once" in copy.fails("import trader.agents.variants")
    copy.insert("agents/variants.py", VARIANT, before="    Variant(\n        id=VariantId.SOVEREIGN,")
    assert "cautious.md" in copy.fails("import trader.agents.variants")
    copy.write("agents/prompts/cautious.md", "You hold.")
    listed = "from trader.agents.variants import VARIANTS\n" + DOCUMENT
    listed += 'print(json.dumps([list(VARIANTS), document["components"]["schemas"]["VariantId"]["enum"]]))'
    shown = copy.shows(listed)
    assert isinstance(shown, list)
    assert shown[0] == ["Apex", "Trendsurfer", "Contrarian", "Cautious", "Sovereign"]
    assert sorted(shown[1]) == sorted(shown[0])
    monkeypatch.setenv("DOOR_DSN", dsn)  # a database of this version, to which a start adds the ID
    assert copy.shows(STORED) == ["Cautious"]
