"""Types of arguments that several commands share."""

import argparse
from typing import get_args

import msgspec

from trader.agents.domain.mask import MaskPart


def mask_argument(text: str) -> frozenset[MaskPart]:
    """Return the parts of a market that a mask hides."""
    try:
        return msgspec.convert(text.split(","), frozenset[MaskPart])
    except msgspec.ValidationError:
        allowed = ", ".join(get_args(MaskPart))
        raise argparse.ArgumentTypeError(f"expected some of {allowed}, separated by commas, got {text!r}") from None


def port_argument(text: str) -> int:
    """Return a TCP port; 0 takes any free one."""
    if not text.isdecimal() or not int(text) < 65_536:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def deadline_argument(text: str) -> int:
    """Return the seconds that a decision of an external agent may take."""
    if not text.isdecimal() or not 5 <= int(text) <= 600:
        raise argparse.ArgumentTypeError(f"expected whole seconds from 5 to 600, got {text!r}")
    return int(text)


def count_argument(text: str) -> int:
    """Return a number from 1 to 10,000."""
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 10000, got {text!r}")
    return int(text)
