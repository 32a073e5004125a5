"""Kinds of mistakes: whatever is kept equals a fresh computation, and every limit holds at n and at n + 1.

What is kept and what is limited is searched for in the code. A new one is named here, with the test that covers it or
the reason why none is needed; for a cached procedure, that is a row of `READS` in `api/test_kept_answers.py`.
"""

import ast
import re
from pathlib import Path
from typing import Final

from support.trees import modules

TESTS: Final = Path(__file__).parent

LIMIT: Final = re.compile(r"_?([A-Z0-9]+_)*(MAX|LEAST|MOST|CAPACITY|SLOTS|(AT_ONCE|LIMIT))(_[A-Z]+)?")
"""The names of limits. One that a test names, beside its module, is covered by that test."""

LIMITED: Final[dict[str, str]] = {
    "tested by what it does in test_limits.py, test_refusals.py, test_agent_limits.py or test_live_limits.py": """
        agents/conversation.py agents/domain/as_written.py agents/domain/strategy.py agents/domain/tools.py
        agents/model_warnings.py agents/models_file.py agents/providers/client.py agents/providers/keys.py
        agents/providers/replies.py agents/providers/strategy_process.py agents/providers/taapi.py
        agents/record.py agents/strategy_files.py api/batch.py api/broadcast.py api/response_cache.py
        api/schemas/evidence.py api/schemas/paging.py api/schemas/positions.py api/subscriber.py
        backtest/answers.py backtest/sources.py backtest/sweep.py commands/compare.py core/clock.py
        core/files.py core/inputs.py core/money.py database/embedded/folders.py
        database/embedded/server.py exam/folder.py exchange/domain/halts.py exchange/domain/tick_order.py
        exchange/ledger_writer.py exchange/service_level.py live/budget.py live/http.py live/hyperliquid/api.py
        live/hyperliquid/orders.py live/hyperliquid/records.py live/lighter/account.py live/lighter/api.py
        live/lighter/orders.py live/lighter/records.py live/lighter/transactions.py live/market.py
        live/outbox.py live/reconciler.py live/socket.py market/feed.py market/sources/downloads.py
        market/sources/files.py operations/domain/alarms.py seasons/bundle.py settings/toml_lines.py
    """,
    "tested at n + 1 beside its module": """
        agents/workflow.py api/health.py live/account.py market/sources/replay.py operations/notifications.py
        settings/forms.py
    """,
    "how many connections may wait, which the kernel rounds; files are tested in test_refusals.py": """
        api/connections.py
    """,
    "the memory of running processes, which never is exactly n; their number is tested in test_agent_limits.py": """
        agents/providers/confinement.py
    """,
    "a figure of a strategy, a statistic or a simulated market, which refuses nothing": """
        agents/budgets.py agents/domain/prompt.py agents/domain/rules/apex.py agents/domain/rules/contrarian.py
        agents/domain/rules/sovereign.py agents/domain/rules/trendsurfer.py backtest/domain/selection.py
        exam/domain/scores.py exam/domain/worlds.py market/sources/books.py market/sources/minute_paths.py
        portfolio/domain/evidence.py
    """,
    "how much is printed, shown or logged of something": """
        agents/calls.py agents/providers/refusals.py agents/reproduction.py agents/verification.py
        api/dashboard/preview.py api/origins.py api/record.py api/stream_table.py backtest/report.py
        backtest/workers.py commands/season.py commands/season_plan.py exam/page.py live/book.py
    """,
    "how much is done at once or remembered: the rest follows": """
        agents/providers/attempts.py api/rpc.py exchange/accounts.py exchange/tick_processor.py
        live/lighter/frames.py live/shadow.py operations/operator_commands.py portfolio/snapshots.py record/results.py
    """,
    "what is kept for the database while it does not answer": "agents/schedule.py live/drift.py",
    "bounds a hang": "agents/providers/protocols.py commands/operate.py composition/leadership.py live/ledger.py",
    "names that contain the word": "settings/checks.py",
}  # fmt: skip
"""The modules with limits that no test names: the reason, and where."""

