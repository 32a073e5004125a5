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
    shown = [one for one in report.entrants if one.statement.hours]
    least, most = scale([one.return_percent for one in shown], [one.statement.interval_percent for one in shown])
    heads = ("entrant", "return", *(f"against {name}" for name in _REFERENCES.values()))
    return f"<p>{_best(report)}</p>{table(heads, [_row(one, least, most) for one in shown])}"


def _best(report: EvidenceReport) -> str:
    best = next((one for one in report.entrants if one.model.id == report.best and one.ended_at is None), None)
    if best is None:
        return "No entrant has enough hours and trades to be called the best."
    present = [one for one in report.entrants if one.ended_at is None]
    others = sum(one.is_among_best for one in present) - 1
    words = f"{escape(best.model.name)} has the highest mean return by the hour. "
    if others <= 0:
        return f"{words}Every other entrant can be told from it."
    told = f"{words}{others} of the other {len(present) - 1} cannot be told from it yet"
    found = next(one for one in best.comparisons if one.reference == "bestOther")
    visible = found.verdict.statement.detectable_percent_per_day
    return told + (
        "." if visible is None else f": with this much data a difference under {visible:.1f} % a day cannot be seen."
    )


def _row(one: EntrantEvidence, least: float, most: float) -> Sequence[str]:
    bounds, value, color = one.statement.interval_percent, one.return_percent or 0.0, color_of(one.model)
    why = one.statement.reason if bounds is None else f"{bounds.low:+.1f} to {bounds.high:+.1f} %"
    return (
        f"{key(color)}{escape(one.model.name)}<br>{_words(_standing(one))}",
        f"{minus(f'{value:+.2f} %')} {interval(bounds, value, least, most, color)}<br>{_words(minus(why or ''))}",
        *(_against(_found(one, reference)) for reference in _REFERENCES),
    )


def _standing(one: EntrantEvidence) -> str:
    """Return the place of an entrant, and what else must be known to judge it."""
    words = ["may be the best" if one.is_among_best else "behind the best"]
    if one.ended_at is not None:
        words = [f"entrant {one.record.number}, ended"]
    if one.record.coverage_percent is not None:
        words.append(f"coverage {one.record.coverage_percent:.1f} %" + ("" if one.record.is_ranked else ": not ranked"))
    if one.replicates is not None:
        words.append(f"{len(one.replicates.model_ids)} replicates, spread {one.replicates.spread_percent:.2f} %")
    if one.model.provider == "rules":
        return "; ".join(words)
    period = contamination(one.model.configuration.training_cutoff, one.started_at)
    words.append("training cut-off unknown" if period == "unknown" else f"the period is {period} of its training")
    return "; ".join(words)


def _words(text: str) -> str:
    return f'<span class="words unsure">{escape(text)}</span>'


def _found(one: EntrantEvidence, reference: Reference) -> Comparison | None:
    return next((each for each in one.comparisons if each.reference == reference), None)


def _against(found: Comparison | None) -> str:
    if found is None:
        return "–"
    verdict, bounds, percent = found.verdict, found.window.interval_percent, found.window.percent
    figure = "–" if percent is None else minus(f"{percent:+.2f} %")
    if bounds is not None:
        figure += f'<br><span class="unsure">{minus(f"{bounds.low:+.1f} to {bounds.high:+.1f}")} %</span>'
    why = verdict.why or found.window.reason
    return f"{figure}<br>{_words(verdict.word if why is None else f'{verdict.word}: {why}')}"
