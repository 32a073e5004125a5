"""The folder of an exam: its plan, the secret of its worlds, and the decisions with their scores."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from trader.agents.domain.models import Model
from trader.agents.domain.tools import RECORDED_TOOLS
from trader.backtest.spec import CONDITION_VARIABLES
from trader.core.canonical_json import canonical_json
from trader.core.errors import SettingsError, StartError
from trader.core.files import (
    BYTES_MAX,
    SMALL_BYTES_MAX,
    append,
    decode_json,
    open_appending,
    read_lines,
    read_regular,
    replace_file,
)
from trader.exam.domain.plan import NULL_SHARE
from trader.exam.domain.scores import MOMENTS, WORLDS, PairComparison, compare, differences
from trader.exam.domain.worlds import Edge, Kind
from trader.exam.pairs import Horizon, RecordedMoment
from trader.exam.sitting import Sitting
from trader.record.domain.chain import Anchor, unmatched
from trader.seasons.bundle import CodeDigest

PLAN: Final = "exam.json"
SECRET: Final = "secret"  # noqa: S105  # the name of a file
SITTINGS: Final = "sittings.jsonl"
"""The files of an exam, in its folder: what it asks, the secret of its worlds, and the decisions with their scores."""


REGISTER: Final = "exams.jsonl"
"""The file beside the folders of exams that has a line for each one that was begun there."""

STATES_MAX: Final = 100_000
SAMPLES_MAX: Final = 10_000
_SETTINGS: Final = {"SIM_SEED", "MARKETS", *CONDITION_VARIABLES} - {"MARKETS_FILE"}
"""The settings that exams have; any other, such as one that names a file, was put in by someone else."""


class ContradictoryExam(StartError):
    """The files of an exam can be read, and contradict each other."""


class ExamState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state of an exam: the edge of a world, or a moment of a recording."""

    number: int
    edge: Edge | None = None
    kind: Kind | None = None
    moment: RecordedMoment | None = None


class ExamPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The plan of an exam.

    `secret_digest` binds the states before any entrant is asked; `recording` is the SHA-256 of the candles and funding
    rates from which moments are drawn, and None in an exam in worlds, which may be `managed` in steps. `strategies` are
    the classes of code that decides, with the first digits of its SHA-256, `code` is the program that began the exam,
    and `earlier` counts the exams that entrants with these names had begun before.
    """

    secret_digest: str
    states: Annotated[list[ExamState], msgspec.Meta(max_length=STATES_MAX)]
    edges: Annotated[list[Edge], msgspec.Meta(min_length=1)]
    kind: Kind
    horizon: Horizon
    models: Annotated[list[Model], msgspec.Meta(min_length=1)]
    strategies: dict[str, str]
    settings: dict[str, str]
    code: CodeDigest
    managed: bool = False
    compared: tuple[str, str] | None = None
    samples: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX)] = 1
    recording: str | None = None
    earlier: dict[str, int] = {}

    @property
    def entrants(self) -> list[str]:
        """The ids of the entrants."""
        return [model.id for model in self.models]

    def seed(self, secret: str) -> str:
        """Return what draws the states: the secret, and everything in the plan that a later change could turn in favor
        of someone, such as the number of states, the entrants and their names. Folders and the program do not count.
        """
        bare = replace(
            self,
            states=[],
            earlier={},
            code=CodeDigest(version="", digest=""),
            models=[replace(model, router_model_name=Path(model.router_model_name).name) for model in self.models],
            strategies={name: Path(code).name for name, code in self.strategies.items()},
        )
        return digest_of(f"{secret}:{len(self.states)}:" + canonical_json(msgspec.to_builtins(bare)).decode())

    @property
    def bound(self) -> float:
        """The largest difference between two entrants."""
        return WORLDS if self.recording is None else MOMENTS


def schedule(secret: str, count: int, edges: Sequence[Edge], kind: Kind = "planted") -> list[ExamState]:
    """Return the states of an exam, each drawn independently, so that a sequential test is exact.

    `NULL_SHARE` of them are null worlds, a fifth of these ordinary hours: patterns with an edge and without are equally
    frequent. `kind` "reversed" plans the opposite of every
    edge.
    """
    rng = Random(f"{secret}:order")
    return [ExamState(number, *_drawn(rng, edges, kind)) for number in range(count)]


def _drawn(rng: Random, edges: Sequence[Edge], kind: Kind) -> tuple[Edge | None, Kind]:
    is_null, edge = rng.random() < NULL_SHARE, rng.choice(edges)
    return (edge if rng.random() < 0.8 else None, "null") if is_null else (edge, kind)


def is_begun(folder: Path) -> bool:
    """Return whether a folder has an exam. Raise `SettingsError` for a folder that has anything else."""
    if (folder / PLAN).exists():
        return True
    unfinished = {folder / SECRET, *folder.glob(".*.new")}
    if (folder / SITTINGS).is_file() and not (folder / SITTINGS).stat().st_size:
        unfinished.add(folder / SITTINGS)
    if folder.exists() and (not folder.is_dir() or not unfinished.issuperset(folder.iterdir())):
        raise SettingsError([f"--out: {folder} exists and has no exam; give a new folder, or one to resume"])
    return False


def begin(folder: Path, plan: ExamPlan, secret: str) -> None:
    """Write the secret of a new exam, and then its plan at once. Raises `OSError`.

    :raises SettingsError: another process has begun one here meanwhile
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_appending(folder / SITTINGS):
        if (folder / PLAN).exists():
            raise SettingsError(
                [f"--out: another process has begun an exam in {folder}; repeat the command to resume it"]
            )
        replace_file(folder / SECRET, secret, 0o600)
        replace_file(folder / PLAN, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


class Registered(msgspec.Struct, rename="camel"):
    """An exam that was begun: the digest of its seed, that of all lines before, and its entrants."""

    seed_digest: str
    before: str
    entrants: list[str]


def register(folder: Path, plan: ExamPlan, secret: str) -> ExamPlan:
    """Add an exam to the register beside its folder, and return its plan with the exams before it. Raises `OSError`.

    :raises StartError: the register is damaged
    """
    file = folder.parent / REGISTER
    file.parent.mkdir(parents=True, exist_ok=True)
    with open_appending(file, waits=True) as opened:
        earlier, digests = read_register(file)
        entry = Registered(digest_of(plan.seed(secret)), digests[-1], plan.entrants)
        append(opened, msgspec.json.encode(entry) + b"\n")
    return replace(plan, earlier=_counted(earlier, plan))


def read_register(file: Path) -> tuple[list[Registered], list[str]]:
    """Return the exams of a register, and the digest of its first n lines at each place n.

    :raises StartError: it is damaged, or a line was changed or removed
    """
    entries, digest = list[Registered](), hashlib.sha256()
    digests = [digest.hexdigest()]
    try:
        for line in read_lines(file, BYTES_MAX):
            entries.append(entry := decode_json(line, Registered))
            if entry.before != digests[-1]:
                raise StartError(f"{file}: line {len(entries)} does not follow from the lines before it")
            digest.update(line)
            digests.append(digest.hexdigest())
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"{file} cannot be read: {error}") from None
    return entries, digests


def register_anchor(folder: Path, at: datetime) -> Anchor:
    """Return the anchor of the register beside an exam's folder as it is now. Raise like `read_register`."""
    entries, digests = read_register(folder.parent / REGISTER)
    return Anchor(len(entries), bytes.fromhex(digests[-1]), at, register=digests[1])


def unregistered(folder: Path, plan: ExamPlan, secret: str, anchors: Iterable[Anchor] | None) -> Iterator[str]:
    """Yield how a plan contradicts the register beside its folder, and how this contradicts its anchors.

    Without anchors there need not be a register. Raise like `read_register`.
    """
    file = folder.parent / REGISTER
    if anchors is None and not file.exists():
        return
    (entries, digests), seed_digest = read_register(file), digest_of(plan.seed(secret))
    counts = {n: _counted(entries[:n], plan) for n, each in enumerate(entries) if each.seed_digest == seed_digest}
    place = next((n + 1 for n, earlier in counts.items() if earlier == plan.earlier), None)
    if place is None:
        told = f"this exam after {list(counts.values())}" if counts else "no such exam"
        yield f"{file} has {told}, and {PLAN} says {plan.earlier}"
    if anchors is not None:
        own = [anchor for anchor in anchors if anchor.register in digests[1:2]]
        for anchor, _ in unmatched(own, dict(enumerate(map(bytes.fromhex, digests)))):
            yield f"{file}: lines 1 to {anchor.position} are not those that were anchored ({anchor.source})"
        if place is not None and place > max((anchor.position for anchor in own), default=0):
            yield f"{file}: no anchor covers line {place}, which is this exam"


