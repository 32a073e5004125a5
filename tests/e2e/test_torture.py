"""kill -9 in the middle of an order storm: nothing acknowledged is lost, nothing is double, the books are clean."""

from pathlib import Path

from support.torture import torture


async def test_five_rounds_of_kills_leave_the_books_clean(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # as root the server runs as nobody, who must get in
    tally = await torture(rounds=5, seed=1, folder=tmp_path)
    assert tally.is_clean, tally
    assert tally.kills == 10
    assert len(tally.acknowledged) > 25, "each storm must have had orders under way"
