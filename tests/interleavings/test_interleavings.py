"""Every operation of the service, with another actor in each of its gaps: books, memory and record agree.

By day, each actor acts in one gap of each operation, drawn by a seed; with HYPOTHESIS_PROFILE=nightly it acts in every
gap. A failure prints its schedules; one of them runs again with SCHEDULE="operation / actor / gap" and `-k again`.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable
from random import Random
from typing import Final

import pytest
from interleavings.arena import Arena
from interleavings.checks import problems_before, problems_of, problems_of_leading, problems_of_memory
from interleavings.gaps import FAULTS, GapDatabase, asked_for, gaps_for, run_as
from interleavings.neighbors import problems_of_neighbors
from interleavings.schedules import ACTORS, OPERATIONS, PAIRS, Schedule
from support.run_profile import is_nightly

from trader.core.errors import TraderError

AFTER_ITS_END: Final = 999
"""The number of a gap that no operation has: the actor acts when the operation is over."""

USUAL_GAPS: Final = 40
"""A sample is drawn from this many gaps; for an operation with fewer, some lie after its end."""

GAPS: Final[dict[str, list[str]]] = {}
"""The gaps of the operations that this worker has run."""

SHOWN: Final = 12
END_S: Final = 60.0


class Bugs(logging.Handler):
    """Collects the tracebacks that the service logs, which show bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.found.append(f"bug: {record.getMessage()}: {record.exc_info[1]!r}")


class Outcome:
    """The outcome of one schedule."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gap = ""
        self.gaps: list[str] = []
        self.problems: list[str] = []

    def __str__(self) -> str:
        return "\n    ".join([f'SCHEDULE="{self.name}"  # {self.gap}', *self.problems[:SHOWN]])


async def run(database: GapDatabase, operation: str, actor: str, at: int) -> Outcome:
    """Run one schedule from an empty database to its end, and check everything."""
    outcome, bugs = Outcome(f"{operation} / {actor} / {at}"), Bugs()
    logging.getLogger("trader").addHandler(bugs)
    gaps = database.begin()
    arena = Arena(database)
    schedule = Schedule(arena, gaps)
    chosen = OPERATIONS[operation]
    try:
        async with asyncio.timeout(END_S):
            await arena.open()
            await chosen.prepare(schedule)
            with gaps.watching(chosen.process, at, lambda: _step(ACTORS[actor], schedule)):
                schedule.task = asyncio.ensure_future(run_as(chosen.process, _step(chosen.run, schedule)))
                ended = (await asyncio.gather(schedule.task, return_exceptions=True))[0]
                await gaps.act()  # if the operation had no such gap: after its end
                assert gaps.acted is not None
                acted = (await asyncio.gather(gaps.acted, return_exceptions=True))[0]
            outcome.gaps = gaps.passed
            outcome.gap = gaps.passed[at] if at < len(gaps.passed) else "after its end"
            gaps.fault = None
            for who, error in (("the operation", ended), ("the actor", acted)):
                if isinstance(error, Exception) and not isinstance(error, TraderError):
                    outcome.problems.append(f"{who} raised {error!r}")
            outcome.problems += await problems_before(arena)
            outcome.problems += await problems_of_memory(arena)
            await gaps.land()
            leader = await arena.settle()
            await arena.let_old_leaders_go_on(leader)
            outcome.problems += await problems_of_leading(arena, leader)
            outcome.problems += await problems_of_neighbors(arena, leader)
            outcome.problems += await problems_of(arena, await arena.restart())
    except TimeoutError as error:
        outcome.problems.append(f"it came to no end within {END_S:g} s; what waited:")
        outcome.problems += traceback.format_exception(error.__cause__ or error.__context__ or error)
    except Exception as error:
        error.add_note(outcome.name)
        raise
    finally:
        await arena.close()
        logging.getLogger("trader").removeHandler(bugs)
    outcome.problems += bugs.found
    return outcome


async def _step(step, schedule: Schedule) -> object:  # type: ignore[no-untyped-def]
    return await step(schedule)


async def gaps_of(database: GapDatabase, operation: str, actor: str) -> list[str]:
    """Return the gaps of an operation."""
    if operation not in GAPS:
        outcome = await run(database, operation, actor, AFTER_ITS_END)
        assert outcome.gaps, "the operation has no gap: nothing was watched"
        assert not outcome.problems, str(outcome)
        GAPS[operation] = outcome.gaps
    return GAPS[operation]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("pair", [" / ".join(pair) for pair in PAIRS])
async def test_an_actor_in_a_gap_of_an_operation(
    database: GapDatabase, pair: str, record_property: Callable[[str, object], None]
) -> None:
    operation, actor = pair.split(" / ")
    if not is_nightly():
        chosen = [Random(pair).randrange(USUAL_GAPS)]
    else:
        chosen = gaps_for(actor, await gaps_of(database, operation, actor))
        if actor not in FAULTS:
            chosen.append(AFTER_ITS_END)
    outcomes = [await run(database, operation, actor, at) for at in chosen]
    record_property("schedules", len(outcomes))
    failed = [outcome for outcome in outcomes if outcome.problems]
    assert not failed, f"{len(failed)} of {len(outcomes)} schedules:\n" + "\n".join(map(str, failed[:8]))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.skipif(asked_for()[0] not in OPERATIONS, reason="SCHEDULE names none of these")
async def test_again(database: GapDatabase) -> None:
    operation, actor, at = asked_for()
    outcome = await run(database, operation, actor, int(at))
    print("\n".join(f"{number}: {label}" for number, label in enumerate(database.gaps.passed)))
    assert not outcome.problems, str(outcome)
