"""Loads a strategy: a class, mostly of a Python file, validated before its first decision and bounded by a deadline."""

import hashlib
import importlib.util
import inspect
import linecache
import math
import signal
import sys
import threading
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np

from trader.agents.domain.conversation import storable
from trader.agents.domain.strategy import FILLS_MAX, Peek, SeriesValue, Strategy
from trader.agents.domain.tools import (
    CancelOrder,
    ClosePosition,
    CreatePosition,
    Decision,
    Holding,
    PlaceOrder,
    PlacePair,
    UpdateExitPlan,
)
from trader.agents.domain.view import ObservedFill, Shown, View
from trader.core.errors import SettingsError, StrategyError
from trader.core.files import read_regular
from trader.core.inputs import describe, issues_of
from trader.core.variant_id import VariantId
from trader.market.domain.markets import INTERVALS

DECISIONS_MAX: Final = 100
"""Maximum decisions, or values of series, of one cycle; more are an error."""

SERIES_NAME_MAX: Final = 40

DEADLINE_MAX_S: Final = 600

_ONE_VALUE: Final = (
    "a run has one value of each; a sweep of the command has several: each in a --param of its own, or as a range such "
    "as 10..50:10"
)

_HANDLES_ALARMS: Final[ContextVar[bool]] = ContextVar("handles_alarms", default=False)

DECISION_TYPES: Final = (CreatePosition, ClosePosition, UpdateExitPlan, PlaceOrder, PlacePair, CancelOrder, Holding)
_NAMES: Final = ", ".join(each.__name__ for each in DECISION_TYPES)

T = TypeVar("T")


class _DeadlinePassed(BaseException):
    """Raised inside a strategy at its deadline. No `except Exception` of the strategy catches it."""


