"""Output of the benchmarks: each figure on one line, with its reference from the same run and its goal."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Figures:
    """Prints figures, and records whether every goal was met."""

    def __init__(self) -> None:
        self.are_met = True

    @property
    def exit_code(self) -> int:
        return 0 if self.are_met else 1

    def show(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        reference: tuple[str, float] | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        is_judged: bool = True,
    ) -> None:
        """Print a figure, the named figure of its reference with their ratio, and whether it meets its goal."""
        line = f"{what:<50}{_text(value):>10} {unit:<3}"
        if reference is not None:
            name, other = reference
            line += f"   {name} {_text(other)} {unit}, ratio {value / other if other else float('inf'):.2f}"
        for sign, bound in (("≥", at_least), ("≤", at_most)):
            if bound is not None:
                is_met = value >= bound if sign == "≥" else value <= bound
                self.are_met = self.are_met and (is_met or not is_judged)
                verdict = "not judged" if not is_judged else "met" if is_met else "MISSED"
                line += f"   goal {sign} {bound:,g} {unit}: {verdict}"
        print(line, flush=True)


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 or value == int(value) else f"{value:,.2f}"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create an empty folder for an embedded server, accessible to the user that the server runs as under root."""
    with tempfile.TemporaryDirectory(prefix="trader-benchmark-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