def _counted(entries: Sequence[Registered], plan: ExamPlan) -> dict[str, int]:
    """Return how often each entrant but the one that does nothing is among the earlier exams."""
    names = [name for each in entries for name in set(each.entrants)]
    return {name: names.count(name) for name in plan.entrants[:-1]}


def read_plan(folder: Path) -> tuple[ExamPlan, str]:
    """Return the plan of an exam and its secret.

    :raises ContradictoryExam: the secret is another one
    :raises StartError: the folder has no exam
    """
    try:
        plan = decode_json(read_regular(folder / PLAN), ExamPlan)
        secret = read_regular(folder / SECRET, SMALL_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise StartError(f"{folder} has no exam: {error.filename}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartError(f"{folder} has a damaged exam: {error}") from error
    if [state.number for state in plan.states] != list(range(len(plan.states))):
        raise StartError(f"{folder} has a damaged exam: its states are not numbered from 0 on")
    if any(state.moment is None and state.edge is None and state.kind != "null" for state in plan.states):
        raise StartError(f"{folder} has a damaged exam: only a null world is without an edge")
    if others := plan.settings.keys() - _SETTINGS:
        raise StartError(f"{folder} has a damaged exam: no exam has the settings {', '.join(sorted(others))}")
    if plan.recording is not None and "MARKETS" not in plan.settings:
        raise StartError(f"{folder} has a damaged exam: its settings name no MARKETS")
    if digest_of(secret) != plan.secret_digest:
        raise ContradictoryExam(
            f"{folder / SECRET} is not the secret of this exam, whose SHA-256 is {plan.secret_digest}"
        )
    return plan, secret


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_states(folder: Path, plan: ExamPlan) -> list[list[Sitting]]:
    """Return the decisions so far, state by state, in the order of the entrants.

    The last state is left out if the exam was killed while it wrote it.

    :raises StartError: the file holds anything else
    """
    file = folder / SITTINGS
    try:
        lines = [line for line in read_lines(file, BYTES_MAX) if line.endswith(b"\n")] if file.exists() else []
        sittings = [decode_json(line, Sitting) for line in lines]
        for decided in (decided for each in sittings for decided in each.answer.decided):
            times = [decided.started_at, *(time for step in decided.steps for time in (step.at, step.viewed_at))]
            if any(time.tzinfo is None for time in times):
                raise StartError(f"{file} holds a time without a time zone: {decided}")
            for call in (call for step in decided.steps for call in step.calls):
                msgspec.convert(call.arguments, RECORDED_TOOLS[call.tool])
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        raise StartError(f"{file} holds an invalid decision: {error}") from error
    width = len(plan.entrants)
    states = [sittings[first : first + width] for first in range(0, len(sittings) - len(sittings) % width, width)]
    for place, state in enumerate(states):
        if [each.entrant for each in state] != plan.entrants or len({(each.state, each.sample) for each in state}) > 1:
            raise ContradictoryExam(
                f"{file}: lines {place * width + 1} to {place * width + width} do not belong to one state"
            )
        number, sample = state[0].state, state[0].sample
        if not (0 <= number < len(plan.states) and 0 <= sample < plan.samples):
            raise ContradictoryExam(f"{file}: state {number} with sample {sample} is not planned")
    return states


def read_sittings(folder: Path, plan: ExamPlan) -> list[Sitting]:
    """Return the decisions so far. Raise like `read_states`."""
    return [sitting for state in read_states(folder, plan) for sitting in state]


class Sheet:
    """The file of decisions, open for appending by one process. Raises `OSError` if another has it."""

    def __init__(self, folder: Path, plan: ExamPlan) -> None:
        file = folder / SITTINGS
        with ExitStack() as undo:
            self._file = undo.enter_context(open_appending(file))
            self.sittings = read_sittings(folder, plan)
            self._file.truncate(sum(map(len, islice(read_lines(file, BYTES_MAX), len(self.sittings)))))
            undo.pop_all()

    def add(self, sittings: Sequence[Sitting]) -> None:
        """Write decisions at once. Raises `OSError`."""
        append(self._file, b"".join(msgspec.json.encode(each) + b"\n" for each in sittings))
        self.sittings += sittings

    def close(self) -> None:
        self._file.close()


def judged(plan: ExamPlan, sittings: Sequence[Sitting]) -> PairComparison | None:
    """Return the comparison that the plan asks for; None if it asks for none."""
    if plan.compared is None:
        return None
    first, second = ([each for each in sittings if each.entrant == name] for name in plan.compared)
    return compare(differences(first, second, plan.samples), plan.bound)
