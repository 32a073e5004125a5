"""The models of a backtest with their decision sources, however they were chosen."""

from collections.abc import Container, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model, ModelId
from trader.agents.domain.strategy import Strategy
from trader.agents.providers.cassette import Cassette
from trader.agents.providers.strategy_process import ConfinedStrategy
from trader.agents.strategy_files import LoadedStrategy, load_strategy
from trader.backtest.accounts import DecisionSource
from trader.backtest.answers import KeptDecisions, Spending
from trader.backtest.sources import AiSource, RecordingStrategySource
from trader.backtest.spec import Participants
from trader.core.errors import SettingsError
from trader.market.domain.markets import INTERVALS, Interval

if TYPE_CHECKING:
    from trader.backtest.agents import BacktestDesk

ID_FORM: Final = "it must be 1 to 64 letters, digits or any of . _ : -"
CASSETTE: Final = "cassette"
"""The folder of the answers, inside the backtest's folder."""

MASKED: Final = ":masked"
"""The suffix of the id of an account whose model decides in a masked market."""


class Chosen(NamedTuple):
    """Models with their decision sources. `cassette` stores AI answers; `is_asking`: missing answers are requested.

    `agent_lines` tell external agents where to call; those with keys are served at the `desk`.
    """

    models: list[tuple[Model, DecisionSource]]
    cassette: Cassette | None
    spending: Spending
    is_asking: bool
    agent_lines: tuple[str, ...] = ()
    desk: "BacktestDesk | None" = None

    @property
    def strategies(self) -> list[Strategy]:
        """The rule agents and strategies among what decides."""
        return [source.strategy for _, source in self.models if isinstance(source, RecordingStrategySource)]

    @property
    def intervals(self) -> set[Interval]:
        """The candle intervals that the models may read: all of them if there are AI models."""
        if any(isinstance(source, AiSource) for _, source in self.models):
            return set(INTERVALS)
        return {each for strategy in self.strategies for each in strategy.intervals}

    def keeping_decisions(self, folder: Path | None) -> "Chosen":
        """Return the same models. With a folder, its cassette also keeps the decisions of strategies from files."""
        if folder is None:
            return self
        cassette = Cassette(folder) if self.cassette is None else self.cassette
        for _, source in self.models:
            if isinstance(source, RecordingStrategySource) and isinstance(source.strategy, LoadedStrategy):
                source.kept = KeptDecisions(cassette, self.spending)
        return self._replace(cassette=cassette, is_asking=True)

    def open_cassette(self, stack: AsyncExitStack) -> None:
        """Open the cassette for writing. Raises `OSError`."""
        if self.cassette is not None and self.is_asking:
            stack.callback(self.cassette.close)
            self.cassette.open([model for model, source in self.models if isinstance(source, AiSource)])


def twin_of(model: Model) -> Model:
    """Return the masked copy of a model."""
    try:
        model_id = msgspec.convert(f"{model.id}{MASKED}", ModelId)
    except msgspec.ValidationError:
        raise SettingsError([f"--mask: {model.id}{MASKED} is not a valid account id; {ID_FORM}"]) from None
    return replace(model, id=model_id, name=f"{model.name} (masked)")


def is_masked(model_id: str, models: Container[str]) -> bool:
    """Return whether this is the masked copy of one of these models."""
    return model_id.endswith(MASKED) and model_id.removesuffix(MASKED) in models


def loaded(
    entrants: Participants, reference: str | type[Any], params: Mapping[str, Any]
) -> LoadedStrategy | ConfinedStrategy:
    """Return a strategy that decides in this process, or confined in others. Raise `SettingsError`."""
    if entrants.confined and isinstance(reference, str):
        return ConfinedStrategy(reference, params)
    return load_strategy(reference, params)