KEPT: Final[dict[str, str]] = {
    "compared with a fresh computation in agents/test_budgets.py": """
        agents/budgets.py:_group agents/budgets.py:_left agents/budgets.py:_sharer agents/budgets.py:_token_cost
    """,
    "compared with a fresh computation in agents/test_workflow.py": """
        agents/observer.py:_compute_indicators agents/observer.py:_read_history
    """,
    "compared with a fresh computation in api/test_kept_answers.py": """
        api/response_cache.py:make market/followed_market.py:_changed
    """,
    "compared with a fresh computation in portfolio/test_analytics.py": """
        portfolio/run_statistics.py:equity_figures portfolio/run_statistics.py:figures
        portfolio/run_statistics.py:returns portfolio/run_statistics.py:trade_figures
        portfolio/run_statistics.py:within
    """,
    "compared with a replay of the service in e2e/test_backtest_live.py": """
        backtest/accounts.py:history backtest/market.py:__getitem__ backtest/market.py:_columns
        backtest/market.py:_of_whole_windows backtest/market.py:indicators backtest/market.py:shown
        backtest/market.py:vwaps
    """,
    "compared with a fresh computation in agents/test_entrants.py": """
        agents/entrants.py:_configuration agents/entrants.py:enter
    """,
    "follows from its arguments, or from fields that never change": """
        agents/domain/invocation_digest.py:_text_digest agents/domain/memory.py:decisions
        agents/domain/prompt.py:candle_values agents/domain/tools.py:tool_schemas agents/variants.py:_derived_color
        api/edge.py:_name_of_path api/requests.py:_network_of api/schemas/common.py:_plan
        api/stream_messages.py:_make_block api/stream_messages.py:block api/stream_messages.py:text
        backtest/accounts.py:stats backtest/execution.py:market backtest/execution.py:source
        backtest/output.py:results core/inputs.py:_fields
        core/intervals.py:_sequence_density core/intervals.py:student_quantile core/intervals.py:student_tail
        database/schema.py:used_tables exam/domain/law.py:_normals exam/domain/worlds.py:draw_patterns
        exam/pairs.py:digest exchange/sql/ledger.py:_statement market/domain/markets.py:book
        market/sources/replay.py:paths market/sources/walks.py:_free market/sources/walks.py:_from_0
        market/sources/walks.py:walk_pool portfolio/domain/bets.py:_sequence_bars
        portfolio/domain/bets.py:days_needed portfolio/domain/bets.py:smallest_visible
    """,
    "a view of the market's rules, which change in place": "live/ledger.py:rules",
    "a fact of the machine": "agents/providers/confinement.py:can_confine core/clock.py:_boot",
    "a connection, a process or a signer, which is no figure": """
        agents/providers/client.py:_client agents/providers/client.py:shown
        agents/providers/strategy_process.py:_running
        agents/providers/taapi.py:_client agents/providers/webhook.py:_opened backtest/workers.py:run
        database/leadership.py:try_acquire live/lighter/account.py:_signer live/lighter/account.py:account
        live/http.py:session live/hyperliquid/account.py:_agent live/hyperliquid/account.py:account
    """,
    "a state, not a copy of one": """
        agents/external.py:_begin api/registry.py:declare api/registry.py:procedure backtest/agents.py:answer
        backtest/answers.py:decide backtest/output.py:keep core/logs.py:filter exchange/idempotent_orders.py:once
        exchange/tick_processor.py:_close_gap exchange/tick_processor.py:_read_missed
        live/market.py:claim_subscription live/market.py:quote live/outbox.py:_book_outcome
        market/sources/forms.py:read market/sources/recorder.py:_move_to
        portfolio/hour_bounds.py:_breach
    """,
}  # fmt: skip
"""The functions that keep what they return: what compares it, or why nothing has to."""


def own(node: ast.expr) -> str | None:
    """Return the name of an attribute of `self`, of which an item counts as well."""
    match node:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return f"{name}[]"
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def asked(node: ast.AST) -> str | None:
    """Return the attribute of `self` that an expression looks for: one that may be None, or have no such key."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="get")):
            return f"{name}[]"
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute() as place]):
            return f"{own(place)}[]"
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()]):
            return own(left)
    return None


def is_kept(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function returns something that it keeps: under `cache`, or in an attribute that it looks at."""
    if any("cache" in ast.unparse(each).rpartition(".")[2] for each in function.decorator_list):
        return True
    nodes = list(ast.walk(function))
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    parts = [part for each in targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    stored = {own(part) for part in parts} - {None}
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in nodes)
    return returns and function.name != "__init__" and not stored.isdisjoint(map(asked, nodes))


def kept_in(tree: ast.Module) -> set[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if is_kept(function)}


def limits_in(tree: ast.Module) -> set[str]:
    """Return the names of a module's constants that are limits."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    targets = (node.target if isinstance(node, ast.AnnAssign) else node.targets[0] for node in assigned)
    return {target.id for target in targets if isinstance(target, ast.Name) and LIMIT.fullmatch(target.id)}


def names(reasons: dict[str, str]) -> set[str]:
    listed = [name for each in reasons.values() for name in each.split()]
    assert len(listed) == len(set(listed)), "each has one reason"
    return set(listed)


def test_whatever_is_kept_is_compared_with_a_fresh_computation() -> None:
    found = {f"{module}:{name}" for module, tree in modules().items() for name in kept_in(tree)}
    assert found == names(KEPT)
    for reason in KEPT:
        if reason.startswith("compared"):
            assert (TESTS / reason.rpartition(" ")[2]).exists(), reason


def test_every_limit_is_tested_or_needs_no_test() -> None:
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py") if path.parent.name != "tools"]

    def is_named(module: str, name: str) -> bool:
        place = "trader." + module.removesuffix(".py").replace("/", ".")
        return any(place in text and re.search(rf"\b{name}\b", text) for text in texts)

    found = {
        module for module, tree in modules().items() if any(not is_named(module, name) for name in limits_in(tree))
    }
    assert found == names(LIMITED)


def test_the_searches_find_the_kinds_of_what_is_kept() -> None:
    text = """
ROWS_MAX: Final = 3
_AT_ONCE = 4
class A:
    @cached_property
    def a(self): return 1
    def b(self, key):
        if key not in self._b:
            self._b[key] = 1
        return self._b[key]
    async def c(self):
        if self._c is None:
            self._c, self._d = 1, 2
        return self._c
    def d(self, key):
        if (known := self._d.get(key)) is None:
            known = self._d[key] = 1
        return known
    def e(self):
        self._e = 1
"""
    tree = ast.parse(text)
    assert (kept_in(tree), limits_in(tree)) == ({"a", "b", "c", "d"}, {"ROWS_MAX", "_AT_ONCE"})
