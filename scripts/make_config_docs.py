"""Write the settings of docs/configuration.md and .env.example, and the presets of docs/exchange.md, from the code.

`python scripts/make_config_docs.py` writes the files; with `--check` it only compares them (exit code 1: out of date).
"""

import sys
import textwrap
from pathlib import Path

from trader.core.money import format_decimal
from trader.exchange.protocol import LIQUIDATIONS
from trader.market.domain.markets import Market
from trader.market.sources.rows import PRESET_MARKETS
from trader.settings.providers import PROVIDERS
from trader.settings.settings import PRESET_VENUES, PRESETS, VARIABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PRESET_FIGURES = (
    "SIM_TAKER_FEE_BPS", "SIM_MAKER_FEE_BPS", "SIM_LATENCY_MS", "FUNDING_INTERVAL_H", "LIQUIDATION_FEE_BPS",
)  # fmt: skip


def configuration_table() -> str:
    """Return the settings as a Markdown table."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for variable in VARIABLES.values():
        default = variable.shown_default or (f"`{variable.default}`" if variable.default else "none")
        rows.append(f"| `{variable.name}` | {default} | {variable.meaning.replace('|', chr(92) + '|')} |")
    keys, addresses = (", ".join(f"`{name.upper()}_{part}`" for name in PROVIDERS) for part in ("API_KEY", "BASE_URL"))
    rows += [
        f"| {keys} | none | Keys of AI providers. Further ones, `…_KEY1`, `…_KEY_2` and so on, share the load. |",
        f"| {addresses} | the provider's own | Another server with the provider's protocol; a key is optional. |",
    ]
    return "\n".join(rows)


def preset_table() -> str:
    """Return the settings of every preset as a Markdown table."""
    plain = {variable.name: variable.default for variable in VARIABLES.values()}
    return "\n".join(
        [
            "| preset | taker | maker | latency (ms) | funding every (h) | liquidation fee | a liquidation |",
            "|---|---|---|---|---|---|---|",
            *(
                _row(preset, *(own.get(name, plain[name]) for name in PRESET_FIGURES), _steps(preset))
                for preset, own in PRESETS.items()
            ),
        ]
    )


def _steps(preset: str) -> str:
    """Describe how a preset liquidates, unless it does so like the first one."""
    first, rule = next(iter(PRESETS)), LIQUIDATIONS[preset]
    if preset != first and rule == LIQUIDATIONS[first]:
        return f"as {first}"
    whole = "below 10 × the minimum" if rule.whole_up_to is None else f"up to {rule.whole_up_to:,}"
    text = f"{format_decimal(100 * rule.part)} % of the position per step, all of it {whole}"
    if rule.cooldown_s:
        text += f" or within {rule.cooldown_s} s after a partial step"
    text += f"; until equity > {rule.until} × maintenance"
    limit = f"{rule.backstop:.4f} × maintenance" if rule.backstop else "0"
    return f"{text}; below {limit} a liquidator takes over everything"


def market_table() -> str:
    """Return the rules of every market by venue as a Markdown table."""
    lines = [
        "| venue | market | tick | lot | minimum | max leverage | maintenance rate, and above which notional |",
        "|---|---|---|---|---|---|---|",
    ]
    for venue, figures in PRESET_VENUES.items():
        rows = PRESET_MARKETS[next(iter(figures.presets))]
        lines += [_row(venue, *_rules(row.rules)) for row in rows.values()]
    return "\n".join(lines)


def source_table() -> str:
    """Return the sources of the presets' figures as a Markdown table."""
    sources = [(venue, *source) for venue, figures in PRESET_VENUES.items() for source in figures.sources.items()]
    return "\n".join(["| venue | figure | source |", "|---|---|---|", *(_row(*source) for source in sources)])


def _rules(market: Market) -> list[str]:
    tiers = [f"{tier.above:,.0f}: {format_decimal(round(tier.maintenance_rate, 4))}" for tier in market.tiers]
    figures = (market.tick, market.lot, market.min_notional)
    rates = "; ".join([format_decimal(market.maintenance_rate), *tiers])
    return [market.symbol, *map(format_decimal, figures), str(market.leverage_max), rates]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def filled(document: Path, **parts: str) -> str:
    """Return a document with these parts between their markers."""
    text = document.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, start, rest = text.partition(f"<!-- {name}:start -->")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if not start or not end:
            raise SystemExit(f"{document.name} has no part {name}")
        text = f"{before}{start}\n{part}\n{end}{after}"
    return text


def env_example() -> str:
    """Return an `.env` file that lists every setting with its meaning and sets none of them."""
    lines = [
        "# Settings of trader. Copy to .env in the folder where it runs, and set what you need.",
        "# The environment takes precedence over this file; an empty value means the default.",
    ]
    for variable in VARIABLES.values():
        lines += ["", *_comment(f"{variable.meaning} Default: {variable.default_text}.")]
        lines.append(f"# {variable.name}={'' if variable.shown_default else variable.default}")
    lines += ["", *_comment("AI providers: at least one, except with --demo. Further keys: ..._API_KEY_2 and so on.")]
    for provider in PROVIDERS:
        lines += [f"# {provider.upper()}_API_KEY=", f"# {provider.upper()}_BASE_URL="]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, width=100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def documents() -> dict[Path, str]:
    """Return every document that has generated parts, with these parts current."""
    return {
        DOCS / "configuration.md": filled(DOCS / "configuration.md", settings=configuration_table()),
        DOCS / "exchange.md": filled(
            DOCS / "exchange.md", presets=preset_table(), markets=market_table(), sources=source_table()
        ),
        ROOT / ".env.example": env_example(),
    }


def main() -> int:
    current = documents()
    stale = [path for path, text in current.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} is out of date; run scripts/make_config_docs.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(current[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
