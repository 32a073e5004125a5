"""Exam commands: entrants decide in states with a known law, and are scored by expected value."""

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.backtest.spec import conditions_of, params_of
from trader.commands.audit import anchors_argument, read_anchors
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, argument_of, command, count_argument, table
from trader.commands.progress import Progress, ProgressListener
from trader.commands.simulation_options import add_condition_options, add_participant_options, participants_of
from trader.core.errors import SettingsError, StartError
from trader.core.files import decode_json, read_regular, replace_file
from trader.exam.check import check
from trader.exam.domain.managed import STEPS
from trader.exam.domain.plan import EXAMS, POWER, in_moments, in_worlds, outlook
from trader.exam.domain.scores import ENTRANTS_MIN, noise, rank_correlation
from trader.exam.domain.worlds import Edge
from trader.exam.folder import STATES_MAX, ExamPlan, read_plan, read_sittings
from trader.exam.opening import STATES, ExamSpec
from trader.exam.page import page
from trader.exam.pairs import HORIZONS
from trader.exam.report import (
    CARD_FILE,
    CARD_SCHEMA_FILE,
    REPORT_FILE,
    ExamCard,
    ExamResult,
    comparison_lines,
    exam_card,
    exam_result,
    outcome_rows,
    share_rows,
    summary,
)
from trader.exam.run import ExamEnd, Listener, run
from trader.exam.sitting import EVERY, EVERY_STEP
from trader.record.anchors import make_sink
from trader.seasons.bundle import digest_code, schema_file
from trader.seasons.card import AccountCard
from trader.settings.forms import Form, Secret, whole_number
from trader.settings.settings import read_some


def _number(least: float, most: float) -> Form[float]:
    return Form(f"a number from {least:g} to {most:g}", ".+", float, lambda number: least <= number <= most)


def _number_argument(least: float, most: float) -> Callable[[str], float]:
    return argument_of(_number(least, most))


_states_argument: Final = argument_of(whole_number(1, STATES_MAX))
_secret_argument: Final = argument_of(Form("1 to 200 printable ASCII characters", "[ -~]{1,200}", str, is_secret=True))
_edges_argument: Final = argument_of(
    Form(f"some of {', '.join(Edge)}", ".+", lambda text: tuple(map(Edge, text.split(","))))
)
_pair_argument: Final = argument_of(
    Form(
        "two entrants, such as apex-rules,sovereign-rules",
        "[^,]+,.+",
        lambda text: tuple(text.split(",", 1)),
        lambda pair: pair[0] != pair[1],
    )
)
_shares_argument: Final = argument_of(
    Form(
        "two numbers from -100 to 100, such as 0.5,0.3",
        "[^,]+,[^,]+",
        lambda text: tuple(map(_number(-100, 100).parse, text.split(","))),
    )
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("exam"), metavar="FOLDER", help="default: exam; an exam there is resumed")
    add("--states", type=_states_argument, default=STATES, metavar="N", help=f"default: {STATES}")
    add("--edges", type=_edges_argument, default=tuple(Edge), metavar="NAMES", help=f"default: {','.join(Edge)}")
    add("--reversed", action="store_true", help="the opposite of every edge: a control, not an exam")
    add("--managed", action="store_true", help=f"the second part: {STEPS} decisions in each state, {EVERY_STEP} apart")
    add("--data", type=Path, metavar="FOLDER", help="moments of a recording instead of worlds")
    add("--from", dest="start", metavar="TIME", help="start of the moments; default: a day after the first candle")
    add("--to", dest="end", metavar="TIME", help="end of the last horizon; default: the last candle")
    add("--horizon", choices=list(HORIZONS), default="4h", help="how long a decision is carried out; default: 4h")
    add("--concurrency", type=count_argument, default=4, metavar="N", help="states at once, for AI models; default: 4")
    batch = "ask AI models through their providers' batch interfaces, --concurrency states at once"
    add("--batch", action="store_true", help=batch)
    workers = os.cpu_count() or 1
    add("--workers", type=count_argument, default=workers, metavar="N", help="processes for entrants that are code")
    add("--compare", type=_pair_argument, metavar="A,B", help="end the exam once this pair has a verdict")
    add("--samples", type=count_argument, default=1, metavar="K", help="decisions of a model in a state; default: 1")
    add("--secret", type=_secret_argument, metavar="TEXT", help="the secret of the worlds; default: a new one")
    add_condition_options(parser)
    add_participant_options(parser)