class LoadedStrategy(Strategy):
    """A strategy of a user. Any fault in it raises a `StrategyError` that names file and line.

    The deadline interrupts Python code in the main thread, where backtests and workers make their decisions.
    """

    def __init__(self, file: Path, inner: Strategy, digest: str) -> None:
        self.file = file
        self._inner = inner
        self.digest = digest
        self.class_name = type(inner).__name__
        self.name = inner.name or type(inner).__name__.lower()
        self.variant, self.intervals, self.deadline_s = inner.variant, inner.intervals, inner.deadline_s
        self.history, self.warm_up = inner.history, inner.warm_up
        self.looks_first = type(inner).may_act is not Strategy.may_act
        """Whether it may need no view, since its `may_act` looks first."""

        self._draws = type(inner).series is not Strategy.series
        self._notes_fills = type(inner).on_fill is not Strategy.on_fill
        self._noted: int | None = None
        """The sequence of the last fill that it was told of; None before its first cycle."""

    @property
    def shown(self) -> Shown:
        return Shown(tuple(self.intervals), self.history, fills=FILLS_MAX if self._notes_fills else 0)

    def decide(self, view: View) -> list[Decision]:
        """Return the validated decisions of one cycle; none during the warm-up. Raise `StrategyError`."""
        self._note_fills(view.fills)
        if self.warm_up and not _is_warm(view, self.warm_up):
            return []
        self._inner.limits = self.limits
        made = self._call("decide", lambda: _taken(self._inner.decide(view)))
        return [self._checked(decision) for decision in made]

    def series(self, view: View) -> list[SeriesValue]:
        """Return the values that it draws, of existing markets and without NaN; none during the warm-up.

        :raises StrategyError: it failed, or returned something else
        """
        if not self._draws or (self.warm_up and not _is_warm(view, self.warm_up)):
            return []
        drawn = [self._drawn(each, view) for each in self._call("series", lambda: _taken(self._inner.series(view)))]
        return [each for each in drawn if math.isfinite(each.value)]

    def _note_fills(self, fills: Sequence[ObservedFill]) -> None:
        if self._noted is None:  # what came before its first cycle is no news
            self._noted = fills[-1].sequence if fills else 0
        new = [fill for fill in fills if fill.sequence > self._noted]

        def tell() -> None:
            for fill in new:
                self._inner.on_fill(fill)

        if new:
            self._noted = new[-1].sequence
            self._call("on_fill", tell)

    def may_act(self, peek: Peek) -> bool:
        self._note_fills(peek.fills_since(self._noted or 0))
        return not self.looks_first or bool(self._call("may_act", lambda: self._inner.may_act(peek)))

    def save(self) -> Any:
        """Return the state of the strategy, for one with `on_fill` with the last fill that it was told of.

        :raises StrategyError: it failed, or its state is not JSON
        """
        state = self._call("save", self._inner.save)
        if self._notes_fills:
            state = {"lastFill": self._noted, "state": state}
        try:
            return msgspec.json.decode(msgspec.json.encode(state, enc_hook=_plain))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise StrategyError(f"{self._place('save')}: the state must be JSON values: {error}") from None

    def load(self, state: Any) -> None:
        """Restore what `save` returned, perhaps before `on_fill` was added to the file, or removed from it."""
        if isinstance(state, dict) and state.keys() == {"lastFill", "state"}:
            self._noted, state = state["lastFill"], state["state"]
        if state is not None:
            self._call("load", lambda: self._inner.load(state))

    def _call(self, method: str, work: Callable[[], T]) -> T:
        try:
            with _deadline(self.deadline_s):
                return work()
        except _DeadlinePassed as error:
            reason = f"{method} took longer than its deadline_s of {self.deadline_s:g} s"
            raise StrategyError(f"{_line_in(self.file, error) or self._place(method)}: {reason}") from None
        except (Exception, SystemExit) as error:  # the code of a user may raise anything
            reason = f"{method} raised {type(error).__name__}: {error}"
            raise StrategyError(f"{_line_in(self.file, error) or self._place(method)}: {reason}") from error

    def _checked(self, decision: Any) -> Decision:
        """Return the decision with its fields validated, decimals and numpy's scalars as plain numbers, and texts as a
        database holds them."""
        place = self._place("decide")
        if not isinstance(decision, DECISION_TYPES):
            raise StrategyError(f"{place}: decide returned {decision!r:.200}; expected one of {_NAMES}")
        made = f"{place}: decide returned a {type(decision).__name__} with"
        try:
            plain = storable(_plain_fields(decision))
            msgspec.json.encode(plain)  # raises for half a character, which no record can hold
        except (TypeError, UnicodeEncodeError) as error:
            raise StrategyError(f"{made} {error}") from None
        try:
            return msgspec.convert(plain, type(decision))
        except msgspec.ValidationError as error:
            issues = "; ".join(issue.sentence for issue in issues_of(type(decision), plain, error))
            raise StrategyError(f"{made} {issues}") from None

    def _drawn(self, made: Any, view: View) -> SeriesValue:
        place = self._place("series")
        if not isinstance(made, SeriesValue):
            raise StrategyError(f"{place}: series returned {made!r:.200}; expected a SeriesValue")
        if made.symbol not in view.markets:
            markets = ", ".join(view.markets)
            raise StrategyError(f"{place}: series returned the market {made.symbol!r:.50}; expected one of {markets}")
        if not isinstance(made.name, str) or not made.name.strip() or len(made.name) > SERIES_NAME_MAX:
            expected = f"expected 1 to {SERIES_NAME_MAX} characters"
            raise StrategyError(f"{place}: series returned the name {made.name!r:.100}; {expected}")
        try:
            return made._replace(value=float(made.value), panel=bool(made.panel))
        except (TypeError, ValueError):
            given = f"the value {made.value!r:.100} of {made.name!r}"
            raise StrategyError(f"{place}: series returned {given}; expected a number") from None

    def _place(self, method: str) -> str:
        """Return the file and line that define a method."""
        function = getattr(type(self._inner), method)
        code = getattr(function, "__code__", None)
        if code is None or Path(code.co_filename) != self.file:
            return str(self.file)
        return f"{self.file}:{code.co_firstlineno}"


def load_strategy(reference: str | type[Any], params: Mapping[str, Any], folder: Path | None = None) -> LoadedStrategy:
    """Return a new instance of a strategy class, or of the class `file.py:Class`; parameters may be text.

    A relative file is resolved in `folder` (None: the working directory). A class not derived from `Strategy` needs
    `decide`, and gets the defaults of `Strategy`.

    :raises SettingsError: the file, the class, a parameter or an attribute is invalid; names file and line
    """
    if isinstance(reference, type):
        file, content, chosen = *_source_of(reference), reference
    else:
        file, content, chosen = _class_in(reference, folder)
    if not issubclass(chosen, Strategy):
        chosen = type(chosen.__name__, (chosen, Strategy), {"__module__": chosen.__module__})
    inner = _made(file, cast("type[Strategy]", chosen), params)
    _check_attributes(file, inner)
    return LoadedStrategy(file, inner, hashlib.sha256(content).hexdigest())


