"""Cassettes: recorded answers of AI models, stored in a folder by the digest of their requests.

`answers.jsonl` has one line per answer, `models.json` has the models, and `contexts.json` the lengths of their contexts
that servers told, by which views were shortened. None contains API keys.
"""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import Model
from trader.agents.domain.tools import tool_schemas
from trader.agents.domain.view import View
from trader.core.clock import iso
from trader.core.errors import SettingsError
from trader.core.files import append, decode_json, open_appending, read_lines, read_regular, replace_file
from trader.core.money import require_figure

ANSWERS: Final = "answers.jsonl"
MODELS: Final = "models.json"
CONTEXTS: Final = "contexts.json"


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a cassette. `at` is the market time of the request's view; `cost_usd` is None if unknown."""

    digest: str
    model: str
    at: datetime
    step: int
    cost_usd: Decimal | None
    answer: ModelAnswer

    def __post_init__(self) -> None:
        require_figure(self.cost_usd)


def request_digest(provider: str, turn: Turn) -> str:
    """Return the SHA-256 of a model's request as JSON with sorted keys: all that affects the answer, but no API key.

    It includes the fields and headers that the models file defines for the provider, and the model's id, so that each
    replicate has its own answers.
    """
    definition = turn.model.configuration.provider_definition
    own = {} if definition is None else msgspec.to_builtins(definition)
    asked = {
        "id": turn.model.id,
        "provider": provider,
        "ofProvider": {name: own[name] for name in ("protocol", "headers", "request", "limit_field") if name in own},
        "model": turn.model.router_model_name,
        "messages": turn.messages,
        "calls": turn.model.configuration.calls_as_json,
        "tools": tool_schemas(turn.symbols, turn.model.configuration.tools_off),
        "temperature": turn.temperature,
        "answerTokensMax": turn.answer_tokens_max,
        "request": dict(turn.model.configuration.request),
    }
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()


def view_digest(model: Model, answered_by: str, view: View) -> str:
    """Return the SHA-256 of what a strategy decides by: its file, its parameters, the model's id and the view."""
    asked = {"id": model.id, "strategy": answered_by, "params": dict(model.configuration.params), "view": view}
    return hashlib.sha256(msgspec.json.encode(asked, enc_hook=dict, order="deterministic")).hexdigest()


class Cassette:
    """The recorded answers in a folder. One process at a time may append.

    A missing folder is an empty cassette; an incomplete last line is ignored.

    :raises SettingsError: one of its files cannot be read
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise SettingsError([f"{folder} is not a cassette: it is not a folder"])
        self.folder = folder
        self._answers, self.models, self.contexts = _read(folder)
        self._file: FileIO | None = None
        self._turn = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, digest: str) -> ModelAnswer | None:
        """Return the answer to the request with this digest."""
        kept = self._answers.get(digest)
        return None if kept is None else kept.answer

    def open(self, models: Sequence[Model]) -> None:
        """Open the cassette to append answers of these models. Raise `OSError`.

        :raises SettingsError: another process is appending to it
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._file = open_appending(self.folder / ANSWERS)
        except BlockingIOError:
            raise SettingsError([f"another process adds answers to the cassette {self.folder}"]) from None
        self._answers, known, self.contexts = _read(self.folder)  # another process may have added some until now
        self._file.seek(0)
        self._file.truncate(self._file.readall().rfind(b"\n") + 1)  # without an incomplete last line
        self.models = known | {model.id: model for model in models}
        models_json = msgspec.json.format(msgspec.json.encode(list(self.models.values())))
        replace_file(self.folder / MODELS, models_json)

    def keep_context(self, model_id: str, tokens: int | None) -> None:
        """Keep the length of a model's context, if it is known, for a replay to show the same. Raise `OSError`."""
        if tokens is not None and self.contexts.get(model_id) != tokens:
            self.contexts[model_id] = tokens
            replace_file(self.folder / CONTEXTS, msgspec.json.encode(self.contexts))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    async def add(self, kept: KeptAnswer) -> None:
        """Append an answer like `add_now`, in a thread. Raise `OSError`."""
        async with self._turn:
            await asyncio.to_thread(self.add_now, kept)

    def add_now(self, kept: KeptAnswer) -> None:
        """Append an answer durably: it is on disk when this returns. Raise `OSError`."""
        assert self._file is not None, "the cassette is open"
        append(self._file, msgspec.json.encode(kept) + b"\n")
        os.fsync(self._file.fileno())
        self._answers[kept.digest] = kept


def _read(folder: Path) -> tuple[dict[str, KeptAnswer], dict[str, Model], dict[str, int]]:
    answers, models, contexts = folder / ANSWERS, folder / MODELS, folder / CONTEXTS
    try:
        known = decode_json(read_regular(models), list[Model]) if models.exists() else []
        kept = _decoded(answers) if answers.exists() else {}
        told = decode_json(read_regular(contexts), dict[str, int]) if contexts.exists() else {}
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError([f"{folder} is not a cassette: {error}"]) from None
    return kept, {model.id: model for model in known}, told


def _decoded(file: Path) -> dict[str, KeptAnswer]:
    answers = {}
    for number, line in enumerate(read_lines(file), 1):
        if not line.endswith(b"\n"):  # the process was killed while writing it
            break
        try:
            kept = decode_json(line, KeptAnswer)
        except msgspec.MsgspecError as error:
            raise SettingsError([f"{file}, line {number}: expected a recorded answer: {error}"]) from None
        answers[kept.digest] = kept
    return answers


def missing_text(folder: Path, turn: Turn, digest: str) -> str:
    """Return the error message for an answer missing from a cassette."""
    return (
        f"{folder} has no answer of {turn.model.id} at {iso(turn.view.at)}, step {turn.number}, to the request with "
        f"the digest {digest}. A replay needs the same candles, period, rules, limits and models as the recorded "
        "backtest; use --models and --budget-usd to ask the model instead."
    )