@command("exam run", example="trader lab exam run --variant Apex --states 100 --out exam", arguments=_arguments)
def exam_run(options: argparse.Namespace) -> Result:
    """Let entrants decide in market states with a known law, and score each decision by its expected value.

    Every entrant gets the same states and decides once in each. Without --models and --strategy the rule agents decide.
    A run that was interrupted resumes with the same options. --compare ends it once the pair has a verdict.
    """
    try:
        ended = asyncio.run(_run(_spec_of(options), *read_some(os.environ, options.env_file, "anchor_url")))
    except OSError as error:
        raise StartError(f"{error.filename or options.out} cannot be written: {error.strerror}.") from error
    result = exam_result(ended.plan, ended.sittings)
    lines = chain(_lines(ended.plan, result), [ended.reason] if ended.reason else [])
    code = EXIT_FAILED if ended.cause not in (None, "verdict") else EXIT_DONE
    return Result(msgspec.to_builtins(result) | {"cause": ended.cause, "reason": ended.reason}, lines, code)


def _spec_of(options: argparse.Namespace) -> ExamSpec:
    """Return the exam that the options describe. Raises `SettingsError`."""
    return ExamSpec(
        conditions=conditions_of(options.data, vars(options)),
        entrants=participants_of(options, params=params_of(options.param), every=EVERY, is_batched=options.batch),
        out=options.out,
        states=options.states,
        horizon=options.horizon,
        edges=options.edges,
        kind="reversed" if options.reversed else "planted",
        managed=options.managed,
        samples=options.samples,
        secret=options.secret,
        compare=options.compare,
        workers=options.workers,
        concurrency=options.concurrency,
    )


class _StatesListener(ProgressListener, Listener):
    """Shows the states that an exam has finished, and its cost."""

    def show(self, done: int, count: int, spent_usd: Decimal) -> None:
        unit = f"states, {spent_usd:.2f} of about {spent_usd * count / done:.2f} USD" if spent_usd else "states"
        self._progress = self._progress or Progress(0, count, unit)
        self._progress.show(done, unit)


async def _run(spec: ExamSpec, anchor_url: Secret | None) -> ExamEnd:
    listener, sink = _StatesListener(), make_sink(anchor_url)
    try:
        return await run(spec, listener, sink)
    finally:
        listener.end()
        if sink is not None:
            await sink.close()


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shares", type=_shares_argument, default=(0.5, 0.1), metavar="A,B", help="of the oracle; default: 0.5,0.1")
    noise = "standard deviation of a share from state to state; default: the pilot's, or 1"
    add("--noise", type=_number_argument(0, 10), metavar="X", help=noise)
    add("--pilot", type=Path, metavar="FOLDER", help="an exam in worlds, whose noisiest entrant gives the noise")
    add("--sharpes", type=_shares_argument, metavar="A,B", help="Sharpe ratios: moments of a recording, not worlds")
    add("--correlation", type=_number_argument(-1, 1), default=0.67, metavar="X", help="of two outcomes; default: 0.67")
    add("--horizon", choices=list(HORIZONS), default="1h", help="of a moment; default: 1h")
    add("--states", type=_states_argument, default=STATES, metavar="N", help=f"to promise; default: {STATES}")
    add("--managed", action="store_true", help=f"the second part: {STEPS} decisions in each state")
    add("--usd", type=_number_argument(0, 1000), default=0.01, metavar="USD", help="of a decision; default: 0.01")
    add("--seconds", type=_number_argument(0, 86_400), default=20, metavar="S", help="of a decision; default: 20")
    add("--concurrency", type=count_argument, default=4, metavar="N", help="states at once; default: 4")


