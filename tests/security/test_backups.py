"""A backup is data: no file can execute anything, and only rows that the schema allows are restored."""

import asyncio
import shutil
import stat
import struct
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.records import HOUR, START, add_model, add_trade
from support.tables import digests

from trader.commands.backup import restore_file
from trader.core.errors import StartError
from trader.database.embedded import dumps
from trader.database.embedded.binaries import wheel_binaries
from trader.database.pool import Database
from trader.database.schema import schema_version

pytestmark = pytest.mark.processes

_MAGIC = b"PGDMP"


_OFFSET_UNKNOWN = b"\x01"


_TEXTS_BEFORE = 2
"""The OIDs of the catalog and of the object, as texts, precede the tag."""


@dataclass
class Entry:
    """An entry of a table of contents. Its texts are pg_dump's or any others; None: no text."""

    number: int
    has_data: int
    oids: list[bytes | None]
    tag: bytes | None
    kind: bytes | None
    section: int
    definition: bytes | None
    drop: bytes | None
    copy: bytes | None
    schema: bytes | None
    tablespace: bytes | None
    method: bytes | None
    relation_kind: int | None
    owner: bytes | None
    with_oids: bytes | None
    dependencies: list[bytes] = field(default_factory=list)


class Archive:
    """The table of contents of an archive, with everything else unchanged."""

    def __init__(self, head: bytes, entries: list[Entry], data: bytes, layout: "_Layout") -> None:
        self._head, self._data, self._layout = head, data, layout
        self.entries = entries

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Read an archive of pg_dump 15 or later."""
        assert content.startswith(_MAGIC)
        version = (content[5], content[6])
        layout = _Layout(content, version, int_bytes=content[8], offset_bytes=content[9])
        layout.place = 11
        if version >= (1, 15):
            layout.place += 1  # the method of compression
        else:
            layout.number()
        for _ in range(7):
            layout.number()  # the time
        for _ in range(3):
            layout.text()  # the database, the versions of the server and of pg_dump
        head = content[: layout.place]
        entries = [layout.entry() for _ in range(layout.number())]
        return cls(head, entries, content[layout.place :], layout)

    def rows_of(self, table: str) -> Entry:
        """Return the entry with the rows of a table."""
        (found,) = [entry for entry in self.entries if (entry.kind, entry.tag) == (b"TABLE DATA", table.encode())]
        return found

    def written(self) -> bytes:
        """Return the archive; pg_restore looks for the rows of each entry by its number."""
        layout = self._layout
        table = b"".join(layout.written_entry(entry) for entry in self.entries)
        return self._head + layout.written_number(len(self.entries)) + table + self._data


class _Layout:
    def __init__(self, content: bytes, version: tuple[int, int], *, int_bytes: int, offset_bytes: int) -> None:
        self._content, self._version = content, version
        self._int_bytes, self._offset_bytes = int_bytes, offset_bytes
        self.place = 0

    def number(self) -> int:
        sign, *digits = self._content[self.place : self.place + 1 + self._int_bytes]
        self.place += 1 + self._int_bytes
        return (-1 if sign else 1) * int.from_bytes(bytes(digits), "little")

    def text(self) -> bytes | None:
        length = self.number()
        if length < 0:
            return None
        self.place += length
        return self._content[self.place - length : self.place]

    def entry(self) -> Entry:
        number, has_data = self.number(), self.number()
        oids = [self.text() for _ in range(_TEXTS_BEFORE)]
        tag, kind, section = self.text(), self.text(), self.number()
        definition, drop, copy, schema, tablespace = (self.text() for _ in range(5))
        method = self.text()
        relation_kind = self.number() if self._version >= (1, 16) else None
        owner, with_oids = self.text(), self.text()
        dependencies = list(iter(self.text, None))
        self.place += 1 + self._offset_bytes
        return Entry(
            number, has_data, oids, tag, kind, section, definition, drop, copy, schema, tablespace, method,
            relation_kind, owner, with_oids, [text for text in dependencies if text is not None],
        )  # fmt: skip

    def written_number(self, number: int) -> bytes:
        return struct.pack("<B", number < 0) + abs(number).to_bytes(self._int_bytes, "little")

    def _written_text(self, text: bytes | None) -> bytes:
        return self.written_number(-1) if text is None else self.written_number(len(text)) + text

    def written_entry(self, entry: Entry) -> bytes:
        texts = (entry.definition, entry.drop, entry.copy, entry.schema, entry.tablespace, entry.method)
        parts = [
            self.written_number(entry.number),
            self.written_number(entry.has_data),
            *map(self._written_text, (*entry.oids, entry.tag, entry.kind)),
            self.written_number(entry.section),
            *map(self._written_text, texts),
            b"" if entry.relation_kind is None else self.written_number(entry.relation_kind),
            *map(self._written_text, (entry.owner, entry.with_oids, *entry.dependencies, None)),
            _OFFSET_UNKNOWN + bytes(self._offset_bytes),
        ]
        return b"".join(parts)


RUNS = """
CREATE OR REPLACE FUNCTION {name}(number integer) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
    COPY (SELECT 1) TO PROGRAM 'touch {marker}';
    RETURN true;
