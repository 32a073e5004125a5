"""The evidence of a season report: every entrant against its references, in figures and in words."""

from collections.abc import Sequence
from html import escape
from typing import Final

from trader.domain.models import contamination
from trader.domain.portfolio.board import Comparison, Reference
from trader.reports.document import interval, key, minus, scale, table
from trader.services.portfolio.evidence import EntrantEvidence, EvidenceReport
from trader.variants import color_of

WORDS: Final = (
    "Each entrant, a model as it was configured, against its references on the same hours. Differences have a 95 % "
    "interval for one look; the verdicts together are wrong in at most 5 % of cases, however often one looks. Entrants "
    "that may be the best come first."
)

_REFERENCES: Final[dict[Reference, str]] = {
    "ruleAgent": "its rule agent",
    "holdNothing": "holding nothing",
    "buyAndHold": "buying and holding",
    "bestOther": "the best other",
}


def evidence_section(report: EvidenceReport) -> str:
    """Return the verdict on the best, and a row per entrant."""
    shown = [entrant for entrant in report.entrants if entrant.statement.hours]
    least, most = scale(
        [entrant.return_percent for entrant in shown], [entrant.statement.interval_percent for entrant in shown]
    )
    heads = ("entrant", "return", *(f"against {name}" for name in _REFERENCES.values()))
    return f"<p>{_best(report)}</p>{table(heads, [_row(entrant, least, most) for entrant in shown])}"


def _best(report: EvidenceReport) -> str:
    best = next(
        (entrant for entrant in report.entrants if entrant.model.id == report.best and entrant.ended_at is None), None
    )
    if best is None:
        return "No entrant has enough hours and trades to be called the best."
    present = [entrant for entrant in report.entrants if entrant.ended_at is None]
    others = sum(entrant.is_among_best for entrant in present) - 1
    words = f"{escape(best.model.name)} has the highest mean return by the hour. "
    if others <= 0:
        return f"{words}Every other entrant can be told from it."
    told = f"{words}{others} of the other {len(present) - 1} cannot be told from it yet"
    against_best = next(comparison for comparison in best.comparisons if comparison.reference == "bestOther")
    visible = against_best.verdict.statement.detectable_percent_per_day
    return told + (
        "." if visible is None else f": with this much data a difference under {visible:.1f} % a day cannot be seen."
    )


def _row(entrant: EntrantEvidence, least: float, most: float) -> Sequence[str]:
    bounds, value, color = entrant.statement.interval_percent, entrant.return_percent or 0.0, color_of(entrant.model)
    why = entrant.statement.reason if bounds is None else f"{bounds.low:+.1f} to {bounds.high:+.1f} %"
    return (
        f"{key(color)}{escape(entrant.model.name)}<br>{_words(_standing(entrant))}",
        f"{minus(f'{value:+.2f} %')} {interval(bounds, value, least, most, color)}<br>{_words(minus(why or ''))}",
        *(_against(_comparison(entrant, reference)) for reference in _REFERENCES),
    )


def _standing(entrant: EntrantEvidence) -> str:
    """Return the place of an entrant, and what else must be known to judge it."""
    words = ["may be the best" if entrant.is_among_best else "behind the best"]
    if entrant.ended_at is not None:
        words = [f"entrant {entrant.record.number}, ended"]
    if entrant.record.coverage_percent is not None:
        words.append(
            f"coverage {entrant.record.coverage_percent:.1f} %" + ("" if entrant.record.is_ranked else ": not ranked")
        )
    if entrant.replicates is not None:
        words.append(
            f"{len(entrant.replicates.model_ids)} replicates, spread {entrant.replicates.spread_percent:.2f} %"
        )
    if entrant.model.provider == "rules":
        return "; ".join(words)
    period = contamination(entrant.model.configuration.training_cutoff, entrant.started_at)
    words.append("training cut-off unknown" if period == "unknown" else f"the period is {period} of its training")
    return "; ".join(words)


def _words(text: str) -> str:
    return f'<span class="words unsure">{escape(text)}</span>'


def _comparison(entrant: EntrantEvidence, reference: Reference) -> Comparison | None:
    return next((each for each in entrant.comparisons if each.reference == reference), None)


def _against(comparison: Comparison | None) -> str:
    if comparison is None:
        return "–"
    verdict, bounds, percent = comparison.verdict, comparison.window.interval_percent, comparison.window.percent
    figure = "–" if percent is None else minus(f"{percent:+.2f} %")
    if bounds is not None:
        figure += f'<br><span class="unsure">{minus(f"{bounds.low:+.1f} to {bounds.high:+.1f}")} %</span>'
    why = verdict.why or comparison.window.reason
    return f"{figure}<br>{_words(verdict.word if why is None else f'{verdict.word}: {why}')}"