@command("exam plan", example="trader lab exam plan --shares 0.5,0.1 --states 700", arguments=_plan_arguments)
def exam_plan(options: argparse.Namespace) -> Result:
    """Simulate how many states an exam needs to separate two entrants, and what they cost.

    Fails if fewer than four of five exams reach a verdict within --states.
    """
    first, second = options.sharpes or options.shares
    if options.sharpes is None:
        design = in_worlds(first, second, _noise(options))
        pair = f"shares of {first:g} and {second:g} of the oracle"
    else:
        design = in_moments(first, second, options.correlation, HORIZONS[options.horizon])
        pair = f"Sharpe ratios of {first:g} and {second:g} over {options.horizon}"
    seen = outlook(design, options.states, exams=EXAMS if options.sharpes is None else EXAMS // 4)
    decisions = (seen.most or design.states_max) * (STEPS if options.managed else 1)
    value = {
        "pair": pair,
        "deviation": design.deviation,
        "states": options.states,
        "statesTried": design.states_max,
        **seen._asdict(),
        "decisions": 2 * decisions,
        "usd": 2 * decisions * options.usd,
        "hours": decisions * options.seconds / options.concurrency / 3600,
    }
    code = EXIT_DONE if seen.called >= POWER else EXIT_FAILED
    return Result(value, _plan_lines(value), code)


def _noise(options: argparse.Namespace) -> float:
    """Return the noise of a share: as given, or that of the pilot. Raise `SettingsError`."""
    if options.noise is not None or options.pilot is None:
        return 1.0 if options.noise is None else float(options.noise)
    plan, _ = read_plan(options.pilot)
    sittings = read_sittings(options.pilot, plan)
    most = max(noise(each for each in sittings if each.entrant == name) for name in plan.entrants)
    if not most:
        raise SettingsError([f"--pilot: {options.pilot} has no entrant that traded in planted worlds"])
    return most


def _plan_lines(value: Mapping[str, Any]) -> Iterator[str]:
    most, pair = value["most"], f"{value['pair']}, whose differences have a deviation of {value['deviation']:.2f}"
    if most is None:
        yield f"{pair}: not even {value['statesTried']} states separate them in four of five exams"
    else:
        costs = f"{value['decisions']} decisions, {value['usd']:,.2f} USD, {value['hours']:.1f} hours"
        yield f"{pair}: {most} states in four of five exams ({value['median']} in half of them): {costs}"
    yield f"{value['states']} states reach a verdict in {100 * value['called']:.0f} % of exams"


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder of the exam")


@command("exam report", example="trader lab exam report exam", arguments=_report_arguments)
def exam_report(options: argparse.Namespace) -> Result:
    """Print the scores of an exam, and write its card and its report.html, with examples of single states.

    The report reveals the worlds: keep it from anyone who has yet to take the exam.
    """
    plan, secret = read_plan(options.folder)
    sittings = read_sittings(options.folder, plan)
    card = exam_card(plan, sittings)
    try:
        replace_file(options.folder / CARD_FILE, msgspec.json.format(msgspec.json.encode(card)) + b"\n")
        replace_file(options.folder / CARD_SCHEMA_FILE, schema_file(ExamCard))
        replace_file(options.folder / REPORT_FILE, page(card.result, plan, secret, sittings))
    except OSError as error:
        raise StartError(f"{error.filename} cannot be written: {error.strerror}.") from error
    return Result(msgspec.to_builtins(card.result), _lines(plan, card.result))


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder of the exam")
    parser.add_argument("pair", type=_pair_argument, metavar="A,B", help="two entrants")


@command("exam compare", example="trader lab exam compare exam funding,sma-cross", arguments=_compare_arguments)
def exam_compare(options: argparse.Namespace) -> Result:
    """Print which of two entrants is better, by a verdict that is valid at every look, and their share of each edge."""
    plan, _ = read_plan(options.folder)
    if unknown := [name for name in options.pair if name not in plan.entrants]:
        raise SettingsError([f"{', '.join(unknown)} did not take part; those who did are {', '.join(plan.entrants)}"])
    result = exam_result(plan, read_sittings(options.folder, plan))
    pair = replace(
        result,
        entrants=[each for each in result.entrants if each.entrant in options.pair],
        comparisons=[each for each in result.comparisons if {each.first, each.second} == {*options.pair}],
    )
    return Result(msgspec.to_builtins(pair), _tables(pair))


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _report_arguments(parser)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the recording, for an exam on one")
    parser.add_argument("--funding", metavar="RATE|FOLDER", help="as in the run")
    parser.add_argument("--strategies", type=Path, metavar="FOLDER", help="the strategy files, which then decide again")
    anchors_argument(parser)


@command("exam check", example="trader lab exam check exam", arguments=_check_arguments, compares=True)
def exam_check(options: argparse.Namespace) -> Result:
    """Draw an exam's states again, execute its decisions again, and compare every score.

    Rule agents, and strategies whose files --strategies holds, decide again.
    """
    anchors = None if options.anchors is None else read_anchors(options.anchors, of_exams=True)
    wrong, again = asyncio.run(check(options.folder, options.data, options.funding, options.strategies, anchors))
    asked = f"{', '.join(again)} decided the same when asked again. " if again else ""
    lines = wrong or [f"Every score follows from the secret and the decisions. {asked}Other decisions are as recorded."]
    if not wrong and (code := read_plan(options.folder)[0].code) != digest_code():
        lines.append(f"Begun by another program, trader {code.version}: rule agents and report were not checked.")
    return Result({"wrong": wrong, "again": again}, lines, EXIT_FAILED if wrong else EXIT_DONE)


def _relate_arguments(parser: argparse.ArgumentParser) -> None:
    _report_arguments(parser)
    parser.add_argument("season", type=Path, help="the folder of a season's result")


@command("exam relate", example="trader lab exam relate exam winter", arguments=_relate_arguments)
def exam_relate(options: argparse.Namespace) -> Result:
    """Print how far an exam ranks its entrants as a season did: the rank correlation, with its interval.

    Entrants are the same if they have the same id. One season says little: its own ranks are mostly noise.
    """
    plan, _ = read_plan(options.folder)
    entrants = exam_result(plan, read_sittings(options.folder, plan)).entrants
    shares = {each.entrant: each.share.share for each in entrants if each.share is not None}
    try:
        card = decode_json(read_regular(options.season / CARD_FILE), dict[str, Any])
        accounts = msgspec.convert(card.get("accounts"), list[AccountCard])
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"{options.season / CARD_FILE} is not the card of a season: {error}") from None
    returns = {each.model_id: each.equity / each.initial_capital - 1 for each in accounts if each.initial_capital}
    both = [name for name in shares if name in returns]
    found = rank_correlation([shares[name] for name in both], [returns[name] for name in both])
    if found is None:
        named = ", ".join(both) or "none"
        raise SettingsError([f"at least {ENTRANTS_MIN} entrants, not all equal, must be in both; in both are: {named}"])
    low, high = found.interval
    line = f"Rank correlation of shares and returns of {found.entrants} entrants: {found.correlation:+.2f}"
    return Result(msgspec.to_builtins(found), [f"{line}, 95 % from {low:+.2f} to {high:+.2f}."], EXIT_DONE)


def _tables(result: ExamResult) -> Iterator[str]:
    is_recorded = result.recording_sha256 is not None
    if is_recorded:
        yield from table(("entrant", "states", "outcome"), outcome_rows(result))
    else:
        yield from table(("entrant", *Edge, "share", "burned"), share_rows(result))
    yield from comparison_lines(result.comparisons, is_recorded=is_recorded)


def _lines(plan: ExamPlan, result: ExamResult) -> Iterator[str]:
    yield summary(plan, result)
    yield from _tables(result)
    for entrant in result.entrants:
        if entrant.cost_usd_per_state is not None:
            yield f"{entrant.entrant}: {entrant.cost_usd_per_state:.4f} USD per state"
        if entrant.agreement is not None:
            share = f"{100 * entrant.agreement:.0f} % of states"
            yield f"{entrant.entrant} passed {entrant.samples} times of {entrant.samples} in {share}"
        if entrant.refusals:
            said = (
                f"{count} by {rule} ({entrant.reasons.get(rule, rule)})" for rule, count in entrant.refusals.items()
            )
            yield f"{entrant.entrant} was refused: {', '.join(said)}"
    yield f"{result.states} of {result.planned} states; SHA-256 of the secret: {result.secret_sha256}"
