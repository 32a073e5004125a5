"""The commands of exams: each question is asked once, within a budget, and an interrupted run resumes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import UTC, datetime
from functools import reduce
from hashlib import sha256
from operator import getitem
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import jsonschema_rs
import msgspec
import orjson
import pytest
from support.candles import write_walk
from support.chromium import chromium_program
from support.documents import ROOT
from support.reports import opened_report, report_data, rows_of
from support.run_profile import is_nightly
from support.trading_provider import TradingProvider, call, opening, trading_provider

from trader.__main__ import main
from trader.commands.audit import read_anchors
from trader.core.errors import SettingsError, StartError
from trader.exam.check import file_differences
from trader.exam.domain.worlds import Edge
from trader.exam.folder import read_plan, read_sittings, schedule
from trader.exam.report import exam_result
from trader.results import run_exam

STRATEGIES = ROOT / "docs" / "examples" / "exam.toml"
SMA_CROSS = f"{ROOT / 'docs' / 'examples' / 'sma_cross.py'}:SmaCross"
MODELS = """
[[models]]
id = "one"
variant = "Apex"
provider = "openai"
router_model = "lab/one"
price = {input = 0.36, output = 2.0}
"""


def exam(out: Path, *options: str, states: int = 10) -> int:
    return main(
        ["exam", "run", "--out", str(out), "--states", str(states), "--secret", "s", "--workers", "1", *options]
    )


def sittings(out: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (out / "sittings.jsonl").read_bytes().splitlines()]


def test_states_are_drawn_independently_with_every_edge_and_null_worlds() -> None:
    states = schedule("s", 900, tuple(Edge))
    assert schedule("s", 20, tuple(Edge)) == states[:20] != schedule("t", 20, tuple(Edge))
    nulls = [state for state in states if state.kind == "null"]
    assert 450 < len(nulls) < 550
    assert 60 < sum(state.edge is None for state in nulls) < 140
    counts = Counter(state.edge for state in states if state.kind == "planted")
    assert counts.keys() == set(Edge)
    assert min(counts.values()) > 35


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "models.toml"
    file.write_text(MODELS)
    return file


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TradingProvider]:
    with trading_provider() as provider:
        provider.always = [call(1, "createPosition", **opening("BTC", 0.05))]
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test-000000000000000001")
        yield provider


def test_an_exam_ends_at_the_verdict_on_its_pair_and_says_first_who_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exam"
    pair = ("--variant", "Sovereign", "--variant", "Apex", "--compare", "sovereign-rules,nothing", "--json")
    assert exam(out, *pair, states=400) == 0
    result = orjson.loads(capsys.readouterr().out)
    assert result["cause"] == "verdict"
    assert result["states"] < result["planned"] == 400
    assert main(["exam", "report", str(out), "--json"]) == 0
    again = orjson.loads(capsys.readouterr().out)
    assert main(["exam", "compare", str(out), "sovereign-rules,nothing"]) == 0
    assert f"sovereign-rules: worse than nothing after {result['states']} states" in capsys.readouterr().out
    assert main(["exam", "compare", str(out), "apex-rules,somebody"]) == 2
    assert "somebody did not take part" in capsys.readouterr().err
    report = report_data(out / "report.html")
    assert report["result"]["comparisons"] == again["comparisons"]
    assert report["summary"].startswith("nothing earned 0.00 of what was there, sovereign-rules -")
    named = next(
        each for each in again["comparisons"] if each["first"] == "sovereign-rules" and each["second"] == "nothing"
    )
    low, high = (-bound for bound in named["interval"][::-1])
    for part in (
        f"of the oracle's usual value, 95 % from {low:+.2f} to {high:+.2f}.",
        "nothing is better than sovereign-rules after",
        "biased upward",
        "3 pairs were compared; ",
    ):
        assert part in report["summary"]
    shown = [example["entrant"] for example in report["examples"]]
    assert shown == [*2 * ["sovereign-rules"], *2 * ["apex-rules"]], "the best and the worst decision of each"
    assert (again["entrants"], again["comparisons"]) == (result["entrants"], result["comparisons"])
    assert main(["exam", "check", str(out)]) == 0


def test_a_strategy_earns_the_edge_that_it_knows_and_a_retake_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("--strategy", f"{STRATEGIES.with_name('funding.py')}:Funding", "--edges", "carry", "--json")
    for out in (tmp_path / "one", tmp_path / "two"):
        assert exam(out, *known, states=3) == 0
    funding, nothing = orjson.loads(capsys.readouterr().out.splitlines()[-1])["entrants"]
    assert funding["shares"]["carry"]["share"] > 0.8
    assert (funding["burntBp"] or {"mean": 0})["mean"] < 1e-6
    assert nothing["share"]["share"] == 0
    assert main(["exam", "report", str(tmp_path / "two")]) == 0
    assert "It is exam 2 with the name funding." in capsys.readouterr().out
    assert main(["exam", "check", str(tmp_path / "two"), "--strategies", str(STRATEGIES.parent)]) == 0
    register = tmp_path / "exams.jsonl"
    first, second = register.read_bytes().splitlines(keepends=True)
    register.write_bytes(second)
    assert main(["exam", "check", str(tmp_path / "two")]) == 2
    assert "line 1 does not follow from the lines before it" in capsys.readouterr().err
    register.write_bytes(first)
    assert main(["exam", "check", str(tmp_path / "two")]) == 1
    assert "has this exam after [{'funding': 0}], and exam.json says {'funding': 1}" in capsys.readouterr().out


def test_an_exam_is_anchored_before_its_first_question_and_none_can_be_dropped_afterward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors, register = tmp_path / "anchors.jsonl", tmp_path / "exams.jsonl"
    first, out = tmp_path / "first", tmp_path / "exam"
    check = ("exam", "check", str(out), "--anchors", str(anchors))
    monkeypatch.setenv("ANCHOR_URL", f"file://{tmp_path}/missing/anchors.jsonl")
    assert exam(first, "--variant", "Apex", states=3) == 1
    assert "ANCHOR_URL: the file cannot be written" in capsys.readouterr().err
    assert not (first / "sittings.jsonl").read_bytes(), "no question was asked"
    monkeypatch.setenv("ANCHOR_URL", f"file://{anchors}")
    for folder, states in ((first, 3), (out, 2), (out, 2)):
        assert exam(folder, "--variant", "Apex", states=states) == 0
    sent = [orjson.loads(line) for line in anchors.read_bytes().splitlines()]
    assert [each["position"] for each in sent] == [1, 2], "an exam that goes on is not sent again"
    assert read_anchors(anchors) == [], "the record has anchors of its own"
    assert main([*check]) == 0
    monkeypatch.delenv("ANCHOR_URL")
    assert exam(tmp_path / "third", "--variant", "Apex", states=2) == 0
    assert main(["exam", "check", str(tmp_path / "third"), "--anchors", str(anchors)]) == 1
    assert "no anchor covers line 3, which is this exam" in capsys.readouterr().out
    lines = register.read_bytes().splitlines(keepends=True)
    retold = orjson.loads(lines[0]) | {"entrants": ["somebody"]}
    plan = orjson.loads((out / "exam.json").read_bytes()) | {"earlier": {"apex-rules": 0}}
    (out / "exam.json").write_bytes(orjson.dumps(plan))
    for forged_first in (None, orjson.dumps(retold) + b"\n"):
        kept = [] if forged_first is None else [forged_first]
        second = orjson.loads(lines[1]) | {"before": sha256(b"".join(kept)).hexdigest()}
        register.write_bytes(b"".join([*kept, orjson.dumps(second) + b"\n"]))
        assert main(["exam", "check", str(out)]) == 0, "without anchors, a rebuilt register says what it likes"
        assert main([*check]) == 1
        assert "no anchor covers line" in capsys.readouterr().out
    register.write_bytes(lines[0])
    assert main([*check]) == 1
    assert "lines 1 to 2 are not those that were anchored" in capsys.readouterr().out
    register.unlink()
    assert main([*check]) == 2


def test_an_exam_from_python_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own: dict[str, Any] = {"strategy": SMA_CROSS, "variants": ("Apex",), "secret": "s", "states": 2}
    called = run_exam(out=tmp_path / "python" / "exam", **own)
    assert exam(tmp_path / "command" / "exam", "--strategy", SMA_CROSS, "--variant", "Apex", "--json", states=2) == 0
    said = orjson.loads(capsys.readouterr().out)
    assert orjson.loads(msgspec.json.encode(called)) | {"cause": None, "reason": ""} == said
    assert {each.entrant for each in called.entrants} == {"smacross", "apex-rules", "nothing"}
    assert run_exam(out=tmp_path / "python" / "exam", **own) == called, "it is complete, and nothing is asked again"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"states": 0}, "int` >= 1 - at `$.states`"),
        ({"edges": ["luck"]}, "Invalid enum value 'luck' - at `$.edges"),
        ({"strategy": 5}, "strategy is 5; it must be a class with decide(view), or FILE:CLASS"),
        ({"out": 5}, "out is 5; it must be a folder"),
        ({"statez": 5}, "unknown field `statez`"),
        ({"variants": ("Nobody",)}, "Invalid enum value 'Nobody'"),
        ({"budget_usd": 5}, "--budget-usd: only with --models"),
        ({"markets": ["BTC"]}, "--market: only with --data"),
        ({"compare": ["apex-rules", "nobody"]}, "nobody does not take part"),
        ({"compare": ["nothing", "nothing"]}, "two different entrants"),
    ],
)
def test_wrong_arguments_from_python_are_named(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"out": tmp_path / "exam", "variants": ("Apex",)} | arguments
    with pytest.raises(SettingsError) as caught:
        run_exam(**given)
    assert words in str(caught.value)
    assert not (tmp_path / "exam").exists()


def test_a_market_from_python_is_one(tmp_path: Path) -> None:
    write_walk(tmp_path / "BTCUSDT.csv", datetime(2025, 3, 1, tzinfo=UTC), 60, price=90_000, seed=1)
    with pytest.raises(StartError, match="candles of BTC but not of XRP;"):
        run_exam(out=tmp_path / "exam", variants=("Apex",), data=tmp_path, markets="XRP")


@pytest.mark.processes
async def test_a_browser_shows_the_shares_the_pairs_and_the_examples_of_an_exam(tmp_path: Path) -> None:
    chromium_program()
    out = tmp_path / "exam"
    assert await asyncio.to_thread(exam, out, "--variant", "Trendsurfer") == 0
    assert await asyncio.to_thread(main, ["exam", "report", str(out)]) == 0
    result = report_data(out / "report.html")["result"]
    entrant = result["entrants"][0]
    async with opened_report(out / "report.html", tmp_path) as tab:
        heads, *shares = await rows_of(tab, entrant["entrant"])
        assert (heads[:3], heads[4:]) == (["edge", "what precedes it", "share"], ["states", "size", "oversized"])
        assert [(row[0], row[4]) for row in shares] == [
            *((edge, str(share["states"])) for edge, share in entrant["shares"].items()),
            ("all", str(entrant["share"]["states"])),
        ]
        assert float(shares[-1][2]) == pytest.approx(entrant["share"]["share"], abs=0.006)
        _, pair = await rows_of(tab, "Pairs")
        assert pair[:4] == ["trendsurfer-rules", "nothing", result["comparisons"][0]["verdict"], "10"]
        charts = "document.querySelectorAll('svg:has(polyline + polyline)').length"
        assert await tab.evaluate(charts) == 2, "the best and the worst decision, each with what followed"


def test_interrupted_exam_goes_on_where_it_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        assert exam(out, "--variant", "Sovereign", states=4) == 0
    written = (whole / "sittings.jsonl").read_bytes()
    (cut / "sittings.jsonl").write_bytes(written[: written.index(b"\n") + 20])
    assert exam(cut, "--variant", "Sovereign", states=4) == 0
    assert (cut / "sittings.jsonl").read_bytes() == written
    assert exam(cut, "--variant", "Apex", states=4) == 2
    assert "is an exam of sovereign-rules" in capsys.readouterr().err
    assert exam(cut, "--variant", "Sovereign", "--compare", "sovereign-rules,nothing") == 2
    assert "compares no pair, which was fixed before it began" in capsys.readouterr().err


@pytest.mark.slow
def test_models_are_asked_once_within_a_budget(
    models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asking = tmp_path / "exam", ("--models", str(models), "--concurrency", "2", "--json")
    assert exam(out, *asking, "--budget-usd", "0.007", states=6) == 1
    first = orjson.loads(capsys.readouterr().out)
    assert first["cause"] == "budget"
    assert 0 < first["states"] < 6
    asked = provider.requests
    assert exam(out, *asking, "--budget-usd", "1", states=6) == 0
    second = orjson.loads(capsys.readouterr().out)
    assert second["states"] == 6
    answers = (out / "cassette" / "answers.jsonl").read_bytes().splitlines()
    assert provider.requests == len(answers) > asked
    assert exam(out, *asking, "--budget-usd", "1", states=6) == 0
    assert provider.requests == len(answers)
    own = [each["answer"] for each in sittings(out) if each["entrant"] == "one"]
    assert {answer["decided"][0]["steps"][0]["calls"][0]["tool"] for answer in own} == {"createPosition"}
    assert all(float(answer["costUsd"]) > 0 and answer["tokens"] > 0 for answer in own)


def test_budget_that_cannot_pay_one_state_is_refused_before_any_model_is_asked(
    models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exam(tmp_path / "exam", "--models", str(models), "--budget-usd", "0.001") == 2
    assert "the decisions of each model in one state take about" in capsys.readouterr().err
    assert not provider.requests
    assert not (tmp_path / "exam").exists()


def test_samples_of_a_state_are_asked_separately_and_compared(
    models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = ("--models", str(models), "--budget-usd", "1", "--samples", "3", "--json")
    assert exam(tmp_path / "exam", *asking, states=2) == 0
    entrant, _ = orjson.loads(capsys.readouterr().out)["entrants"]
    assert entrant["samples"] == 3
    assert 0 <= entrant["agreement"] <= 1
    decided = [each for each in sittings(tmp_path / "exam") if each["entrant"] == "one"]
    assert len({(each["state"], each.get("sample", 0)) for each in decided}) == len(decided) == 6
    assert provider.requests == 12  # two steps each


@pytest.mark.slow
def test_models_decide_in_every_step_of_the_second_part(
    models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = ("--models", str(models), "--budget-usd", "1", "--managed", "--json")
    assert exam(tmp_path / "exam", *asking, states=1) == 0
    assert provider.requests >= 12
    assert len(sittings(tmp_path / "exam")[0]["answer"]["decided"]) == 12
    assert main(["exam", "check", str(tmp_path / "exam")]) == 0
    asked = provider.requests
    (tmp_path / "exam" / "sittings.jsonl").write_bytes(b"")
    assert exam(tmp_path / "exam", *asking, states=1) == 0
    assert provider.requests == asked, "an interrupted state takes its answers from the cassette"
    assert main(["exam", "plan", "--managed", "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out.splitlines()[-1])["decisions"] % 24 == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--edges", "carry,luck"), "expected some of breakout"),
        (("--compare", "apex-rules,nobody"), "nobody does not take part"),
        (("--budget-usd", "5"), "--budget-usd: only with --models"),
        (("--batch",), "--batch: only with --models"),
        (("--latency", "60000"), "--latency is 60000"),
        (("--mask", "dates"), "--mask: only with --data"),
    ],
)
def test_what_cannot_be_examined_is_refused(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exam(tmp_path / "exam", *options) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "exam").exists()


def test_folder_without_an_exam_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exam" / "notes"
    file.parent.mkdir()
    assert main(["exam", "report", str(file.parent)]) == 1
    assert f"has no exam: {file.parent}/exam.json: No such file" in capsys.readouterr().err
    file.write_text("mine")
    assert exam(file.parent, "--variant", "Apex") == exam(file, "--variant", "Apex") == 2
    assert capsys.readouterr().err.count("exists and has no exam; give a new folder") == 2
    assert [each.name for each in file.parent.iterdir()] == ["notes"]
    (file.parent / "exam.json").write_text('{"states": []}')
    assert exam(file.parent, "--variant", "Apex") == 1
    assert main(["exam", "check", str(file.parent)]) == 2, "nothing was compared"
    assert capsys.readouterr().err.count("has a damaged exam: Object missing required field") == 2


def test_cost_is_estimated_before_any_model_is_asked(
    models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exam(tmp_path / "exam", "--models", str(models), states=230) == 2
    assert "one: 230 decisions" in capsys.readouterr().err
    assert not provider.requests


@pytest.mark.slow
def test_check_finds_a_score_that_does_not_follow_from_its_decision(
    models: Path, provider: TradingProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, asked = tmp_path / "code", tmp_path / "asked"
    assert exam(code, "--models", str(STRATEGIES), states=2) == 0
    assert exam(asked, "--models", str(models), "--budget-usd", "1", states=1) == 0
    assert main(["exam", "check", str(code)]) == main(["exam", "check", str(asked)]) == 0
    assert main(["exam", "report", str(code)]) == main(["exam", "check", str(code)]) == 0
    file = code / "sittings.jsonl"
    written = file.read_bytes()
    decided = next(each for each in sittings(code) if "decided" in each["answer"])
    old, new = (b'"score":%s,' % orjson.dumps(decided["score"] + more) for more in (0.0, 0.001))
    file.write_bytes(written.replace(old, new, 1))
    capsys.readouterr()
    assert main(["exam", "check", str(code), "--json"]) == 1
    wrong, *card = orjson.loads(capsys.readouterr().out)["wrong"]
    assert {each.replace(".", " ").split()[2] for each in card} == {"result", "digests", "it"}, "and the report"
    assert wrong.startswith(f"state {decided['state']}, {decided['entrant']}: score is")
    (code / "secret").write_text("other")
    assert main(["exam", "check", str(code)]) == 1
    assert "is not the secret of this exam" in capsys.readouterr().out


def test_a_report_that_says_something_else_fails_the_check_and_another_program_is_named(
    taken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copytree(taken, tmp_path / "exam")
    assert main(["exam", "report", str(out)]) == main(["exam", "check", str(out)]) == 0
    told = (out / "report.html").read_text()
    (out / "report.html").write_text(told.replace("sovereign-rules", "apex-rules", 1))
    assert main(["exam", "check", str(out)]) == 1
    assert "report.html: it says" in capsys.readouterr().out
    plan = orjson.loads((out / "exam.json").read_bytes())
    plan["code"] = {"version": "9.9", "digest": "0" * 64}
    (out / "exam.json").write_bytes(orjson.dumps(plan))
    (out / "card.json").unlink()
    assert main(["exam", "check", str(out)]) == 0
    assert "Begun by another program, trader 9.9: rule agents and report were not checked." in capsys.readouterr().out


def test_the_second_part_is_decided_in_steps_reported_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exam"
    assert exam(out, "--variant", "Trendsurfer", "--managed", "--json", states=2) == 0
    assert orjson.loads(capsys.readouterr().out)["managed"]
    assert main(["exam", "report", str(out)]) == 0
    assert "in 12 steps, 30m apart" in capsys.readouterr().out
    assert exam(out, "--variant", "Trendsurfer", states=2) == main(["exam", "check", str(out)]) == 0
    rows = sittings(out)
    decided = next(row["answer"]["decided"] for row in rows if len(row["answer"].get("decided", ())) > 1)
    del decided[-1]
    (out / "sittings.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    assert main(["exam", "check", str(out)]) == 1
    assert "when asked again it is" in capsys.readouterr().out
    assert exam(tmp_path / "other", "--managed", "--data", str(tmp_path)) == 2
    assert "--managed: not with --data" in capsys.readouterr().err


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a JSON value that is neither an object nor an array."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path
    for key, each in inner or ():
        yield from leaves(each, (*path, key))


def forged(value: Any, path: tuple[Any, ...], rng: Random) -> Any:
    """Return a copy of a JSON value with another value at a path."""
    copy = deepcopy(value)
    *outer, last = path
    holder = reduce(getitem, outer, copy)
    match holder[last]:
        case bool(given):
            holder[last] = not given
        case int(given) | float(given):
            holder[last] = given + rng.choice((-1, 1)) * rng.choice((1, 1e-6 + abs(given) / 100, 0.5))
        case str(given) if given:
            place = rng.randrange(len(given))
            holder[last] = given[:place] + ("1" if given[place] == "0" else "0") + given[place + 1 :]
        case _:
            holder[last] = 0.5
    return copy


@pytest.mark.slow
def test_nothing_forged_in_card_plan_or_decisions_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, rng = tmp_path / "exam", Random(7)
    assert (
        exam(out, "--models", str(STRATEGIES), "--edges", "carry", states=3) == main(["exam", "report", str(out)]) == 0
    )
    card = orjson.loads((out / "card.json").read_bytes())
    jsonschema_rs.validate(orjson.loads((out / "card.schema.json").read_bytes()), card)
    plan, secret = read_plan(out)
    decided = read_sittings(out, plan)
    (out / "report.html").unlink()
    places = list(leaves(card))
    for path in rng.sample(places, min(120, len(places))):
        (out / "card.json").write_bytes(orjson.dumps(forged(card, path, rng)))
        assert list(file_differences(out, plan, secret, decided)), path
    figures = exam_result(plan, decided).entrants

    def passes() -> bool:
        """Return whether a forged exam passes with a new card made from it."""
        return main(["exam", "report", str(out)]) == main(["exam", "check", str(out)]) == 0

    def kept(file: str, content: Any, count: int, encode: Callable[[Any], bytes]) -> bytes:
        """Forge values of a file one at a time and restore it: what passes, as other words do, changes no figure."""
        original = (out / file).read_bytes()
        for path in rng.choices(list(leaves(content)), k=count):
            (out / file).write_bytes(encode(forged(content, path, rng)))
            if passes():
                again, _ = read_plan(out)
                assert exam_result(again, read_sittings(out, again)).entrants == figures, path
        (out / file).write_bytes(original)
        return original

    many = is_nightly()
    kept("exam.json", orjson.loads((out / "exam.json").read_bytes()), 80 if many else 4, orjson.dumps)
    written = kept(
        "sittings.jsonl",
        sittings(out),
        120 if many else 6,
        lambda states: b"".join(orjson.dumps(each) + b"\n" for each in states),
    )
    (out / "sittings.jsonl").write_bytes(b"".join(written.splitlines(keepends=True)[3:]))
    assert main(["exam", "report", str(out)]) == 0
    assert main(["exam", "check", str(out), "--json"]) == 1
    assert "are not the first ones of the plan" in capsys.readouterr().out
    (out / "sittings.jsonl").write_bytes(b"".join(written.splitlines(keepends=True)[1:]))
    assert main(["exam", "check", str(out)]) == 1
    assert "lines 1 to 3 do not belong to one state" in capsys.readouterr().out


@pytest.mark.processes
def test_processes_decide_as_one_process_does(tmp_path: Path) -> None:
    assert exam(tmp_path / "here", "--variant", "Sovereign", states=3) == 0
    assert exam(tmp_path / "processes", "--variant", "Sovereign", "--workers", "2", states=3) == 0
    assert sittings(tmp_path / "here") == sittings(tmp_path / "processes")


def of_entrants(rows: list[dict[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return the decisions of these entrants, under other names."""
    return [each | {"entrant": names[each["entrant"]]} for each in rows if each["entrant"] in names]


