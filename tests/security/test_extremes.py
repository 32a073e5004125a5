"""Every procedure with the extremes of its input schema: each call is answered or refused, at low cost."""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import combinations, product
from typing import Final
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from support.calls import Call
from support.composed import composed
from support.records import id_of
from support.served import Client

from trader.agents.domain.tools import UpdateExitPlan
from trader.api.registry import REGISTRY, Procedure, load_procedures
from trader.api.schemas.paging import moment_of
from trader.core.clock import EPOCH, INPUT_TIME_MAX, cut_to_ms
from trader.core.errors import InvalidInput
from trader.core.inputs import struct_of
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database

load_procedures()

STATEMENT_MS: Final = 3000
"""The most time that the database may take for a statement; it ends one that takes longer, which is a 503."""

TIMES: Final = (
    "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "1969-12-31T23:59:59.999Z", "1970-01-01",
    "2025-02-03T04:05:06Z", "2200-01-01T00:00:00Z", "2200-01-01T00:00:00.001Z", "9999-12-31T23:59:59.999Z",
    "9999-12-31T23:59:59.999999-14:00", "2025-02-30T00:00:00Z", "2025-06-30T23:59:60Z", "2025-W01-1",
)  # fmt: skip
TEXTS: Final = ("", "\0", "%_\\'\";--", "\u202e𝕏\x1b[2J", "../../.env", "constructor", "a" * 50_000)
NUMBERS: Final = ("-1", "0", "-0.0", "0.5", "5e-324", "1e308", "1e400", "9007199254740993", "9" * 25, "1" + "0" * 5000)

PLAIN: Final = {"symbol": '"BTC"', "accountId": '"m0"', "modelId": '"m0"', "orderId": f'"{id_of("order", "m0", 1)}"'}
"""Values of fields that name something which there is."""


def extremes(schema: inspect.Type) -> Iterator[str]:
    """Yield the extreme values of a field as JSON: at its bounds and beyond, and some that no schema accepts."""
    match schema:
        case inspect.Metadata():
            is_time = "date-time" in json.dumps(schema.extra_json_schema or {})
            yield from map(json.dumps, TIMES) if is_time else extremes(schema.type)
        case inspect.IntType() | inspect.FloatType():
            bounds = [bound for bound in (schema.ge, schema.gt, schema.le, schema.lt) if bound is not None]
            yield from (f"{bound + step}" for bound, step in product(bounds, (-1, 0, 1)))
            yield from NUMBERS
        case inspect.StrType():
            lengths = [length for length in (schema.min_length, schema.max_length) if length is not None]
            longest = [letter * (length + more) for letter, length, more in product("a𝕏", lengths, (0, 1))]
            yield from map(json.dumps, [*longest, *TEXTS])
        case inspect.LiteralType() | inspect.EnumType():
            values = schema.values if isinstance(schema, inspect.LiteralType) else [each.value for each in schema.cls]
            yield from map(json.dumps, values)
        case inspect.UUIDType():
            yield f'"{UUID(int=2**128 - 1)}"'
        case inspect.DateTimeType():
            yield from map(json.dumps, TIMES)
        case inspect.UnionType():
            for member in schema.types:
                yield from extremes(member)
        case inspect.ListType():
            items = list(extremes(schema.item_type))
            many = schema.max_length or 1000
            yield from (
                "[]",
                *(f"[{item}]" for item in items),
                *(f"[{','.join(items[:1] * n)}]" for n in (many, many + 1)),
            )
        case inspect.BoolType():
            yield from ("false", "true")
        case _ if (struct := struct_of(schema)) is not None:
            yield from (
                f'{{"{field.encode_name}":{value}}}' for field in struct.fields for value in extremes(field.type)
            )
    yield from ("null", "[]", "{}")


def costliest(field: inspect.Field) -> str | None:
    """Return the last choice, the highest number, or true; None for a field without such a value."""
    for schema in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
        match schema:
            case inspect.IntType(le=int(highest)) | inspect.FloatType(le=float(highest)):
                return str(highest)
            case inspect.LiteralType(values=values):
                return json.dumps(values[-1])
            case inspect.BoolType():
                return "true"
    return None


def plain(field: inspect.Field) -> str:
    """Return a valid value for a required field."""
    return PLAIN.get(field.encode_name) or costliest(field) or next(extremes(field.type))


def is_time(field: inspect.Field) -> bool:
    return json.dumps(TIMES[0]) in extremes(field.type)


def bodies(procedure: Procedure) -> Iterable[bytes]:
    """Return the inputs of a procedure, each once: every extreme of a field, and pairs of times, with costly others."""
    struct = struct_of(inspect.type_info(procedure.input_type))
    assert struct is not None
    fields = struct.fields
    cheap = {field.encode_name: plain(field) for field in fields if field.required}
    costly = cheap | {field.encode_name: value for field in fields if (value := costliest(field)) is not None}
    times = [field.encode_name for field in fields if is_time(field)]
    changes = [{field.encode_name: value} for field in fields for value in extremes(field.type)]
    for first, second in combinations(times, 2):
        changes += [{first: json.dumps(one), second: json.dumps(two)} for one, two in product(TIMES[:8], TIMES[:8])]
    inputs = (cheap, costly, *(costly | change for change in changes))
    return dict.fromkeys(
        ("{" + ",".join(f'"{name}":{value}' for name, value in values.items()) + "}").encode() for values in inputs
    )


