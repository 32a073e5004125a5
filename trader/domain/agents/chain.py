"""The chain: a digest for every finished invocation and every record of results that also covers all digests before it.

Whoever knows a digest of the chain knows whether anything before it was changed since: a record, or which records there
are, and in what order.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
import orjson

from trader.clock import iso
from trader.domain.agents.conversation import Message
from trader.domain.agents.entrants import Entrant, canonical_json, fingerprint
from trader.domain.agents.invocations import Invocation, Step, ToolCall, client_order_id
from trader.domain.agents.results import ChainFinding, FindingKind
from trader.domain.agents.view import View
from trader.domain.money import format_decimal

GENESIS: Final = bytes(32)
"""The digest before that of the first link."""


class PayloadDigests(NamedTuple):
    """Digests of what is kept for a limited time: what the agent was shown, and the raw answers of its provider."""

    view_digest: bytes | None
    answers_digest: bytes | None


NO_PAYLOAD: Final = PayloadDigests(None, None)


class ChainLink(NamedTuple):
    """A link of the chain, in the order of the table's columns. A link of no invocation has its record as text."""

    position: int
    invocation_id: UUID | None
    view_digest: bytes | None
    answers_digest: bytes | None
    record_digest: bytes
    digest: bytes
    kind: str = "invocation"
    record: str | None = None


class Anchor(NamedTuple):
    """The head that the chain had at some time; `source` is who says so."""

    position: int
    digest: bytes
    anchored_at: datetime
    source: str = "the table anchors"


class ChainRecord(NamedTuple):
    """Everything of an invocation that its link covers."""

    invocation: Invocation
    entrant: Entrant | None
    steps: Sequence[Step]
    calls: Sequence[ToolCall]


def shown_digest(shown: Sequence[Message] | View) -> bytes:
    """Return the digest of what an agent was shown: the messages of an AI model or the view of a rule agent."""
    return encoded_digest(msgspec.json.encode(shown))


def answers_digest(answers: Sequence[str]) -> bytes | None:
    """Return the digest of a provider's raw answers, a JSON list of texts; None without any."""
    return encoded_digest(msgspec.json.encode(answers)) if answers else None


def encoded_digest(encoded: bytes) -> bytes:
    """Return the digest of messages, a view or answers that are encoded already."""
    return hashlib.sha256(encoded).digest()


def record_digest(record: ChainRecord, digests: PayloadDigests) -> bytes:
    """Return the SHA-256 of the canonical record of a finished invocation."""
    return hashlib.sha256(record_text(record, digests)).digest()


def record_text(record: ChainRecord, digests: PayloadDigests) -> bytes:
    """Return the canonical record of a finished invocation, as it is digested."""
    return orjson.dumps(record_json(record, digests), option=orjson.OPT_SORT_KEYS)


def link_digest(before: bytes, record: bytes) -> bytes:
    """Return the digest of a link, from that of the link before it and that of its record."""
    return hashlib.sha256(before + record).digest()


def record_json(record: ChainRecord, digests: PayloadDigests) -> dict[str, Any]:
    """Return the record that is digested, as a JSON value that is canonical when its keys are sorted.

    Only the arguments and results of calls may hold what has a form of its own there: these are canonical already.
    """
    done = record.invocation
    return {
        "id": str(done.id),
        "model": done.model_id,
        "entrant": done.entrant,
        "configuration": _configuration_digest(record.entrant),
        "view": _hex(digests.view_digest),
        "answers": _hex(digests.answers_digest),
        "status": done.status,
        "failureReason": done.failure_reason,
        "response": done.response,
        "steps": [_step_json(step) for step in record.steps],
        "calls": [_call_json(call) for call in record.calls],
        "orders": order_ids(record.calls),
        "startedAt": iso(done.started_at),
        "finishedAt": None if done.finished_at is None else iso(done.finished_at),
    }


def order_ids(calls: Iterable[ToolCall]) -> list[str]:
    """Return the ids of the orders that these calls placed, refused ones included."""
    results = [result for call in calls for result in call.metadata.get("results", ())]
    return [result["orderId"] for result in results if isinstance(result, dict) and "orderId" in result]


