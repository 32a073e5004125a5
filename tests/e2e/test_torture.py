"""kill -9 during an order storm: no acknowledged order is lost or duplicated, and the books are clean."""

from pathlib import Path

import pytest
from support.run_profile import is_nightly
from tools.torture import torture

pytestmark = pytest.mark.processes

ROUNDS = 10 if is_nightly() else 2


async def test_books_are_clean_after_rounds_of_kills(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # as root, the server runs as `nobody`, which must have access
    tally = await torture(rounds=ROUNDS, seed=1, folder=tmp_path)
    assert tally.is_clean, tally
    assert tally.kills == ROUNDS
    assert tally.unanswered > 0, "a kill must have cut off an order of the agent"
    assert len(tally.acknowledged) > 5 * ROUNDS, "each storm must have had orders under way"
