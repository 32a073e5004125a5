"""Options that backtests and exams share: the participants that decide, and the conditions of their orders."""

import argparse
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from trader.agents.domain.mask import MaskPart
from trader.agents.models_file import add_keys_argument, variant_argument
from trader.backtest.chosen import CASSETTE
from trader.backtest.spec import Participants
from trader.commands.command import argument_of, deadline_argument
from trader.settings.dotenv import add_env_file_option
from trader.settings.forms import DECIMAL, Form, whole_number
from trader.settings.settings import PRESETS

_mask_argument: Final = argument_of(
    Form(
        f"some of {', '.join(get_args(MaskPart))}, separated by commas",
        ".+",
        lambda text: msgspec.convert(text.split(","), frozenset[MaskPart]),
    )
)
_budget_argument: Final = argument_of(
    Form("an amount above 0 and at most 1000000", DECIMAL, Decimal, lambda usd: 0 < usd <= 1_000_000)
)


def add_condition_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the recording's markets and of what orders cost there."""
    add = parser.add_argument
    add("--market", action="append", metavar="SYMBOL", help="a market of the folder; may be repeated; default: all")
    add("--taker-fee", metavar="BPS", help="default: the preset's")
    add("--latency", metavar="MS", help="delay of an order in milliseconds; default: the preset's")
    add("--funding", metavar="RATE|FOLDER", help="hourly rate, or a folder of funding files; default: files in --data")
    add("--preset", choices=list(PRESETS), help="the venue whose rules and fees apply")


def add_participant_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `participants_of` reads."""
    add = parser.add_argument
    add("--variant", action="append", type=variant_argument, help="a rule agent; may be repeated; default: all")
    add("--strategy", metavar="FILE:CLASS", help="a strategy of a Python file, such as sma.py:SmaCross")
    add(
        "--param",
        action="append",
        metavar="NAME=VALUE",
        help="a parameter of the strategy; in a backtest also a range such as window=10..50:10; may be repeated",
    )
    add("--models", type=Path, metavar="FILE", help="a models file: asks AI models, within --budget-usd")
    add(
        "--budget-usd",
        type=_budget_argument,
        metavar="USD",
        help="maximum cost of asking; without it the command prints an estimate",
    )
    add(
        "--cassette",
        type=Path,
        metavar="FOLDER",
        help="where answers, and in a backtest decisions of --strategy, are kept; default: in --out",
    )
    add(
        "--agent",
        action="append",
        metavar="NAME:VARIANT[=URL]",
        help="an agent of your own, which calls agent.* or is called at URL; may be repeated",
    )
    add("--deadline", type=deadline_argument, metavar="SECONDS", help="time for a decision of --agent; default: 120")
    add(
        "--listen",
        type=argument_of(whole_number(0, 65_535)),
        metavar="PORT",
        help="where --agent finds agent.* and /mcp; default: 8081",
    )
    add(
        "--mask",
        type=_mask_argument,
        metavar="PARTS",
        help="symbols,dates,scale: adds a copy of each model from which these are hidden",
    )
    add_keys_argument(parser)
    add_env_file_option(parser)


def participants_of(options: argparse.Namespace, **others: Any) -> Participants:
    """Return the participants that the options describe, with the `others` of their fields."""
    is_asking = options.models is not None or options.agent is not None
    return Participants(
        variants=tuple(options.variant or ()),
        strategy=options.strategy,
        models=options.models,
        budget_usd=options.budget_usd,
        cassette=options.cassette or (options.out / CASSETTE if is_asking else None),
        agents=tuple(options.agent or ()),
        deadline_s=options.deadline,
        port=options.listen,
        mask=options.mask or frozenset(),
        env_file=options.env_file,
        send_keys_to=tuple(options.send_keys_to),
        **others,
    )
