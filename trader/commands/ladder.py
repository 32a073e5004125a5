"""The commands ladder and approve: where entrants stand between paper and money, and a person's approval."""

import argparse
import os

from trader.commands.command import EXIT_FAILED, Result, operator, table
from trader.commands.database import TargetDatabase, database_command
from trader.core.errors import NotFound, Precondition
from trader.live.approvals import Approvals
from trader.settings.settings import read_some


def _approvals(options: argparse.Namespace, target: TargetDatabase) -> Approvals:
    return Approvals(target.database, *read_some(os.environ, options.env_file, "ladder_file", "venue"))


@database_command("ladder", example="trader ladder")
async def ladder(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show the step of every entrant, what it has shown, and what it lacks.

    It is operational proof, not proof of skill.
    """
    found = await _approvals(options, target).standings()
    rows = ((name, each.step, str(each)) for name, each in found.items())
    lines = table(("model", "step", "what it has shown there"), rows, text_columns=3)
    return Result({"entrants": {name: each._asdict() for name, each in found.items()}}, lines)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="an entrant, or the ID of an order that waits")
    parser.add_argument("--override", metavar="REASON", help="why an entrant that lacks something may climb")


@database_command("approve", example="trader approve apex-rules", arguments=_arguments, changes=True)
async def approve(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Approve an entrant's step up or return, or an order that waits.

    A step up writes the entrant's certificate beside LADDER_FILE, which the service of the next step needs.
    """
    try:
        done = await _approvals(options, target).approve(options.name, operator(), options.override)
    except (NotFound, Precondition) as error:
        return Result({"approved": None}, [str(error)], EXIT_FAILED)
    return Result({"approved": done}, [done])
