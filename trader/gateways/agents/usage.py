"""What a provider was asked and what it took, counted since the start of the process."""

from collections import Counter
from typing import Literal

Outcome = Literal["answered", "failed", "rate_limited", "refused"]


class Usage:
    """Attempts by their outcome, tokens, and how often a key was put to rest or out of use."""

    def __init__(self) -> None:
        self.attempts: Counter[Outcome] = Counter()
        self.input_tokens = 0
        self.output_tokens = 0
        self.key_rests = 0
        self.keys_out = 0
