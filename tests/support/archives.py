"""Archives in pg_dump's custom format with any table of contents, as an attacker could write them."""

import struct
from dataclasses import dataclass, field
from typing import Self

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
