"""The canonical record of a finished invocation, and its digest, which the chain covers."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import orjson

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.entrants import Entrant, fingerprint
from trader.agents.domain.invocations import Invocation, Step, ToolCall, client_order_id
from trader.agents.domain.view import View
from trader.core.canonical_json import canonical_json
from trader.core.clock import iso
from trader.core.money import format_decimal
from trader.record.domain.chain import ChainLink, LinkedRecord, PayloadDigests, encoded_digest
from trader.record.domain.results import ChainFinding


class ChainRecord(NamedTuple):
    """The parts of an invocation that its link covers."""

    invocation: Invocation
    entrant: Entrant | None
    steps: Sequence[Step]
    calls: Sequence[ToolCall]


def shown_digest(shown: Sequence[ChatMessage] | View) -> bytes:
    """Return the digest of an agent's input: the messages of an AI model or the view of a rule agent."""
    return encoded_digest(msgspec.json.encode(shown, enc_hook=dict))


def record_digest(record: ChainRecord, digests: PayloadDigests) -> bytes:
    """Return the SHA-256 of the canonical record of a finished invocation."""
    return hashlib.sha256(record_text(record, digests)).digest()


def linked_record(link: ChainLink, record: ChainRecord) -> LinkedRecord:
    """Return the current content of the rows of a link's invocation, to be compared with the link."""
    digests = PayloadDigests(link.view_digest, link.answers_digest)
    return LinkedRecord(record_digest(record, digests), record.invocation.model_id)


def record_text(record: ChainRecord, digests: PayloadDigests) -> bytes:
    """Return the canonical record of a finished invocation, from which its digest is computed.

    The arguments and results of calls are already canonical, so only the keys are sorted.
    """
    done = record.invocation
    content = {
        "id": str(done.id),
        "model": done.model_id,
        "entrant": done.entrant,
        "configuration": _configuration_digest(record.entrant),
        "view": _hex(digests.view_digest),
        "answers": _hex(digests.answers_digest),
        "status": done.status,
        "failureReason": done.failure_reason,
        "response": done.response,
        "costUsd": None if done.cost_usd is None else format_decimal(done.cost_usd),
        "steps": [_step_json(step) for step in record.steps],
        "calls": [_call_json(call) for call in record.calls],
        "orders": order_ids(record.calls),
        "startedAt": iso(done.started_at),
        "finishedAt": None if done.finished_at is None else iso(done.finished_at),
    }
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)


def order_ids(calls: Iterable[ToolCall]) -> list[str]:
    """Return the ids of the orders that these calls placed, refused ones included."""
    results = [result for call in calls for result in call.metadata.get("results", ())]
    return [result["orderId"] for result in results if isinstance(result, dict) and "orderId" in result]


def placed_under(calls: Iterable[ToolCall]) -> Iterator[str]:
    """Yield the client order ids under which these calls may have placed orders.

    An id chosen by an agent counts only if its call placed an order: a call that was refused before it reached the
    books leaves its id to a later one.
    """
    for call in calls:
        decisions, results = call.metadata["decisions"], call.metadata["results"]
        chosen = [each["clientOrderId"] for each in decisions if each.get("clientOrderId") is not None]
        if not chosen:
            for place in range(1, 1 + max(1, len(decisions), len(results))):
                yield client_order_id(call.invocation_id, call.number, place)
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


def check_entrant(entrant: Entrant) -> ChainFinding | None:
    """Return the finding if an entrant's fingerprint is wrong, else None."""
    if entrant.configuration is None:
        return None
    with suppress(TypeError, ValueError):  # raised for what another program wrote instead of a JSON object
        if fingerprint(entrant.configuration, entrant.answered_by) == entrant.fingerprint:
            return None
    return ChainFinding(
        "changed", None, f"entrant {entrant.number} of {entrant.model_id} does not match its fingerprint"
    )
