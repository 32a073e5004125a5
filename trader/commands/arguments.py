"""Types of arguments that several commands share."""

import argparse


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