FORGERIES: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], list[dict[str, Any]]]] = {}


def forgery(forge: Callable[[dict[str, Any], list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    FORGERIES[forge.__name__] = forge


@forgery
def names_swapped(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    one, other, _ = plan["models"]
    one["id"], other["id"] = other["id"], one["id"]
    plan["strategies"] = {model["id"]: model["router_model_name"] for model in (one, other)}
    return of_entrants(rows, {one["id"]: other["id"], other["id"]: one["id"], "nothing": "nothing"})


@forgery
def decisions_swapped(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    one, other, nothing = (model["id"] for model in plan["models"])
    states = [rows[first : first + 3] for first in range(0, len(rows), 3)]
    swapped = [of_entrants([b, a, idle], {one: other, other: one, nothing: nothing}) for a, b, idle in states]
    for row in (row for state in swapped for row in state[:2]):
        for each in row["answer"].get("decided", ()):
            each["modelId"] = other if each["modelId"] == one else one
    return [row for state in swapped for row in state]


@forgery
def a_rival_removed(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gone = plan["models"].pop(0)["id"]
    del plan["strategies"][gone]
    return [each for each in rows if each["entrant"] != gone]


@forgery
def states_left_out(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows[:9]


@forgery
def states_cut_from_the_plan(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    del plan["states"][3:]
    return rows[:9]


@forgery
def a_pair_registered_afterward(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plan["compared"] = [model["id"] for model in plan["models"][:2]]
    return rows


@forgery
def another_configuration(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plan["models"][0]["training_cutoff"] = plan["models"][0]["configuration"]["training_cutoff"] = "2020-01-01"
    return rows


@forgery
def decisions_dropped(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[n - n % 3 + 2] | {"entrant": row["entrant"]} for n, row in enumerate(rows)]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exams") / "exam"
    assert exam(out, "--variant", "Apex", "--variant", "Sovereign", states=6) == 0
    return out


@pytest.mark.parametrize("name", FORGERIES)
def test_an_exam_that_shows_less_or_others_than_was_planned_fails_the_check(
    taken: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["exam", "check", str(taken)]) == 0
    assert "apex-rules, sovereign-rules decided the same when asked again" in capsys.readouterr().out
    out = copytree(taken, tmp_path / "exam")
    plan = orjson.loads((out / "exam.json").read_bytes())
    rows = FORGERIES[name](plan, sittings(out))
    (out / "exam.json").write_bytes(orjson.dumps(plan))
    (out / "sittings.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    assert main(["exam", "report", str(out)]) == 0, "the forger makes a new card"
    assert main(["exam", "check", str(out), "--json"]) == 1
    assert orjson.loads(capsys.readouterr().out.splitlines()[-1])["wrong"], name
