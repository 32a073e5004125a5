"""Result and card of an exam: what each entrant earned of the oracle, edge by edge, and which of two is better."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final, Literal

import msgspec
import numpy as np

from trader.agents.variants import VARIANTS
from trader.core.canonical_json import canonical_json
from trader.core.intervals import ConfidenceInterval
from trader.exam.domain.managed import RESPONSES, STEPS
from trader.exam.domain.scores import (
    UNDECIDED,
    MeanOfStates,
    PairComparison,
    Share,
    Sizes,
    agreement,
    burnt,
    compare,
    differences,
    interval_of,
    mean_of,
    share_of_oracle,
    sizes,
    together,
)
from trader.exam.domain.worlds import Edge
from trader.exam.folder import ExamPlan
from trader.exam.pairs import Horizon
from trader.exam.sitting import EVERY_STEP, Sitting
from trader.seasons.bundle import CodeDigest

CARD_FORMAT: Final = "trader-exam-1"

CARD_FILE: Final = "card.json"
CARD_SCHEMA_FILE: Final = "card.schema.json"
REPORT_FILE: Final = "report.html"
"""The files of the result, in the folder of the exam."""


class EntrantResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The results of an entrant in the states in which it has decided.

    `share` and `shares` (by edge) are None where no oracle earned anything, `burnt_bp` without null worlds, `outcome`
    in worlds, `agreement` with a single sample, and costs and tokens for code.
    """

    entrant: str
    states: int
    samples: int
    share: Share | None
    shares: dict[Edge, Share]
    sizes: dict[Edge, Sizes]
    burnt_bp: MeanOfStates | None
    outcome: MeanOfStates | None
    agreement: float | None
    refusals: dict[str, int]
    reasons: dict[str, str]
    cost_usd_per_state: float | None
    tokens_per_state: float | None