FILL: Final = """
INSERT INTO models SELECT 'm' || n, 'm' || n, 'Apex', 'rules', 'r', null, true, $1 FROM generate_series(0, 19) n;
INSERT INTO accounts (id, created_at, changed_at) SELECT id, $1, $1 FROM models;
INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
SELECT gen_random_uuid(), id, 1, 10000, 'USDT', $1 FROM models;
INSERT INTO portfolio_hourly SELECT account_id, t, id, 60, 60, 1, t
FROM runs, generate_series($1::timestamptz, $2, '1 hour') t;
INSERT INTO portfolio_snapshots SELECT account_id, id, 1, 1, 0, t
FROM runs, generate_series($2::timestamptz - interval '1 day', $2, '1 minute') t;
INSERT INTO candles SELECT 1, 'BTC', t, 2, 3, 1, 2, 1
FROM generate_series($2::timestamptz - interval '7 days', $2, '1 minute') t
"""


async def fill(conn: Connection, now: datetime) -> None:
    """Write 60 days of twenty models."""
    end = now.replace(minute=0, second=0, microsecond=0)
    begin = end - timedelta(days=60)
    await ensure_partitions(conn, end - timedelta(days=8), end)
    for statement in FILL.split(";\n"):
        given = [moment for mark, moment in (("$1", begin), ("$2", end)) if mark in statement]
        await conn.execute(statement if "$1" in statement else statement.replace("$2", "$1"), *given)


async def problems_of(client: Client, procedure: Procedure, headers: dict[str, str]) -> list[str]:
    problems = []
    for body in bodies(procedure):
        async with client.post(f"/api/rpc/{procedure.name}", data=body, headers=headers) as response:
            if response.status >= 500 or response.status == 401:
                problems.append(f"{procedure.name} {body[:300]!r}: {response.status} {(await response.text())[:200]}")
    return problems


AGENT: Final = "agents add scout --variant Apex --decisions 9 --requests 60000 --scopes read,trade,operate --json"


@pytest.mark.slow
async def test_every_extreme_of_every_procedure_is_answered_or_refused_at_low_cost(
    database: Database, dsn: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trader.exchange.halts.SAVE_WAIT_S", 0.001)  # nothing here writes what a halt leaves to others
    async with database.connection() as conn:
        await fill(conn, datetime.now(UTC))
    anybody = {"Content-Type": "application/json"}
    agent = anybody | {"Authorization": f"Bearer {json.loads((await call(*AGENT.split())).out)['key']}"}
    problems = []
    address = f"{dsn}{'&' if '?' in dsn else '?'}statement_timeout={STATEMENT_MS}"
    async with composed(address, MARKET_SOURCE="synthetic", SIM_LATENCY_MS="0") as (_, client):
        for procedure in REGISTRY.procedures.values():
            problems += await problems_of(client, procedure, anybody if procedure.scope is None else agent)
        async with client.get("/health/live") as response:
            assert response.status == 200
    assert not problems, f"{len(problems)}: " + "\n".join(problems[:20])


EDGES: Final = [EPOCH, INPUT_TIME_MAX, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
ZONES: Final = st.one_of(st.none(), st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes))))
MOMENTS: Final = st.one_of(
    st.datetimes(timezones=ZONES),
    st.builds(
        lambda edge, before, zone: (edge + timedelta(microseconds=before)).astimezone(zone),
        st.sampled_from(EDGES[:2]),
        st.integers(-10, 10),
        ZONES,
    ),
    st.sampled_from(EDGES[2:]).flatmap(lambda edge: ZONES.map(lambda zone: edge.replace(tzinfo=zone))),
)


@given(moment=MOMENTS)
def test_times_from_1970_to_2200_are_accepted_and_others_refused(moment: datetime) -> None:
    plain, zone = moment.replace(tzinfo=None), moment.utcoffset() or timedelta()
    ends = [end.replace(tzinfo=None) + zone for end in (EPOCH, INPUT_TIME_MAX)]
    if ends[0] <= plain <= ends[1]:
        assert moment_of(moment.isoformat(), "before") == cut_to_ms(plain.replace(tzinfo=timezone(zone)))
    else:
        with pytest.raises(InvalidInput, match="from 1970-01-01 to 2200-01-01"):
            moment_of(moment.isoformat(), "before")
        with pytest.raises(ValueError, match="`timeExit`: expected a time from 1970"):
            UpdateExitPlan(symbol="BTC", time_exit=moment)
