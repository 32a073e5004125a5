"""The function `run_exam`: an exam from Python, by the rules of the command."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any, Final

import msgspec

from trader.backtest.chosen import CASSETTE
from trader.backtest.execution import Interrupts
from trader.backtest.function import as_file, completed, plain_params
from trader.backtest.spec import Participants, conditions_of
from trader.core.errors import SettingsError, StartError
from trader.core.variant_id import VariantId
from trader.exam.opening import ExamDesign, ExamSpec
from trader.exam.report import ExamResult, exam_result
from trader.exam.run import Listener, run

_CONDITIONS: Final = ("start", "end", "taker_fee", "latency", "funding", "preset")


def run_exam(
    strategy: type[Any] | str | None = None,
    *,
    out: str | PathLike[str],
    params: Mapping[str, Any] | None = None,
    variants: Sequence[str] = (),
    models: str | PathLike[str] | None = None,
    budget_usd: Decimal | float | None = None,
    data: str | PathLike[str] | None = None,
    markets: str | Sequence[str] = (),
    **options: Any,
) -> ExamResult:
    """Let entrants take an exam in the folder `out`, or the rest of it, and return its result.

    They are a strategy (a class at the top of its file, or FILE:CLASS), rule agents by their `variants`, and those of a
    models file, whose AI models may cost up to `budget_usd`. `data` is a recording whose moments are asked instead of
    worlds. The other options are the command's: `start`, `end`, `taker_fee`, `latency`, `funding`, `preset`, and the
    fields of `ExamDesign`. Only the command sends digests to `ANCHOR_URL`. With `workers` above 1, call it below `if
    __name__ == "__main__":`.

    :raises SettingsError: an argument is wrong, or differs from the exam in the folder
    :raises StartError: the candles cannot be read, the files cannot be written, or no model can be asked anymore
    :raises StrategyError: a strategy failed
    """
    if not isinstance(strategy, type | str | None):
        raise SettingsError([f"strategy is {strategy!r:.100}; it must be a class with decide(view), or FILE:CLASS"])
    if not isinstance(out, str | PathLike):
        raise SettingsError([f"out is {out!r:.100}; it must be a folder"])
    given = {name: options.pop(name) for name in _CONDITIONS if name in options}
    try:
        design = msgspec.structs.asdict(msgspec.convert(options, ExamDesign))
        who = msgspec.convert(variants, tuple[VariantId, ...])
    except msgspec.ValidationError as error:
        raise SettingsError([str(error)]) from None
    entrants = Participants(
        variants=who,
        strategy=None if strategy is None else as_file(strategy),
        params=plain_params(params or {}),
        models=None if models is None else Path(models),
        budget_usd=None if budget_usd is None else Decimal(str(budget_usd)),
        cassette=None if models is None else Path(out) / CASSETTE,
    )
    market = (markets,) if isinstance(markets, str) else markets
    conditions = conditions_of(None if data is None else Path(data), given | {"market": market})
    spec = ExamSpec(conditions=conditions, entrants=entrants, out=Path(out), **design)
    ended = completed(run(spec, Listener()), Interrupts())
    if ended.cause not in (None, "verdict"):
        raise StartError(ended.reason)
    return exam_result(ended.plan, ended.sittings)
