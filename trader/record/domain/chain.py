"""The chain: one digest per finished invocation or record of results, which also covers all earlier digests.

Anyone who knows one digest of the chain can tell whether anything before it has changed: a record, the set of records,
or their order.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from trader.core.clock import iso
from trader.record.domain.results import ChainFinding, FindingKind

GENESIS: Final = bytes(32)
"""The digest that precedes the first link."""


class PayloadDigests(NamedTuple):
    """Digests of data kept for a limited time: the agent's view, and its provider's raw answers."""

    view_digest: bytes | None
    answers_digest: bytes | None


NO_PAYLOAD: Final = PayloadDigests(None, None)


class ChainLink(NamedTuple):
    """A link of the chain, with its fields in column order. A link without an invocation has its record as text."""

    position: int
    invocation_id: UUID | None
    view_digest: bytes | None
    answers_digest: bytes | None
    record_digest: bytes
    digest: bytes
    kind: str = "invocation"
    record: str | None = None


class LinkedRecord(NamedTuple):
    """The current state of an invocation's rows: the digest of its record, and its model."""

    digest: bytes
    model_id: str


class Anchor(NamedTuple):
    """The head of the chain at some time; `source` says where it is recorded.

    One with a `register` is of a register of exams, which the digest of its first line names, and not of the chain.
    """

    position: int
    digest: bytes
    anchored_at: datetime
    source: str = "the table anchors"
    register: str | None = None


def unmatched(anchors: Iterable[Anchor], digests: Mapping[int, bytes]) -> list[tuple[Anchor, bytes | None]]:
    """Return the anchors that the digests by position contradict, with the digest at their position."""
    found = [(anchor, digests.get(anchor.position)) for anchor in anchors]
    return [(anchor, digest) for anchor, digest in found if digest != anchor.digest]


def answers_digest(answers: Sequence[str]) -> bytes | None:
    """Return the digest of a provider's raw answers, a JSON list of texts; None if there are none."""
    return encoded_digest(msgspec.json.encode(answers)) if answers else None


def encoded_digest(encoded: bytes) -> bytes:
    """Return the digest of messages, a view or answers that are already encoded."""
    return hashlib.sha256(encoded).digest()


def link_digest(before: bytes, record: bytes) -> bytes:
    """Return the digest of a link from the previous link's digest and its own record's digest."""
    return hashlib.sha256(before + record).digest()


class ChainChecker:
    """Follows the links of a chain from first to last, and collects every contradiction."""

    def __init__(self, anchors: Iterable[Anchor]) -> None:
        self.findings: list[ChainFinding] = []
        self.length = 0
        """The position of the last link."""

        self._before = GENESIS
        self._anchors = sorted(anchors, key=lambda anchor: anchor.position)
        self._next_anchor = 0
        self._last_matching: Anchor | None = None
        self._is_rebuilt = False

    def follow(self, link: ChainLink, record: LinkedRecord | None) -> None:
        """Check a link against the previous link, against the record made from the rows, and against the anchors."""
        expected = self.length + 1
        if link.position != expected:
            places = str(expected) if link.position == expected + 1 else f"{expected} to {link.position - 1}"
            self._find("removed", expected, f"the links at {places} are gone")
        elif link.digest != link_digest(self._before, link.record_digest):
            text = "the link does not follow from its predecessor: a link was inserted, removed, moved or changed here"
            self._find("changed", link.position, f"{text} ({link.invocation_id or link.kind})")
        if link.record is not None:
            if hashlib.sha256(link.record.encode()).digest() != link.record_digest:
                self._find("changed", link.position, f"the record {link.kind} was changed")
        elif record is None:
            self._find("removed", link.position, f"invocation {link.invocation_id} is gone")
        elif record.digest != link.record_digest:
            text = f"invocation {link.invocation_id} of {record.model_id} was changed"
            self._find("changed", link.position, text)
        self.length, self._before = link.position, link.digest
        self._compare_anchors(link)

    def finish(self) -> None:
        """Check the end of the chain against the anchors."""
        beyond = self._anchors[self._next_anchor :]
        if beyond:
            last = beyond[-1]
            text = f"the chain ends here, and was {last.position} links long at {iso(last.anchored_at)} ({last.source})"
            self._find("cut off", self.length + 1, text)

    def _compare_anchors(self, link: ChainLink) -> None:
        while self._next_anchor < len(self._anchors):
            anchor = self._anchors[self._next_anchor]
            if anchor.position > link.position:
                return
            self._next_anchor += 1
            if anchor.position == link.position and anchor.digest == link.digest:
                self._last_matching = anchor
                continue
            if self._is_rebuilt:  # no later anchor can match anymore
                continue
            self._is_rebuilt = True
            known = 0 if self._last_matching is None else self._last_matching.position
            text = (
                f"the chain is not the one that was anchored at {iso(anchor.anchored_at)} ({anchor.source}): "
                f"it was rebuilt somewhere from position {known + 1} to {anchor.position}"
            )
            self._find("rebuilt", known + 1, text)

    def _find(self, kind: FindingKind, position: int | None, text: str) -> None:
        self.findings.append(ChainFinding(kind, position, text))
