"""Worker: a process that executes specs from its standard input; on failure a run says why on standard error.

Without arguments it executes one spec. With `serve` it executes one after another until its input ends: it opens their
market once and forks a process for each run, so that no run sees what another one changed, and none ends another. Specs
and answers are pickles, each after its length.
"""

import asyncio
import gc
import os
import pickle
import signal
import struct
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import Any, BinaryIO, Final

from trader.backtest.execution import BacktestListener, Interrupts, MarketOpener, execute
from trader.backtest.spec import BacktestSpec
from trader.core.errors import TraderError

LENGTH: Final = struct.Struct(">I")
"""The length of a spec or an answer."""

_SAID_MAX: Final = 65_536


def main() -> int:
    """Execute the spec, and return the exit code."""
    return _execute(pickle.load(sys.stdin.buffer), MarketOpener())  # noqa: S301  # written by the parent process


def _execute(spec: BacktestSpec, opener: MarketOpener) -> int:
    try:
        finished = asyncio.run(execute(spec, BacktestListener(), Interrupts(), opener))
    except TraderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if finished.value["complete"] else 1


class _Server:
    """Executes each spec in a forked process, and answers with its standard error and its exit code."""

    def __init__(self) -> None:
        self._opener = MarketOpener()
        self._child: int | None = None
        self._is_ending = False

    def serve(self) -> None:
        """Execute specs until there are no more, or until SIGTERM, which also ends the present one."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the forked process, too
        signal.signal(signal.SIGTERM, self._end)
        # What a strategy prints belongs to neither of them.
        specs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        while not self._is_ending and (head := specs.read(LENGTH.size)):
            spec = pickle.loads(specs.read(*LENGTH.unpack(head)))  # noqa: S301  # written by the parent process
            answer = pickle.dumps(self._run(spec))
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()

    def _run(self, spec: BacktestSpec) -> tuple[bytes, int]:
        with suppress(TraderError, OSError):  # the run says why
            asyncio.run(self._opener.prepare(spec))
        gc.collect()
        gc.freeze()  # otherwise the first full collection of each run would copy all that it shares
        with tempfile.TemporaryFile() as said:
            self._child = os.fork()
            if self._child == 0:
                _run_forked(spec, self._opener, said)
            _, status = os.waitpid(self._child, 0)
            self._child = None
            said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_MAX))
            return said.read(), os.waitstatus_to_exitcode(status)

    def _end(self, *_: Any) -> None:
        self._is_ending = True
        if not self._child:  # None, or 0 in a process just forked
            sys.exit(0)
        os.kill(self._child, signal.SIGTERM)


def _run_forked(spec: BacktestSpec, opener: MarketOpener, said: BinaryIO) -> None:
    """Execute a spec, and end this process without what the server would do at its end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(said.fileno(), 2)
        code = _execute(spec, opener)
    except BaseException:  # noqa: BLE001  # reported by the parent process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        _Server().serve()
    else:
        sys.exit(main())
