"""Write the table of docs/doors.md, with what each door offers today, from the code's own tables.

`python scripts/make_doors.py` writes it; with `--check` it only compares it (exit code 1: out of date).
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from trader.agents.providers.provider import PROTOCOLS
from trader.agents.variants import VARIANTS
from trader.api.stream_table import STREAMS
from trader.live.venues import VENUES
from trader.market.domain.markets import MARKETS
from trader.operations.notifications import SINKS as ALARM_SINKS
from trader.record.anchors import SINKS as ANCHOR_SINKS
from trader.settings.providers import PROVIDERS
from trader.settings.settings import PRESETS

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "doors.md"
START, END = "<!-- doors:start -->", "<!-- doors:end -->"
ROWS, CLASSES = "tests/doors/test_doors_by_row.py", "tests/doors/test_doors_by_class.py"


class Door(NamedTuple):
    """Something that can be added: what it is, where it lives, what exists today, and the test that adds one."""

    name: str
    what: str
    where: str
    today: str
    test: str


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


DOORS: Final = (
    Door(
        "a setting",
        "a field of `Settings`, annotated with its `Variable`: name, default, form, meaning",
        "`settings/settings.py`, forms in `settings/forms.py`",
        "[configuration.md](configuration.md)",
        f"{ROWS}::test_a_setting_is_a_field",
    ),
    Door(
        "a procedure",
        "a function decorated with `@procedure`, and the structs of its input and output",
        "`api/procedures`, `api/schemas`",
        "[api.md](api.md)",
        f"{ROWS}::test_a_procedure_is_a_decorated_function_and_its_structs",
    ),
    Door(
        "an event stream",
        "a row: name, texts, struct, the function that loads its state, the events that change it",
        "`STREAMS` in `api/stream_table.py`",
        _names(stream.name for stream in STREAMS),
        f"{ROWS}::test_a_stream_is_a_row",
    ),
    Door(
        "a market",
        "a row of figures, including depth; a row that lacks a figure is refused",
        "`market/domain/markets.py`, or the file that `MARKETS_FILE` names ([exchange.md](exchange.md#market-sources))",
        _names(MARKETS),
        f"{ROWS}::test_a_market_that_ships_is_a_row_and_one_that_lacks_its_depth_does_not_import",
    ),
    Door(
        "a venue preset",
        "a row: the rules of its markets, settings, and the sources of both",
        "`market/presets.toml`",
        _names(PRESETS),
        f"{ROWS}::test_a_preset_is_a_row_with_sources",
    ),
    Door(
        "a variant",
        "an ID and one definition: fields, prompt, limits, rule agent; the database needs no migration",
        "`core/variant_id.py`, `agents/variants.py`, `agents/prompts`",
        _names(VARIANTS),
        f"{ROWS}::test_a_variant_is_one_definition_for_its_id",
    ),
    Door(
        "an AI provider",
        "a row: URL, key variable, protocol, and any differences from that protocol",
        "`[[providers]]` of the models file ([models.md](models.md)), or `PROVIDERS` in `settings/providers.py`",
        _names(PROVIDERS),
        f"{CLASSES}::test_a_provider_is_a_row_of_the_models_file_and_its_protocol_a_module_and_a_row",
    ),
    Door(
        "a provider protocol",
        "a module whose class implements `ProviderProtocol`, or `StreamedProtocol` for streamed answers, and a row",
        "`agents/providers`, `PROTOCOLS` in `agents/providers/provider.py`",
        _names(PROTOCOLS),
        f"{CLASSES}::test_a_provider_is_a_row_of_the_models_file_and_its_protocol_a_module_and_a_row",
    ),
    Door(
        "a strategy",
        "a class with `decide(view)`",
        "any Python file",
        "[strategies.md](strategies.md)",
        "tests/backtest/test_strategies.py::test_the_guard_judges_a_strategy_unless_it_is_off",
    ),
    Door(
        "an agent",
        "a key from `trader keys add`",
        "anywhere: it calls the service, or the service calls it",
        "[agents.md](agents.md)",
        "tests/api/agents/test_external_agents.py::test_a_key_belongs_to_one_account",
    ),
    Door(
        "a venue",
        "a package with the protocol of `live/venue.py`, its row, its presets; copy `tests/support/venue_template.py`",
        "`live/<venue>`, `VENUES` in `live/venues.py`, `trader/market/presets.toml`",
        _names(VENUES),
        "tests/doors/test_venue_packages.py::test_a_model_trades_at_a_venue_that_is_a_row_of_the_table",
    ),
    Door(
        "an alarm sink",
        "a class that implements `NotificationSink`, and the row of its format; `NOTIFY_URL` selects it",
        "`SINKS` in `operations/notifications.py`, `NOTIFY_FORMATS` in `settings/forms.py`",
        _names(ALARM_SINKS),
        f"{CLASSES}::test_a_sink_of_alarms_is_a_class_and_a_row",
    ),
    Door(
        "an anchor sink",
        "a class that implements `AnchorSink`, and the row of its scheme; `ANCHOR_URL` selects it",
        "`SINKS` in `record/anchors.py`, `ANCHOR_SCHEMES` in `settings/forms.py`",
        _names(ANCHOR_SINKS),
        f"{CLASSES}::test_a_sink_of_anchors_is_a_class_and_a_row",
    ),
)


def document_with_table(document: str) -> str:
    """Return the document with the current table between its markers."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{DOCUMENT.name} has no {START} and {END}")
    cells = [("to add", "write", "in", "existing ones", "tested by"), ("---",) * 5]
    cells += [(door.name, door.what, door.where, door.today, f"`{door.test}`") for door in DOORS]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> int:
    present = DOCUMENT.read_text(encoding="utf-8")
    current = document_with_table(present)
    if "--check" in sys.argv[1:]:
        if present != current:
            print(f"{DOCUMENT.name} is out of date; run scripts/make_doors.py")
        return int(present != current)
    DOCUMENT.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