END $$
"""


def copy_of(table: str, **row: object) -> str:
    """Return the text that copies a row into a table, in the schema found by the search path."""
    return f"COPY x.{table} ({', '.join(row)}) FROM stdin;\n" + "\t".join(map(str, row.values())) + "\n\\.\n"


def takeover(plpgsql: int, marker: Path) -> bytes:
    """Return catalog rows that create a superuser, and run a program at the next change of a table."""
    allowed = ("super", "inherit", "createrole", "createdb", "canlogin", "replication", "bypassrls")
    role = dict.fromkeys((f"rol{name}" for name in allowed), "t")
    function = {
        "proname": "evil", "pronamespace": 2200, "proowner": 10, "prolang": plpgsql, "procost": 1, "prorows": 0,
        "provariadic": 0, "prosupport": "-", "prokind": "f", "prosecdef": "f", "proleakproof": "f", "proisstrict": "f",
        "proretset": "f", "provolatile": "v", "proparallel": "u", "pronargs": 0, "pronargdefaults": 0,
        "prorettype": 3838, "proargtypes": "",
        "prosrc": f"BEGIN COPY (SELECT 1) TO PROGRAM 'cat > {marker}'; END",
    }  # fmt: skip
    trigger = {"evtname": "evil", "evtevent": "ddl_command_end", "evtowner": 10, "evtfoid": 999002, "evtenabled": "O"}
    texts = (
        copy_of("pg_authid", oid=999001, rolname="evilroot", **role, rolconnlimit=-1),
        copy_of("pg_proc", oid=999002, **function),
        copy_of("pg_event_trigger", oid=999003, **trigger),
    )
    return "\n".join(texts).encode()


def before_the_rows(archive: Archive, rows: bytes) -> None:
    archive.rows_of("models").copy = rows + (archive.rows_of("models").copy or b"")


def instead_of_the_rows(archive: Archive, rows: bytes) -> None:
    archive.rows_of("models").copy = rows


def after_the_rows(archive: Archive, rows: bytes) -> None:
    (last,) = [entry for entry in archive.entries if entry.kind == b"SEQUENCE SET"][-1:]
    last.kind, last.section, last.copy, last.has_data = b"TABLE DATA", 3, rows, 1


def in_the_search_path(archive: Archive, rows: bytes) -> None:
    (entry,) = [entry for entry in archive.entries if entry.kind == b"SEARCHPATH"]
    entry.definition = rows


def by_name(archive: Archive, rows: bytes) -> None:
    entry = archive.rows_of("models")
    entry.schema, entry.tag, entry.copy = b"x", b"pg_authid", rows


def twice(archive: Archive, rows: bytes) -> None:
    entry = archive.rows_of("models")
    archive.entries.append(replace(entry, copy=rows + (entry.copy or b"")))


PLACES = (before_the_rows, instead_of_the_rows, after_the_rows, in_the_search_path, by_name, twice)


REFUSED = "instead of the rows|the rows of models more than once|the schemas|which no"


async def test_catalog_rows_create_no_superuser_and_run_no_program(
    source: Database, dsn: str, empty_dsn: str, empty_superuser_dsn: str, tmp_path: Path, marker: Path
) -> None:
    file = await dumped(dsn, tmp_path)
    content = file.read_bytes()
    async with source.connection() as conn:
        language = await conn.fetchval("SELECT oid FROM pg_language WHERE lanname = 'plpgsql'")
        for put in PLACES:
            archive = Archive.read(content)
            put(archive, takeover(language, marker))
            file.write_bytes(archive.written())
            for target, reason in ((empty_superuser_dsn, "`createdb --owner trader trader`"), (empty_dsn, REFUSED)):
                with pytest.raises(StartError, match=reason):
                    await restored(file, target)
                assert not await conn.fetchval("SELECT count(*) FROM pg_authid WHERE rolname = 'evilroot'"), put
                assert not marker.exists(), put
                assert await digests(empty_dsn) == {}, put


FIELDS = ("tag", "kind", "schema", "definition", "copy", "drop", "owner", "section", "has_data", "number")
TEXTS = st.one_of(
    st.none(),
    st.binary(max_size=20).filter(lambda text: b"\0" not in text),
    st.sampled_from([
        b"models", b"accounts", b"pg_authid", b"x", b"pg_catalog", b"-", b"TABLE DATA", b"TABLE", b"COMMENT", b"BLOB",
        b"a b", b"models; 1 2 TABLE DATA public accounts", b"models\n9; 0 0 TABLE DATA x pg_authid -", b"(pg_authid",
        b"COPY x.pg_authid (oid) FROM stdin;\n1\n\\.\n", b"COPY public.accounts (id) FROM stdin;\n1\n\\.\n",
        b"COPY public.models (id) FROM stdin;\n", b'COPY "x".pg_authid (oid) FROM stdin;\n',
        b"COPY models (id) FROM stdin;", b"COPY (SELECT 1) TO PROGRAM 'touch ran';", b"\\! touch ran\n",
        b"\\.\nDROP TABLE models;\n",
    ]),
)  # fmt: skip


@pytest.fixture(scope="session")
def archive(server_dsn: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A backup of an empty database."""
    file = tmp_path_factory.mktemp("archive") / "a.dump"
    address = dumps.libpq_address(urlsplit(server_dsn)._replace(path=f"/{template}").geturl())
    asyncio.run(dumps.dump(address, 15, file))
    return file.read_bytes()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_table_of_contents_is_read_as_tables_each_once_or_refused(
    archive: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    changed, file = Archive.read(archive), tmp_path / "changed.dump"
    for _ in range(data.draw(st.integers(1, 3))):
        entry = data.draw(st.sampled_from(changed.entries))
        name = data.draw(st.sampled_from(FIELDS))
        is_number = isinstance(getattr(entry, name), int)
        setattr(entry, name, data.draw(st.integers(-2, 4000) if is_number else TEXTS))
        if data.draw(st.booleans()):
            changed.entries.insert(data.draw(st.integers(0, len(changed.entries))), entry)
    file.write_bytes(changed.written())

    async def read() -> None:
        entries = [entry for entry in await dumps.list_entries(file) if entry.kind == dumps.ROWS]
        async with dumps.reading(file, entries) as source:
            tables = []
            async for table, _ in source.tables():
                tables.append(table)
                async for _ in source.rows():
                    pass
        assert tables == [entry.tag for entry in entries]
        assert len(set(tables)) == len(tables)

    with suppress(StartError):
        asyncio.run(read())


LINES = st.sampled_from([
    b"COPY public.models (id) FROM stdin;", b"COPY public.accounts (id, name) FROM stdin;", b"COPY ", b"-- COPY",
    b"COPY x.models (id) FROM stdin;", b'COPY "public".models (id) FROM stdin;', b"COPY models (id) FROM stdin;",
    b"COPY public.pg_authid (oid) FROM stdin;", b"copy public.models (id) from stdin;", b"COPY models TO stdout;",
    b"COPY public.models (id) FROM PROGRAM 'id';", b"DROP TABLE models;", b"\\! id", b"ada", b"\xff\x00", b"",
    b"\\.", b"\\.\r", b" \\.", b"\\\\.",
])  # fmt: skip


@given(lines=st.lists(LINES, max_size=12), is_cut=st.booleans())
async def test_any_script_is_read_as_tables_each_once_or_refused(lines: list[bytes], *, is_cut: bool) -> None:
    script = asyncio.StreamReader()
    script.feed_data(b"\n".join(lines) + (b"" if is_cut else b"\n"))
    script.feed_eof()
    entries = [dumps.DumpEntry("", dumps.ROWS, "public", table) for table in ("models", "accounts")]
    source, tables, rows = dumps.DumpRows(script, entries), [], b""
    with suppress(StartError):
        async for table, _ in source.tables():
            tables.append(table)
            async for part in source.rows():
                rows += part
        assert tables == ["models", "accounts"]
    assert tables == ["models", "accounts"][: len(tables)]
    assert b"\\.\n" not in b"\n" + rows.replace(b"\\\\.", b"").replace(b" \\.", b"")


@pytest.fixture
async def source(database: Database) -> Database:
    async with database.connection() as conn:
        await add_model(conn, "ada")
        await add_trade(conn, "ada", START + HOUR)
    return database


@pytest.fixture
def marker(open_folder: Path) -> Path:
    """A file that any user of the machine could create, and that a program which must not run creates."""
    open_folder.chmod(0o777)
    return open_folder / "ran"


async def dumped(dsn: str, folder: Path) -> Path:
    await dumps.dump(dumps.libpq_address(dsn), 15, folder / "a.dump")
    return folder / "a.dump"


async def restored(file: Path, dsn: str) -> None:
    await restore_file(file, dsn, schema_version())


async def test_a_function_in_the_file_is_refused_by_name(
    source: Database, dsn: str, empty_dsn: str, tmp_path: Path, marker: Path
) -> None:
    async with source.connection() as conn:
        await conn.execute(RUNS.format(name="evil", marker=marker))
        await conn.execute("ALTER TABLE models ADD CHECK (evil(1)) NOT VALID")
    file = await dumped(dsn, tmp_path)
    with pytest.raises(StartError, match=r"the function evil\(integer\), which no database of trader has"):
        await restored(file, empty_dsn)
    assert not marker.exists()
    assert await digests(empty_dsn) == {}


async def test_nothing_in_a_file_is_executed_even_under_a_known_name(
    source: Database, dsn: str, empty_dsn: str, tmp_path: Path, marker: Path
) -> None:
    psql = f"'\n\\! touch {marker}\n\\.\nDROP TABLE models;\n'"
    async with source.connection() as conn:
        await conn.execute(RUNS.format(name="count_invocations", marker=marker))
        await conn.execute("ALTER TABLE models ADD CONSTRAINT models_pkey2 CHECK (count_invocations(1)) NOT VALID")
        await conn.execute("ALTER TABLE models DROP CONSTRAINT models_pkey CASCADE")
        await conn.execute("ALTER TABLE models RENAME CONSTRAINT models_pkey2 TO models_pkey")
        await conn.execute(f"ALTER TABLE models ALTER COLUMN logo SET DEFAULT {psql}")
        await conn.execute(f"COMMENT ON TABLE models IS {psql}")
    before = await digests(dsn)
    await restored(await dumped(dsn, tmp_path), empty_dsn)
    assert not marker.exists()
    assert await digests(empty_dsn) == before
    conn = await asyncpg.connect(empty_dsn)
    try:
        assert not await conn.fetchval("SELECT count(*) FROM pg_proc WHERE prosrc LIKE '%PROGRAM%'")
        assert await conn.fetchval("SELECT contype FROM pg_constraint WHERE conname = 'models_pkey'") == b"p"
    finally:
        await conn.close()


INSERT_BASELINE = """
INSERT INTO baselines (id, name, run_id, initial_capital, started_at, state, seen_until)
VALUES ('baseline/own', 'own', gen_random_uuid(), 1, now(),
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("SET session_replication_role = replica; DELETE FROM models; DELETE FROM accounts", "foreign key"),
        ("ALTER TABLE orders ADD COLUMN more text", 'column "more" of relation "orders" does not exist'),
        ("CREATE TABLE portfolio_snapshots_20250101 (id text)", "which no database of trader has"),
        ("CREATE TABLE portfolio_snapshots_99999999 (id text)", "which no database of trader has"),
        ("CREATE VIEW accounts_of_mine AS SELECT 1 AS one", "the view accounts_of_mine, which no database"),
        ("UPDATE models SET created_at = '294000-01-01'", "a row of models with a time outside of 1970 to 2200"),
        ("UPDATE runs SET started_at = '-infinity'", "a row of runs with a time outside of 1970 to 2200"),
        (
            "UPDATE models SET configuration = '{\"every\": 5}'",
            "the row of the model ada cannot be read: Expected `str",
        ),
        (
            "INSERT INTO variants VALUES ('Evil', 9); UPDATE models SET variant = 'Evil'",
            "model ada cannot be read: 'Evil'",
        ),
        (
            f"UPDATE models SET configuration = '{{\"a\": {'[' * 2000}{']' * 2000}}}'",
            "a row that the service cannot read: ",
        ),
        (f"{INSERT_BASELINE} '{{}}', now())", "cannot read: Object missing required field"),
        ("DROP TABLE fills CASCADE; CREATE VIEW fills AS SELECT 1 AS id", None),
    ],
)
async def test_only_rows_that_the_schema_allows_are_restored(
    source: Database, dsn: str, empty_dsn: str, tmp_path: Path, change: str, reason: str | None
) -> None:
    async with source.connection() as conn:
        await conn.execute(change)
    file = await dumped(dsn, tmp_path)
    if reason is None:  # a view has no rows, and its definition is not executed
        await restored(file, empty_dsn)
        return
    with pytest.raises(StartError, match=reason):
        await restored(file, empty_dsn)
    assert await digests(empty_dsn) == {}


async def test_rows_that_are_statements_are_refused(source: Database, dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    binaries = wheel_binaries()
    assert binaries is not None
    command = [binaries.program("pg_dump"), "--format=custom", "--inserts", "--file", str(tmp_path / "a.dump"), dsn]
    subprocess.run(command, check=True)
    with pytest.raises(StartError, match="lacks the rows of"):
        await restored(tmp_path / "a.dump", empty_dsn)
    assert await digests(empty_dsn) == {}


async def test_a_backup_is_readable_by_its_owner_only(source: Database, dsn: str, tmp_path: Path) -> None:
    file = await dumped(dsn, tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    dumps.add_checksum(file)
    assert dumps.has_checksum(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(shutil.which("age") is None, reason="needs the program age")
async def test_an_encrypted_backup_opens_only_with_its_key(tmp_path: Path) -> None:
    subprocess.run(["age-keygen", "-o", tmp_path / "key"], capture_output=True, check=True)
    recipient = (tmp_path / "key").read_text().partition("public key: ")[2].split()[0]
    plain = tmp_path / "plain"
    plain.write_bytes(b"conversations")
    await dumps.encrypt(plain, recipient, tmp_path / "a.dump.age")
    assert stat.S_IMODE((tmp_path / "a.dump.age").stat().st_mode) == 0o600
    assert b"conversations" not in (tmp_path / "a.dump.age").read_bytes()
    opened = subprocess.run(
        ["age", "--decrypt", "-i", tmp_path / "key", tmp_path / "a.dump.age"], capture_output=True, check=True
    )
    assert opened.stdout == b"conversations"
    with pytest.raises(StartError, match="could not be encrypted: age"):
        await dumps.encrypt(plain, "age1nobody", tmp_path / "b.dump.age")
