"""The raw answers shown with the runs: for each run as long as they are retained, and bounded."""

import msgspec
from support.trading_floor import Floor, calling, hold

from trader.agents.invocations import ANSWERS_BYTES_MAX, INVOCATION_ANSWERS_BYTES_MAX
from trader.api.schemas.common import UNSET
from trader.api.schemas.models import invocation_of
from trader.core.errors import ProviderError


def saying(length: int) -> list[object]:
    return [msgspec.structs.replace(hold(), raw="x" * length)]


async def test_answers_are_shown_on_request(floor: Floor) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [calling(("fetchIndicators", {"symbol": "BTC", "interval": "4h"})), hold()]
    await floor.cycle()
    (without,) = await floor.invocations.finished()
    assert invocation_of(without).response_payload is UNSET
    (shown,) = await floor.invocations.finished(with_answers=True)
    assert invocation_of(shown).response_payload == ['{"said": 1}', '{"said": 1}']
    async with floor.database.connection() as conn:
        await conn.execute("DELETE FROM invocation_payloads")
    (gone,) = await floor.invocations.finished(with_answers=True)
    assert gone.answers is None


async def test_long_answers_are_omitted_and_the_newest_come_first(floor: Floor) -> None:
    names = [f"m{number:02}" for number in range(18)]
    await floor.add(*names)
    for name in names:
        floor.provider.scripts[name] = saying(INVOCATION_ANSWERS_BYTES_MAX - 4)  # type: ignore[assignment]
    floor.provider.scripts["m05"] = saying(INVOCATION_ANSWERS_BYTES_MAX)  # type: ignore[assignment]
    await floor.cycle()
    records = await floor.invocations.finished(with_answers=True)
    assert [record.model.id for record in records] == names
    shown = [record.model.id for record in records if record.answers is not None]
    assert len(shown) == ANSWERS_BYTES_MAX // INVOCATION_ANSWERS_BYTES_MAX
    assert shown == [name for name in names if name != "m05"][: len(shown)]


async def test_unusable_answers_are_stored_too(floor: Floor) -> None:
    failure = ProviderError("fake answered 200 with text/html instead of JSON; gave up after 4 attempts")
    failure.raw = "<html>Please log in</html>"
    await floor.add("ada")
    floor.provider.scripts["ada"] = [calling(("fetchIndicators", {"symbol": "BTC", "interval": "4h"})), failure]
    await floor.cycle()
    (record,) = await floor.invocations.finished(with_answers=True)
    assert record.invocation.status == "failed"
    assert record.answers == ['{"said": 1}', "<html>Please log in</html>"]


async def test_a_rule_agent_has_no_raw_answers(floor: Floor) -> None:
    await floor.add("ada")
    floor.provider.is_remote = False
    floor.provider.scripts["ada"] = saying(0)  # type: ignore[assignment]
    await floor.cycle()
    (record,) = await floor.invocations.finished(with_answers=True)
    assert record.answers is None
