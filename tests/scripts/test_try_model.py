"""One trial of one model, as started by an operator: everything is shown, and nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from support.trading_provider import TradingProvider, call, opening, trading_provider

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "try_model.py"
KEY = "sk-try-model-secret-0001"
FIRST = [
    call(1, "createPosition", **opening("SOL", 0.5)),
    call(2, "createPosition", **opening("SOL", 0.5) | {"leverage": 11}),
    call(3, "closePosition", symbol="SOL"),
]


@pytest.fixture
def provider() -> Iterator[TradingProvider]:
    with trading_provider() as provider:
        provider.always = FIRST
        yield provider


def run(folder: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder, env={"PATH": os.environ["PATH"], "HOME": str(folder), **environ},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


OPENAI = ("--provider", "openai", "--model", "lab/one", "--variant", "Apex", "--demo")


def test_messages_calls_verdicts_tokens_and_cost_are_shown(tmp_path: Path, provider: TradingProvider) -> None:
    code, said, complained = run(tmp_path, *OPENAI, OPENAI_BASE_URL=provider.url, OPENAI_API_KEY=KEY)
    assert code == 0, complained
    for part in (
        "=== system\n# Apex",
        '=== user\n{"markets":[["symbol","tick","lot",',
        "=== call 1: createPosition → ok",
        '"status":"filled"',
        '"filledQuantity":"0.5"',
        "=== call 2: createPosition → rejected",
        "Leverage 11 is above the 10 that your variant allows.",
        "=== call 3: closePosition → ok",
        "=== call 4: holding → ok",
        "=== completed",
        "step 1: lab/one-2025 with key 1, 5000 + 100 tokens, ",
        "cost 0.002 USD",
        "total: 10,000 input tokens (not reported from the cache), 200 output tokens, cost 0.004 USD",
    ):
        assert part in said, part
    assert KEY not in said + complained
    results = [orjson.loads(m["content"]) for m in provider.asked[1]["messages"] if m["role"] == "tool"]
    assert results[0]["account"]["positions"] == [{"symbol": "SOL", "side": "LONG", "quantity": "0.5"}]
    assert results[2]["account"]["positions"] == [], "it sees how its orders would have turned out"
    assert float(results[2]["account"]["equity"]) < 10_000, "less fees and spread"
    assert list(tmp_path.iterdir()) == [], "nothing stays behind"


def test_a_failing_provider_is_reported(tmp_path: Path, provider: TradingProvider) -> None:
    provider.status = 404
    code, said, complained = run(tmp_path, *OPENAI, OPENAI_BASE_URL=provider.url, OPENAI_API_KEY=KEY)
    assert code == 1
    assert "=== failed: openai answered 404: " in said
    assert KEY not in said + complained


def test_without_a_provider_it_says_what_is_missing(tmp_path: Path) -> None:
    code, said, complained = run(tmp_path, *OPENAI[:-1])
    assert code == 2
    assert said == ""
    assert "OPENAI_API_KEY" in complained
    assert "Traceback" not in complained


def test_a_rule_agent_needs_no_provider(tmp_path: Path) -> None:
    code, said, complained = run(
        tmp_path, "--provider", "rules", "--model", "rules/sovereign", "--variant", "Sovereign"
    )
    assert code == 0, complained
    assert "holding → ok" in said
    assert "=== completed" in said
