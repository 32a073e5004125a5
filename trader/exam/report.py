"""Result of an exam: what each entrant earned of the oracle, edge by edge, and which of two is better."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import msgspec

from trader import __version__
from trader.agents.variants import VARIANTS
from trader.core.canonical_json import canonical_json
from trader.core.errors import SettingsError
from trader.core.intervals import ConfidenceInterval
from trader.exam.domain.scores import (
    PairComparison,
    Share,
    agreement,
    burnt,
    compare,
    differences,
    mean_score,
    share_of_oracle,
    sizes,
)
from trader.exam.domain.worlds import Edge
from trader.exam.folder import ExamPlan
from trader.exam.sitting import Sitting

CARD: Final = "trader-exam-1"
"""The format of the card."""

CARD_FILE: Final = "card.json"
REPORT_FILE: Final = "report.html"
"""The files of the result, in the folder of the exam."""


def exam_value(plan: ExamPlan, sittings: Sequence[Sitting]) -> dict[str, Any]:
    """Return the JSON object of an exam's result."""
    by_entrant = {name: [each for each in sittings if each.entrant == name] for name in plan.entrants}
    return {
        "secretSha256": plan.secret_digest,
        "states": len({each.state for each in sittings}),
        "planned": len(plan.states),
        "isRecorded": plan.recording is not None,
        "horizon": plan.horizon,
        "settings": plan.settings,
        "entrants": [_entrant_value(name, own) for name, own in by_entrant.items() if own],
        "comparisons": [
            {"first": first, "second": second} | _compared(by_entrant[first], by_entrant[second], plan)._asdict()
            for first, second in combinations(plan.entrants, 2)
        ],
    }


def card_value(plan: ExamPlan, sittings: Sequence[Sitting]) -> dict[str, Any]:
    """Return the card of an exam: its result, and the digests of everything from which it follows."""
    variants = {model.variant for model in plan.models}
    return {
        "card": CARD,
        "program": f"trader {__version__}",
        "result": exam_value(plan, sittings),
        "digests": {
            "secret": plan.secret_digest,
            "plan": _digest(msgspec.to_builtins(plan)),
            "decisions": _digest(msgspec.to_builtins(sittings)),
            "models": {model.id: _digest(msgspec.to_builtins(model)) for model in plan.models},
            "prompts": {variant: _digest(VARIANTS[variant].prompt) for variant in sorted(variants)},
        },
    }


def encode_card(card: Mapping[str, Any]) -> bytes:
    """Return the bytes of a card's file."""
    return msgspec.json.format(msgspec.json.encode(card)) + b"\n"


def _digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _compared(ours: Sequence[Sitting], theirs: Sequence[Sitting], plan: ExamPlan) -> PairComparison:
    return compare(differences(ours, theirs, plan.scale), plan.scale)


def _entrant_value(name: str, sittings: Sequence[Sitting]) -> dict[str, Any]:
    planted = [each for each in sittings if each.kind in ("planted", "reversed")]
    recorded = [each for each in sittings if each.kind == "recorded"]
    outcome = mean_score(recorded) if recorded else None
    empty = [each for each in sittings if each.kind == "null"]
    states = len({each.state for each in sittings})
    costs = [each.answer.cost_usd for each in sittings if each.answer.cost_usd is not None]
    tokens = sum(each.answer.tokens for each in sittings)
    samples = 1 + max(each.sample for each in sittings)
    burnt_bp = burnt(empty) if empty else None
    return {
        "entrant": name,
        "states": states,
        "share": _share_value(share_of_oracle(planted)),
        "edges": {
            edge: _share_value(share_of_oracle([each for each in planted if each.edge is edge]))
            | {
                "sizes": sizes(
                    each for each in planted if each.edge is edge and each.answer.decided is not None
                )._asdict()
            }
            for edge in Edge
            if any(each.edge is edge for each in planted)
        },
        "burntBp": None if burnt_bp is None else {"mean": burnt_bp[0], "interval": _interval_value(burnt_bp[1])},
        "outcome": None if outcome is None else {"mean": outcome[0], "interval": _interval_value(outcome[1])},
        "agreement": agreement(sittings, samples) if samples > 1 else None,
        "samples": samples,
        "refusals": _refusals(sittings),
        "costUsdPerState": float(sum(costs)) / states if costs else None,
        "tokensPerState": tokens / states if tokens else None,
    }


def _share_value(share: Share | None) -> dict[str, Any]:
    if share is None:
        return {"share": None, "states": 0, "interval": None}
    return {"share": share.share, "states": share.states, "interval": _interval_value(share.interval)}


def _interval_value(interval: ConfidenceInterval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _refusals(sittings: Sequence[Sitting]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for rule in (rule for each in sittings for rule in each.answer.refused):
        counts[rule] = counts.get(rule, 0) + 1
    return counts


def outcome_rows(value: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table of outcomes for each entrant, in units of the horizon's volatility."""
    for entrant in value["entrants"]:
        outcome = entrant["outcome"]
        bounds = "–" if outcome["interval"] is None else "{:+.3f} to {:+.3f}".format(*outcome["interval"])
        yield entrant["entrant"], f"{entrant['states']}", f"{outcome['mean']:+.3f}", bounds


def pair_value(plan: ExamPlan, sittings: Sequence[Sitting], first: str, second: str) -> dict[str, Any]:
    """Return the comparison of two entrants, in all and edge by edge, in the form of `exam_value`.

    :raises SettingsError: one did not take part
    """
    if unknown := [name for name in (first, second) if name not in plan.entrants]:
        raise SettingsError([f"{', '.join(unknown)} did not take part; those who did are {', '.join(plan.entrants)}"])
    ours, theirs = ([each for each in sittings if each.entrant == name] for name in (first, second))
    pair = {"first": first, "second": second}
    parts = {edge: [each for each in ours if each.edge is edge and each.kind != "null"] for edge in Edge}
    return {
        "isRecorded": plan.recording is not None,
        "comparisons": [pair | _compared(ours, theirs, plan)._asdict()],
        "edges": {edge: _compared(part, theirs, plan)._asdict() for edge, part in parts.items() if part},
    }


def share_rows(value: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table of shares for each entrant."""
    for entrant in value["entrants"]:
        cells = [_cell(entrant["edges"].get(edge)) for edge in Edge]
        lost = entrant["burntBp"]
        yield entrant["entrant"], *cells, _cell(entrant["share"]), "–" if lost is None else f"{lost['mean']:.1f} bp"


def _cell(share: Mapping[str, Any] | None) -> str:
    if share is None or share["share"] is None:
        return "–"
    text = f"{share['share']:+.2f}"
    return text if share["interval"] is None else f"{text} ±{(share['interval'][1] - share['interval'][0]) / 2:.2f}"


def comparison_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each pair of entrants."""
    for pair in value["comparisons"]:
        if pair["states"]:
            verdict = pair["verdict"]
            relation = f"{verdict} than" if verdict in ("better", "worse") else f"{verdict} from"
            unit = "of the volatility" if value["isRecorded"] else "of the oracle's usual value"
            after = f"after {pair['states']} states ({pair['mean']:+.2f} {unit})"
            yield f"{pair['first']}: {relation} {pair['second']} {after}"