def placed_under(calls: Iterable[ToolCall]) -> Iterator[str]:
    """Yield the client order ids under which these calls may have placed orders.

    An id that an agent chose counts with a call that placed an order only: one that was refused before it reached the
    books leaves its id to a later call.
    """
    for call in calls:
        chosen = [decision["clientOrderId"] for decision in call.metadata["decisions"] if "clientOrderId" in decision]
        if not chosen:
            yield client_order_id(call.invocation_id, call.number)
        elif order_ids([call]):
            yield from chosen


def _step_json(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "provider": step.provider,
        "model": step.model,
        "tools": list(step.tool_names),
        "inputTokens": step.input_tokens,
        "outputTokens": step.output_tokens,
        "costUsd": None if step.cost_usd is None else format_decimal(step.cost_usd),
        "durationMs": step.duration_ms,
        "at": iso(step.created_at),
    }


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {
        "number": call.number,
        "type": call.type,
        "status": call.status,
        "metadata": orjson.Fragment(canonical_json(msgspec.to_builtins(call.metadata))),
        "at": iso(call.created_at),
    }


def _configuration_digest(entrant: Entrant | None) -> str | None:
    return None if entrant is None or entrant.configuration is None else _text_digest(entrant.configuration)


@lru_cache(maxsize=1024)
def _text_digest(configuration: str) -> str:
    return hashlib.sha256(configuration.encode()).hexdigest()


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


# Verification


class ChainChecker:
    """Follows the links of a chain from the first to the last, and collects what is not as they say."""

    def __init__(self, anchors: Iterable[Anchor]) -> None:
        self.findings: list[ChainFinding] = []
        self.length = 0
        """The position of the last link."""

        self._before = GENESIS
        self._anchors = sorted(anchors, key=lambda anchor: anchor.position)
        self._next_anchor = 0
        self._last_matching: Anchor | None = None
        self._is_rebuilt = False

    def follow(self, link: ChainLink, record: ChainRecord | None) -> None:
        """Check a link against the one before it, against the record made of the rows, and against the anchors."""
        expected = self.length + 1
        if link.position != expected:
            places = str(expected) if link.position == expected + 1 else f"{expected} to {link.position - 1}"
            self._find("removed", expected, f"the links at {places} are gone")
        elif link.digest != link_digest(self._before, link.record_digest):
            text = "the link does not follow from the one before: one was inserted, removed, moved or changed here"
            self._find("changed", link.position, f"{text} ({link.invocation_id or link.kind})")
        digests = PayloadDigests(link.view_digest, link.answers_digest)
        if link.record is not None:
            if hashlib.sha256(link.record.encode()).digest() != link.record_digest:
                self._find("changed", link.position, f"the record {link.kind} is not as it was recorded")
        elif record is None:
            self._find("removed", link.position, f"invocation {link.invocation_id} is gone")
        elif record_digest(record, digests) != link.record_digest:
            text = f"invocation {link.invocation_id} of {record.invocation.model_id} is not as it was recorded"
            self._find("changed", link.position, text)
        self.length, self._before = link.position, link.digest
        self._compare_anchors(link)

    def finish(self) -> None:
        """Check what the anchors say of the end of the chain."""
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
            if self._is_rebuilt:  # no later anchor can match any more
                continue
            self._is_rebuilt = True
            known = 0 if self._last_matching is None else self._last_matching.position
            text = (
                f"the chain is not the one that was anchored at {iso(anchor.anchored_at)} ({anchor.source}): "
                f"it was made anew somewhere from position {known + 1} to {anchor.position}"
            )
            self._find("rebuilt", known + 1, text)

    def _find(self, kind: FindingKind, position: int | None, text: str) -> None:
        self.findings.append(ChainFinding(kind, position, text))


def check_entrant(entrant: Entrant) -> ChainFinding | None:
    """Return what is wrong with the fingerprint of an entrant, if anything is."""
    if entrant.configuration is None:
        return None
    if fingerprint(entrant.configuration, entrant.answered_by) == entrant.fingerprint:
        return None
    return ChainFinding(
        "changed", None, f"entrant {entrant.number} of {entrant.model_id} does not have its fingerprint"
    )