def _source_of(chosen: type[Any]) -> tuple[Path, bytes]:
    """Return the file, or the cell of a notebook, that defines the methods of a class, and its content.

    :raises SettingsError: it has no `decide`, or there is no source that can be read
    """
    if not _decides(chosen):
        raise SettingsError([f"{chosen.__module__}: {chosen.__name__} has no method decide(self, view)"])
    name = inspect.unwrap(chosen.decide).__code__.co_filename
    if not (lines := linecache.getlines(name)):
        raise SettingsError(
            [f"the source of {chosen.__name__} cannot be read, which identifies a trial; define it in a file or a cell"]
        )
    return Path(name), "".join(lines).encode()


def _decides(chosen: type[Any]) -> bool:
    return callable(getattr(chosen, "decide", None)) and chosen.decide is not Strategy.decide


def _class_in(reference: str, folder: Path | None) -> tuple[Path, bytes, type[Any]]:
    """Return the file, its content, and the class of `file.py:Class`. Raise `SettingsError`."""
    name, _, class_name = reference.rpartition(":")
    if not name or not class_name.isidentifier():
        raise SettingsError([f"the strategy is {reference!r}; it must be FILE:CLASS, such as sma.py:SmaCross"])
    file = ((folder or Path()) / name).absolute()
    try:
        content = read_regular(file.resolve())
    except OSError as error:
        raise SettingsError([f"the strategy {file} cannot be read: {error.strerror}"]) from None
    module = _run_file(file, content)
    types = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    classes = {key: value for key, value in types.items() if value.__module__ == module.__name__}
    chosen = classes.get(class_name)
    if chosen is None:
        named = ", ".join(classes) or "none"
        raise SettingsError([f"{file} has no class {class_name!r}; its classes are {named}"])
    if not _decides(chosen):
        line = inspect.getsourcelines(chosen)[1]
        raise SettingsError([f"{file}:{line}: {class_name} has no method decide(self, view)"])
    return file, content, chosen


