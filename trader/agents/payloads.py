"""Payloads: the parts of an invocation stored outside its rows, compressed and for a limited time."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.invocations import Invocation


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an invocation stored outside its rows, compressed and for a limited time.

    `answers` are the provider's raw answers; a rule agent has neither messages nor answers.
    """

    messages: list[ChatMessage] = []
    answers: list[str] = []
    inputs: list[CallInputs] = msgspec.field(name="meetings", default_factory=list)


class EncodedPayload(msgspec.Struct, frozen=True, kw_only=True):
    """A payload whose long parts are already JSON, since their digests were computed from it."""

    messages: msgspec.Raw
    answers: msgspec.Raw
    inputs: list[CallInputs] = msgspec.field(name="meetings", default_factory=list)


class PayloadPacker:
    """Compresses payloads in a thread, one at a time.

    When many invocations end together, a thread for each would starve the event loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def pack(self, payload: EncodedPayload) -> bytes:
        async with self._turn:
            return await asyncio.to_thread(lambda: zlib.compress(msgspec.json.encode(payload)))


def unpacked(content: bytes) -> Payload:
    return msgspec.json.decode(zlib.decompress(content), type=Payload)


class _Answers(msgspec.Struct):
    """The answers of a payload as undecoded JSON."""

    answers: msgspec.Raw


def answers_of(
    invocations: Sequence[Invocation], payloads: Mapping[UUID, bytes], invocation_bytes_max: int, bytes_max: int
) -> dict[UUID, msgspec.Raw]:
    """Return the raw answers in the payloads, as a JSON list of texts per invocation.

    Call it in a thread for many payloads. Answers of more than `invocation_bytes_max` bytes are omitted, and so is
    everything beyond `bytes_max` in total.
    """
    decoder = msgspec.json.Decoder(_Answers)
    by_invocation: dict[UUID, msgspec.Raw] = {}
    left = bytes_max
    for invocation in invocations:
        if (content := payloads.get(invocation.id)) is None:
            continue
        answers = bytes(decoder.decode(zlib.decompress(content)).answers)
        if answers != b"[]" and len(answers) <= min(invocation_bytes_max, left):
            by_invocation[invocation.id] = msgspec.Raw(answers)
            left -= len(answers)
    return by_invocation