class PairResult(PairComparison, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The comparison of two entrants, and the interval of their mean difference, which holds at every look."""

    first: str
    second: str
    interval: ConfidenceInterval | None


class ExamResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The result of an exam. `states` of the `planned` ones, which may be `managed` in steps, have decisions, and
    `earlier` counts the exams that were begun before with an entrant's name."""

    secret_sha256: str
    recording_sha256: str | None
    states: int
    planned: int
    managed: bool
    horizon: Horizon
    settings: dict[str, str]
    earlier: dict[str, int]
    entrants: list[EntrantResult]
    comparisons: list[PairResult]


class CardDigests(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """SHA-256 digests of the inputs of a result, in hexadecimal: of models by id, of prompts by variant."""

    secret: str
    recording: str | None
    plan: str
    decisions: str
    models: dict[str, str]
    prompts: dict[str, str]


class ExamCard(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The card of an exam: its result, and the digests of everything from which it follows. `code` began the exam."""

    format: Literal["trader-exam-1"]
    code: CodeDigest
    result: ExamResult
    digests: CardDigests


def exam_result(plan: ExamPlan, sittings: Sequence[Sitting]) -> ExamResult:
    """Return the result of an exam."""
    by_entrant = {name: [each for each in sittings if each.entrant == name] for name in plan.entrants}
    return ExamResult(
        secret_sha256=plan.secret_digest,
        recording_sha256=plan.recording,
        states=len({each.state for each in sittings}),
        planned=len(plan.states),
        managed=plan.managed,
        horizon=plan.horizon,
        settings=plan.settings,
        earlier=plan.earlier,
        entrants=[_entrant_result(name, own) for name, own in by_entrant.items() if own],
        comparisons=_comparisons(plan, by_entrant),
    )


def exam_card(plan: ExamPlan, sittings: Sequence[Sitting]) -> ExamCard:
    """Return the card of an exam."""
    variants = sorted({model.variant for model in plan.models})
    return ExamCard(
        format=CARD_FORMAT,
        code=plan.code,
        result=exam_result(plan, sittings),
        digests=CardDigests(
            secret=plan.secret_digest,
            recording=plan.recording,
            plan=_digest(plan),
            decisions=_digest(sittings),
            models={model.id: _digest(model) for model in plan.models},
            prompts={variant: _digest(VARIANTS[variant].prompt) for variant in variants},
        ),
    )


def _digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(msgspec.to_builtins(value))).hexdigest()


def _comparisons(plan: ExamPlan, by_entrant: Mapping[str, Sequence[Sitting]]) -> list[PairResult]:
    """Return the comparison of each pair: the registered one by itself, and the others as one family."""
    pairs = list(combinations(plan.entrants, 2))
    paired = {(one, two): differences(by_entrant[one], by_entrant[two], plan.samples) for one, two in pairs}
    compared = {pair: compare(values, plan.bound) for pair, values in paired.items()}
    family = [pair for pair in pairs if set(pair) != set(plan.compared or ())]
    compared |= dict(zip(family, together([compared[pair] for pair in family]), strict=True))
    return [
        PairResult(
            first=pair[0],
            second=pair[1],
            interval=interval_of(np.array(paired[pair]), plan.bound, plan.bound),
            **msgspec.structs.asdict(each),
        )
        for pair, each in compared.items()
    ]


def _entrant_result(name: str, sittings: Sequence[Sitting]) -> EntrantResult:
    planted = [each for each in sittings if each.kind in ("planted", "reversed")]
    recorded = [each for each in sittings if each.kind == "recorded"]
    by_edge = {edge: [each for each in planted if each.edge is edge] for edge in Edge}
    shares = {edge: share_of_oracle(own) for edge, own in by_edge.items()}
    states = len({each.state for each in sittings})
    costs = [each.answer.cost_usd for each in sittings if each.answer.cost_usd is not None]
    tokens = sum(each.answer.tokens for each in sittings)
    samples = 1 + max(each.sample for each in sittings)
    return EntrantResult(
        entrant=name,
        states=states,
        samples=samples,
        share=share_of_oracle([each for each in sittings if each.kind != "recorded"]),
        shares={edge: share for edge, share in shares.items() if share is not None},
        sizes={edge: sizes(each for each in own if each.answer.decided) for edge, own in by_edge.items() if own},
        burnt_bp=burnt([each for each in sittings if each.kind == "null"]),
        outcome=mean_of(recorded),
        agreement=agreement(sittings, samples) if samples > 1 else None,
        refusals=dict(Counter(rule for each in sittings for rule in each.answer.refused)),
        reasons={rule: why for each in sittings for rule, why in each.answer.reasons.items()},
        cost_usd_per_state=float(sum(costs)) / states if costs else None,
        tokens_per_state=tokens / states if tokens else None,
    )


def outcome_rows(result: ExamResult) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table of outcomes for each entrant, in units of the horizon's volatility."""
    for entrant in result.entrants:
        outcome = entrant.outcome
        yield entrant.entrant, f"{entrant.states}", _cell(outcome.mean, outcome.interval, 3) if outcome else "–"


def share_rows(result: ExamResult) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table of shares for each entrant."""
    for entrant in result.entrants:
        shares, lost = entrant.shares, entrant.burnt_bp
        cells = [_cell(shares[edge].share) if edge in shares else "–" for edge in Edge]
        whole = "–" if entrant.share is None else _cell(entrant.share.share, entrant.share.interval)
        yield entrant.entrant, *cells, whole, "–" if lost is None else f"{lost.mean:.1f} bp"


def _cell(figure: float, bounds: ConfidenceInterval | None = None, places: int = 2) -> str:
    low, high = (f"{bound:+.{places}f}" for bound in bounds) if bounds else ("", "")
    return f"{figure:+.{places}f}" + (f" ({low} to {high})" if bounds else "")


def comparison_lines(comparisons: Sequence[PairResult], *, is_recorded: bool) -> Iterator[str]:
    """Yield a line for each pair of entrants."""
    for pair in comparisons:
        if pair.states:
            relation = f"{pair.verdict} {'than' if pair.verdict in ('better', 'worse') else 'from'}"
            bounds = f", 95 % from {pair.interval.low:+.2f} to {pair.interval.high:+.2f}" if pair.interval else ""
            after = f"after {pair.states} states ({pair.mean:+.2f}{bounds} {_UNITS[is_recorded]})"
            yield f"{pair.first}: {relation} {pair.second} {after}"


_UNITS: Final = ("of the oracle's usual value", "of the volatility")
"""What the differences of pairs are measured in: in worlds, and in moments of a recording."""

_MANAGED: Final = (
    f"Each state was managed in {STEPS} steps, {EVERY_STEP} apart. Values are those of one of {RESPONSES} responses. "
    "They are exact for the path that was drawn; what differs from path to path is in the intervals."
)


def summary(plan: ExamPlan, result: ExamResult) -> str:
    """Return who is better, for what, and on what ground: about the registered pair, or else the clearest one."""
    own = {each.entrant: each for each in result.entrants}
    if not own:
        return "No state has decisions yet."
    pair = max(result.comparisons, key=lambda each: _rank(plan, each))
    is_turned = pair.mean < 0
    first, second = (own[name] for name in ((pair.second, pair.first) if is_turned else (pair.first, pair.second)))
    is_recorded = result.recording_sha256 is not None
    unit = "times the volatility in a state" if is_recorded else "of what was there"
    words = [f"{first.entrant} earned {_earned(first)} {unit}, {second.entrant} {_earned(second)}."]
    if pair.interval is not None:
        low, high = (-pair.interval.high, -pair.interval.low) if is_turned else pair.interval
        gap = f"{abs(pair.mean):.2f} {_UNITS[is_recorded]}, 95 % from {low:+.2f} to {high:+.2f}"
        words.append(f"The difference in a state is {gap}.")
    gaps = [(share.share - second.shares[edge].share, edge, share.states) for edge, share in first.shares.items()]
    most = [f"{edge} ({gap:+.2f} in {count} states)" for gap, edge, count in sorted(gaps, reverse=True)[:2] if gap > 0]
    after = f"after {pair.states} states" + (f", above all in {' and '.join(most)}" if most else "")
    if pair.verdict == UNDECIDED:
        leads = f"{first.entrant} leads {after}, but neither" if pair.mean else f"After {pair.states} states neither"
        words.append(f"{leads} can be called better yet.")
    else:
        words.append(f"{first.entrant} is better than {second.entrant} {after}.")
    if plan.compared is not None and result.states < result.planned and pair.verdict != UNDECIDED:
        words.append("The exam ended at this verdict: the mean difference is biased upward, its interval is not.")
    decided = sum(each.verdict != UNDECIDED for each in result.comparisons)
    several = f"{len(result.comparisons)} pairs were compared; {decided or 'none'} of them can be told apart."
    words.append("1 pair was compared." if len(own) == 2 else several)
    if result.states < result.planned and (plan.compared is None or pair.verdict == UNDECIDED):
        words.append(f"The exam is not finished: {result.states} of {result.planned} states have decisions.")
    words += [_MANAGED] if result.managed else []
    words += [f"It is exam {count + 1} with the name {name}." for name, count in result.earlier.items() if count]
    return " ".join(words)


def _rank(plan: ExamPlan, pair: PairResult) -> tuple[bool, bool, bool, float]:
    names = {pair.first, pair.second}
    evidence = max(pair.better_e_value, pair.worse_e_value)
    return names == set(plan.compared or ()), plan.entrants[-1] not in names, pair.verdict != UNDECIDED, evidence


def _earned(entrant: EntrantResult) -> str:
    if entrant.share is not None:
        return f"{entrant.share.share:.2f}"
    return "–" if entrant.outcome is None else f"{entrant.outcome.mean:+.3f}"