def _plain(value: Any) -> Any:
    """Return numpy's scalars and other subclasses of numbers and times as the plain values that msgspec takes."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):  # such as a Timestamp of pandas
        return value.isoformat()
    raise TypeError(f"{value!r:.100} is a {type(value).__name__}; expected a number, string or time")


def _plain_fields(value: Any) -> Any:
    """Return a decision or a part of it as builtins, with every Decimal as a float."""
    match value:
        case Decimal():
            return float(value)
        case list() | tuple():
            return [_plain_fields(each) for each in value]
        case msgspec.Struct():
            return {
                encoded: _plain_fields(getattr(value, name))
                for name, encoded in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
            }
    return msgspec.to_builtins(value, enc_hook=_plain)


def _is_warm(view: View, candles: int) -> bool:
    """Return whether every market has this many closed candles of each interval."""
    markets = view.markets.values()
    return bool(markets) and all(len(each) >= candles for market in markets for each in market.candles.values())


def _taken(made: Any) -> list[Any]:
    """Return decisions or values as a list; a strategy may also return None, one decision, a tuple or a generator."""
    taken: list[Any] = []
    is_one = not isinstance(made, Iterable) or isinstance(made, str | bytes | Mapping | SeriesValue)
    for each in () if made is None else [made] if is_one else made:
        if len(taken) == DECISIONS_MAX:
            raise ValueError(f"more than {DECISIONS_MAX} of them in one cycle")
        taken.append(each)
    return taken


def _run_file(file: Path, content: bytes) -> ModuleType:
    """Execute a file as its own module. It can import modules in its folder."""
    name = f"strategy_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError([f"the strategy {file} is not a Python file; its name must end in .py"])
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(content, str(file), "exec"), module.__dict__)  # noqa: S102  # the user named this file
    except SyntaxError as error:
        raise SettingsError([f"{error.filename}:{error.lineno}: {error.msg}"]) from None
    except (Exception, SystemExit) as error:  # the code of a user may raise anything
        place = _line_in(file, error) or str(file)
        raise SettingsError([f"{place}: raised {type(error).__name__}: {error}"]) from error
    return module


def _made(file: Path, chosen: type[Strategy], params: Mapping[str, Any]) -> Strategy:
    """Return an instance with these parameters, converted to the types of its constructor's annotations."""
    own = chosen.__init__ is not object.__init__
    signature = {
        name: parameter
        for name, parameter in (inspect.signature(chosen).parameters if own else {}).items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    hints = typing.get_type_hints(chosen.__init__) if own else {}
    problems, values = [], {}
    for name, value in params.items():
        if name not in signature:
            problems.append(f"{file}: {chosen.__name__} has no parameter {name!r}; it has {_listed(signature)}")
            continue
        default = signature[name].default
        kind = hints.get(name, Any if default in (None, inspect.Parameter.empty) else type(default))
        try:
            values[name] = msgspec.convert(value.item() if isinstance(value, np.generic) else value, kind, strict=False)
            if isinstance(values[name], float | Decimal) and not math.isfinite(values[name]):
                raise TypeError("Expected a finite number")  # which JSON can record
        except (msgspec.ValidationError, TypeError) as error:
            schema = msgspec.inspect.type_info(kind)
            is_choice = isinstance(schema, msgspec.inspect.LiteralType | msgspec.inspect.EnumType)
            reason = f"Expected {describe(schema)}" if is_choice else str(error)
            problem = f"{file}: the parameter {name} of {chosen.__name__} is {value!r}: {reason}"
            problems.append(f"{problem}; {_ONE_VALUE}" if _are_several(value) else problem)
    for name, parameter in signature.items():
        if parameter.default is parameter.empty and name not in params:
            problems.append(f"{file}: {chosen.__name__} needs the parameter {name}")
    if problems:
        raise SettingsError(problems)
    try:
        return chosen(**values)
    except (Exception, SystemExit) as error:  # the code of a user may raise anything
        place = _line_in(file, error) or str(file)
        raise SettingsError([f"{place}: {chosen.__name__}() raised {type(error).__name__}: {error}"]) from error


def _are_several(value: Any) -> bool:
    """Return whether a value seems to be meant as several: a list, or a text with commas or the dots of a range."""
    return "," in value or ".." in value if isinstance(value, str) else isinstance(value, Collection)


def _check_attributes(file: Path, inner: Strategy) -> None:
    """Validate the class's attributes, and accept its variant as text."""
    problems = []
    try:
        inner.variant = VariantId(inner.variant)
    except ValueError:
        problems.append(f"variant is {inner.variant!r}; expected one of {', '.join(VariantId)}")
    intervals: Sequence[Any] = inner.intervals
    if isinstance(intervals, str) or not intervals or any(interval not in INTERVALS for interval in intervals):
        problems.append(f"intervals is {intervals!r}; it must be a tuple of {', '.join(INTERVALS)}")
    if not isinstance(inner.history, int) or inner.history < 1:
        problems.append(f"history is {inner.history!r}; it must be a whole number of candles, at least 1")
    elif not isinstance(inner.warm_up, int) or not 0 <= inner.warm_up <= inner.history:
        problems.append(
            f"warm_up is {inner.warm_up!r}; it must be a whole number of candles from 0 to history, {inner.history}"
        )
    if not isinstance(inner.deadline_s, int | float) or not 0 < inner.deadline_s <= DEADLINE_MAX_S:
        problems.append(f"deadline_s is {inner.deadline_s!r}; it must be above 0 and at most {DEADLINE_MAX_S} seconds")
    if problems:
        raise SettingsError([f"{file}: {type(inner).__name__}.{problem}" for problem in problems])


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "none"


def _line_in(file: Path, error: BaseException) -> str | None:
    """Return the last line of the file in an error's traceback, as `file:line`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f"{file}:{lines[-1]}" if lines else None


def _is_debugged() -> bool:
    """Return whether a debugger follows this thread, by `sys.settrace` or, from Python 3.12 on, `sys.monitoring`."""
    monitoring = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if not _is_debugged():
        raise _DeadlinePassed


@contextmanager
def deadlines() -> Iterator[None]:
    """Handle the alarms of deadlines within the block: to do so for each call takes as long as a short decision."""
    if _HANDLES_ALARMS.get() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, token = signal.signal(signal.SIGALRM, _interrupt), _HANDLES_ALARMS.set(True)
    try:
        yield
    finally:
        _HANDLES_ALARMS.reset(token)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the main thread after this many seconds of real time, unless a debugger has stopped it by then.

    Other threads have no deadline.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with deadlines():
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
