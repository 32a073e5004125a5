"""Worker: a process that executes the spec on its standard input; on failure it says why on standard error."""

import asyncio
import pickle
import sys

from trader.backtest.execution import BacktestListener, Interrupts, execute
from trader.core.errors import TraderError


def main() -> int:
    """Execute the spec, and return the exit code."""
    spec = pickle.load(sys.stdin.buffer)  # noqa: S301  # written by the parent process
    try:
        finished = asyncio.run(execute(spec, BacktestListener(), Interrupts()))
    except TraderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if finished.value["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
