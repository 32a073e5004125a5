"""Plausible bugs of the books, the record and the leadership: each a small change, and the tests that must notice it."""
# ruff: noqa: E501 - the texts stand here as they do in the program

from collections.abc import Sequence
from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """A bug: the texts to replace in one file of `trader`, why somebody might write it so, and where it must be found."""

    name: str
    reason: str
    path: str
    changes: Sequence[tuple[str, str]]
    tests: Sequence[str]


def pair(operation: str, actor: str) -> str:
    """Return the test of an operation with an actor in every gap of it."""
    return f"interleavings/test_interleavings.py::test_an_actor_in_a_gap_of_an_operation[{operation} / {actor}]"


def live_pair(operation: str, actor: str) -> str:
    """Return the same test of an operation at a venue."""
    return f"interleavings/test_live_interleavings.py::test_an_actor_in_a_gap_of_a_live_order[{operation} / {actor}]"


TERMS: Final = "interleavings/test_terms.py"
SEEN: Final = "exchange/test_seen_ticks.py"
SAFETY: Final = "exchange/test_safety.py"
AT_ONCE: Final = "exchange/test_exchange.py::test_more_accounts_trade_at_once_than_one_statement_posts"
BUDGETS: Final = "agents/test_budgets.py::test_what_is_kept_of_budgets_equals_a_fresh_computation"
ALARMS: Final = "operations/test_alarms_sent.py"
CANDLES: Final = "market/test_market_candles.py"
FAULTS: Final = "live/test_live_faults.py"
INDICATORS: Final = "agents/test_workflow.py::test_kept_indicators_equal_a_fresh_computation"
LIMITS: Final = "test_limits.py"
LOSSES: Final = "operations/test_loss_limits.py"
MEMORY: Final = "exchange/test_exchange.py::test_memory_versions_and_depth_equal_the_rows_after_any_history"
MINUTES: Final = "market/test_recorded_candles.py"
RANGES: Final = "exchange/domain/test_price_ranges.py"
READERS: Final = "api/test_broadcast.py"
RESULT: Final = "seasons/test_season_card.py::test_a_result_is_complete_and_of_the_season"
REFUSED: Final = "test_refusals.py"
AGENTS: Final = "agents/test_agent_limits.py"
VENUES: Final = "live/test_live_limits.py"
ROLLUPS: Final = "portfolio/sql/test_portfolio_store.py"
RUNS: Final = "portfolio/test_analytics.py::test_what_is_kept_of_runs_equals_a_fresh_read_after_any_history"
SECOND: Final = "exchange/test_second_lives.py"
TOKENS: Final = "api/test_kept_answers.py::test_each_change_alters_the_tokens_of_what_it_changes"

# Limits at n and n + 1, and what is kept against a fresh computation.
# fmt: off
_KINDS: Final = (
    Mutant("positions are kept though a model has another name", "they are of accounts", "api/response_cache.py", [("return exchange.version, context.models.version, *exchange.marks().items()", "return exchange.version, *exchange.marks().items()")], [TOKENS]),
    Mutant("histories of another term are kept", "snapshots have a version", "api/response_cache.py", [("return context.exchange.term, versions", "return versions")], [TOKENS]),
    Mutant("the evidence is kept though a model has decided", "a decision without an order changes no figure", "api/response_cache.py", [("return histories_token(context), context.exchange.version, context.invocations.version", "return histories_token(context), context.exchange.version")], [TOKENS]),
    Mutant("the leaderboard is kept though prices have changed", "it is made of snapshots", "api/response_cache.py", [("return evidence_token(context), positions_token(context)", "return evidence_token(context), context.exchange.version")], [TOKENS]),
    Mutant("prices are kept though a market is halted", "its price is the same", "api/response_cache.py", [("(quotes, context.market.troubles())", "quotes")], [TOKENS]),
    Mutant("completed trades are kept for longer than a minute", "they are complete", "api/response_cache.py", [("context.models.version, _minute(context)\n\n\ndef histories", "context.models.version\n\n\ndef histories")], [TOKENS]),
    Mutant("one more answer is kept than there is room", "the newest does not count", "api/response_cache.py", [("len(self._entries) > self._entries_max", "len(self._entries) > self._entries_max + 1")], [LIMITS]),
    Mutant("readers of two addresses displace each other forever", "the larger share gives way", "api/broadcast.py", [("count > places[newcomer.address] + 1)", "count > places[newcomer.address])")], [READERS]),
    Mutant("wrong secrets of former minutes count", "they were wrong", "operations/access.py", [("        if now_s - since_s > WRONG_WINDOW_S:\n            count, since_s = 0, now_s\n", "")], [LIMITS]),
    Mutant("a raised limit applies after a restart", "the bucket is known", "operations/access.py", [("known is None or known[0] != limit", "known is None")], [LIMITS]),
    Mutant("requests that were not sent are saved up", "the mean is what counts", "operations/domain/credentials.py", [("min(float(self._per_minute), self._tokens + (now_s - self._at_s) * per_s)", "self._tokens + (now_s - self._at_s) * per_s")], [LIMITS]),
    Mutant("a full queue drops the notice that is being sent", "it is the oldest", "operations/alarms.py", [("del self._waiting[1]", "del self._waiting[0]")], [LIMITS]),
    Mutant("failures of a sink are never forgotten", "it has failed", "operations/alarms.py", [("self._consecutive_failures, self.trouble = 0, None", "self.trouble = None")], [LIMITS]),
    Mutant("answers outlive a removed account", "nothing has changed in the others", "exchange/accounts.py", [("if key != account_id}\n            self.version += 1\n", "if key != account_id}\n")], [MEMORY]),
    Mutant("answers outlive a reread account", "the rows were the same", "exchange/accounts.py", [("self._accounts.update(rows)\n        self.version += 1\n", "self._accounts.update(rows)\n")], [MEMORY]),
    Mutant("answers outlive a newly opened account", "it has not traded", "exchange/accounts.py", [("                self.version += 1\n        return self._accounts[account_id]", "        return self._accounts[account_id]")], [MEMORY]),
    Mutant("a follower keeps removed accounts", "they have never traded", "exchange/accounts.py", [("            self._forget(self._accounts.keys() - versions.keys())\n", "")], [MEMORY]),
    Mutant("taken depth is that of before the order", "it is read again at the next tick", "exchange/accounts.py", [("        self._taken = posting.account.taken\n", "")], [MEMORY]),
    Mutant("a fenced account is no change for followers", "its sequence is what counts", "exchange/accounts.py", [("known.get(account_id) != version)", "known.get(account_id, version)[0] != version[0])")], [MEMORY]),
    Mutant("the 65th posting waits for another", "the event is clear once the batch is taken", "exchange/ledger_writer.py", [("            if not self._waiting:\n                self._work.clear()", "            self._work.clear()")], [AT_ONCE]),
    Mutant("candles go on from the last full interval", "the source has what has closed", "market/feed.py", [("series.end = candles[-1].open_time + span if candles else start", "series.end = end")], [CANDLES]),
    Mutant("more candles than were kept are not fetched", "the series is up to date", "market/feed.py", [("series.end is None or start < series.start or start > series.end:", "series.end is None or start > series.end:")], [CANDLES]),
    Mutant("minutes wait for a clock that was ahead", "they were recorded", "market/candles.py", [("for symbol, until in self._recorded_until.items() if until <= end}", "for symbol, until in self._recorded_until.items()}")], [MINUTES]),
    Mutant("indicators are kept until their own candle", "the session is of its candles", "agents/observer.py", [("known[0] == newest else", "known[0][0] == newest[0] else")], [INDICATORS]),
    Mutant("a token costs what it cost at the former price", "the model is the same", "agents/budgets.py", [("if known is None or known[0] is not model", "if known is None")], [BUDGETS]),
    Mutant("models want in the evening what they wanted at noon", "their cadence is the same", "agents/budgets.py", [("        self._wants.clear()\n", "")], [BUDGETS]),
    Mutant("budgets are those of the models at the start", "models seldom change", "agents/budgets.py", [("        self._models = models\n", "        self._models = self._models or models\n")], [BUDGETS]),
    Mutant("shares are those of before the cost", "they last for the cycle", "agents/budgets.py", [("        self._spent[model_id] = self._spent_by(self._costs[model_id])\n        self._forget_shares()\n", "        self._spent[model_id] = self._spent_by(self._costs[model_id])\n")], [BUDGETS]),
    Mutant("figures of the equity are those of the first hour", "new hours add to them", "portfolio/run_statistics.py", [("        self._equity.set(self.points(known))\n        self._equity_figures = None\n", "        self._equity.set(self.points(known))\n")], [RUNS]),
    Mutant("exposures do not count open positions anew", "they are in the equity", "portfolio/run_statistics.py", [("len(self.trades), len(self.later), tuple(self.open)", "len(self.trades), len(self.later)")], [RUNS]),
    Mutant("trades of one moment are in the order of their reads", "they closed at once", "portfolio/run_statistics.py", [("            self.trades[last:] = trades\n", "            self.trades += [each for each in trades if each.id not in {known.id for known in self.trades[last:]}]\n")], [RUNS]),
    Mutant("a position that was closed stays open in the statistics", "an account without positions has no rows", "portfolio/run_statistics.py", [("positions.get(model_id, ())]\n", "positions.get(model_id, ())] or run.open\n")], [RUNS]),
    Mutant("a run is known by its model", "a model has one run", "portfolio/run_statistics.py", [("if known is None or known.run.run_id != run.run_id:", "if known is None:")], [RUNS]),
    Mutant("entrants keep their first counts", "an entrant is known by its number", "portfolio/run_statistics.py", [("            period.entrant = entrant\n", "            pass\n")], [RUNS]),
    Mutant("decisions are no change of the statistics", "trades and hours are", "portfolio/sql/analytics.py", [("(SELECT coalesce(max(position), 0) FROM chain_links) AS invocations", "0::bigint AS invocations")], [RUNS]),
    Mutant("the leverage of an hour is that of its last snapshot", "the others are older", "portfolio/sql/snapshots.py", [("        leverage = greatest(h.leverage, s.leverage)\n", "        leverage = s.leverage\n")], [ROLLUPS]),
    Mutant("an answer of exactly the cache's size is not kept", "it leaves no room", "api/response_cache.py", [("len(entry.answer.body) > self._bytes_max", "len(entry.answer.body) >= self._bytes_max")], [LIMITS]),
    Mutant("the newest reader of an address is displaced", "it was the last to come", "api/broadcast.py", [("oldest = next(each for each in self._subscribers if", "oldest = next(each for each in reversed(self._subscribers) if")], [READERS]),
    Mutant("a backlog is full one byte early", "full is full", "api/subscriber.py", [("if self._backlog_bytes > self._backlog_bytes_max:", "if self._backlog_bytes >= self._backlog_bytes_max:")], [LIMITS]),
    Mutant("numbers of events go on in a new sequence", "they stay unique", "api/broadcast.py", [("self._sequence, self._number = secrets.token_hex(4), 0", "self._sequence = secrets.token_hex(4)")], ["api/test_one_stream.py"]),
    Mutant("waiting bodies are dropped one byte early", "the limit is reached", "api/requests.py", [("while self.bytes > WAITING_BYTES_MAX:", "while self.bytes >= WAITING_BYTES_MAX:")], [LIMITS]),
    Mutant("one more address with wrong secrets is remembered", "the next one makes room", "operations/access.py", [("if len(self._wrong) >= ADDRESSES_MAX:", "if len(self._wrong) > ADDRESSES_MAX:")], [LIMITS]),
    Mutant("an alarm ends one look late", "it must be away for longer", "operations/domain/alarms.py", [("now_s - each.seen_s >= each.ends_after_s", "now_s - each.seen_s > each.ends_after_s")], [LIMITS]),
    Mutant("a lasting alarm is repeated one look late", "an hour is not over yet", "operations/domain/alarms.py", [("now_s - each.reported_s >= EVERY_S", "now_s - each.reported_s > EVERY_S")], [LIMITS]),
    Mutant("a condition is reported at its fourth start", "three are allowed", "operations/domain/alarms.py", [("each.count >= STARTS_MAX", "each.count > STARTS_MAX")], [LIMITS]),
    Mutant("a loss of exactly the limit is no breach", "the limit is allowed", "operations/domain/loss_limits.py", [("if 100 * lost >= limit * start:", "if 100 * lost > limit * start:")], [LIMITS]),
    Mutant("an order of exactly the largest notional is refused", "the maximum is too much", "exchange/domain/order_validation.py", [("if notional > NOTIONAL_MAX:", "if notional >= NOTIONAL_MAX:")], [LIMITS]),
    Mutant("a posting stops counting one moment early", "its time is over", "exchange/service_level.py", [("now_s - ended_s <= WINDOW_S", "now_s - ended_s < WINDOW_S")], [LIMITS]),
    Mutant("a price of exactly 30 seconds is old", "its time is over", "market/domain/markets.py", [("if abs(now - at) <= STALE_AFTER:", "if abs(now - at) < STALE_AFTER:")], [LIMITS]),
    Mutant("the raw answers of all invocations are bounded each", "each is short", "agents/payloads.py", [("<= min(invocation_bytes_max, left)", "<= max(invocation_bytes_max, left)")], [LIMITS]),
    Mutant("a model is reported at its fourth failure", "three are allowed", "agents/model_warnings.py", [("failing.in_a_row >= FAILURES_MAX", "failing.in_a_row > FAILURES_MAX")], [LIMITS]),
    Mutant("one more invocation than there are slots runs", "the limit is the most that wait", "agents/slots.py", [("self._taken[name] >= self._size_for(queue[0].model)", "self._taken[name] > self._size_for(queue[0].model)")], [LIMITS]),
    Mutant("a cooldown does not grow", "each refusal is new", "agents/providers/keys.py", [("cooldown.next_s = min(asked_s * 2, refusal.longest_s)", "cooldown.next_s = min(asked_s, refusal.longest_s)")], [LIMITS]),
    Mutant("a file of exactly the largest size is refused", "it is too large", "core/files.py", [("facts.st_size <= bytes_max:", "facts.st_size < bytes_max:")], [LIMITS]),
    Mutant("a line of exactly the largest size is refused", "it is too long", "core/files.py", [("if len(line) > LINE_BYTES_MAX:", "if len(line) >= LINE_BYTES_MAX:")], [LIMITS]),
    Mutant("tables may be nested one deeper", "the outermost is none", "settings/toml_lines.py", [("_is_flat(values, DEPTH_MAX)", "_is_flat(values, DEPTH_MAX + 1)")], [LIMITS]),
    Mutant("the last moment of an input is refused", "it is after the end", "core/clock.py", [("if not EPOCH <= utc <= INPUT_TIME_MAX:", "if not EPOCH <= utc < INPUT_TIME_MAX:")], [LIMITS]),
    Mutant("a rearranged row of the wire is cut at the wrong end", "the last ones are the newest", "api/broadcast.py", [("islice(self._events, seen - kept_from, None)", "islice(self._events, seen - kept_from + 1, None)")], ["api/test_one_stream.py::test_only_retained_events_can_be_resumed"]),
    Mutant("the gains of open positions have the other sign", "they are what others lack", "seasons/standings.py", [("unrealized=equity - capital - others", "unrealized=capital - equity + others")], [RESULT]),
    Mutant("a decision of a season's first moment came before it", "the season begins after it", "seasons/record_reader.py", [("if self._start <= each.started_at < self._until]", "if self._start < each.started_at < self._until]")], [RESULT]),
    Mutant("a missed cycle of a season's first moment came before it", "the season begins after it", "seasons/record_reader.py", [("and self._start <= _moment(row[\"missed_at\"]) < self._until", "and self._start < _moment(row[\"missed_at\"]) < self._until")], [RESULT]),
    Mutant("equity of exactly the maintenance margin is unaffected", "it is not below it", "exchange/domain/tick_rules.py", [("return not account.positions or worst > required", "return not account.positions or worst >= required")], [RANGES]),
    Mutant("the maintenance of a range is that of its lowest price", "losses come from falls", "exchange/domain/tick_rules.py", [("maintenance(position.quantity * reached.highest_mark)", "maintenance(position.quantity * reached.lowest_mark)")], [RANGES]),
    Mutant("a range that ends at a plan's date does not reach it", "it is not over", "exchange/domain/tick_rules.py", [("(plan.time_exit is not None and until >= plan.time_exit):\n        return True\n    protecting", "(plan.time_exit is not None and until > plan.time_exit):\n        return True\n    protecting")], [RANGES]),
    Mutant("a stop that a range just touches is not reached", "it has not been crossed", "exchange/domain/tick_rules.py", [("reached.lowest_mark <= price for price in falling_to", "reached.lowest_mark < price for price in falling_to")], [RANGES]),
    Mutant("the last of a batch of missed ticks is left out", "the next batch begins with it", "exchange/tick_processor.py", [("                yield moments\n                moments = []", "                yield moments[:-1]\n                moments = []")], ["market/test_market_gaps.py"]),
    Mutant("the earliest jumps of a clock are kept", "they come first", "exchange/domain/tick_order.py", [("DateSpan(since, until)])[-SPANS_MAX:]", "DateSpan(since, until)])[:SPANS_MAX]")], [LIMITS]),
    Mutant("records whose sending failed are known", "they had been made", "api/state_broadcast.py", [("                self._records = []  # some may not have been sent\n", "")], [READERS]),
    Mutant("followers learn of snapshots with the next minute", "the minute is part of the token", "composition/leadership.py", [("            self._context.portfolio.note_written()", "            pass")], ["api/test_kept_answers.py::test_a_reader_shows_a_snapshot_of_the_same_minute"]),
    Mutant("a snapshot that was not confirmed was not written", "the write has failed", "portfolio/snapshots.py", [("        finally:\n            self.version += 1  # an unconfirmed write may have succeeded\n", "        finally:\n            pass\n        self.version += 1\n")], [TOKENS]),
    Mutant("a history is kept until the next booking", "only bookings change it", "agents/observer.py", [("(history.run_id, history.sequence, history.hour) == key", "(history.run_id, history.sequence) == key[:2]")], ["agents/test_workflow.py"]),
    Mutant("losses are measured before the baselines are read", "the former ones will do", "operations/loss_limits.py", [("    def stop(self) -> None:\n        self._due = None", "    def stop(self) -> None:\n        pass")], [LOSSES]),
    Mutant("a restart forgets that a halt was lifted today", "the day has a first equity", "operations/domain/loss_limits.py", [("if baseline.day < day and first_today is not None:", "if first_today is not None:")], ["operations/domain/test_limits.py"]),
    Mutant("halts of before the lead are for others to report", "there was another leader", "operations/alarms.py", [("                self._unsent[notice.cause] = notice\n", "                pass\n")], [ALARMS]),
    Mutant("every leader reports the halts in force", "they are in force", "operations/alarms.py", [("if notice.state != reported.get(cause, \"resolved\"):", "if notice.state:")], [ALARMS]),
    Mutant("the end of an alarm drops the notices of its kind", "they are about the same", "operations/alarms.py", [("if each[0].cause != notice.cause]", "if each[0].cause.kind != notice.cause.kind]")], [ALARMS]),
    Mutant("the halt of a removed account stays", "there is nothing to halt", "operations/operator_commands.py", [("                await store.update_halts_lifted(conn, command.account_id, command.asked_by)", "                pass")], ["security/test_places.py"]),
    Mutant("an order is recorded in a term that has just ended", "the term was read", "live/sql/venue_orders.py", [("WHERE EXISTS (SELECT FROM service_state WHERE term = $2 FOR SHARE)", "WHERE (SELECT term FROM service_state) = $2")], [live_pair("live order", "successor")]),
    Mutant("a missing stop is placed only after a refusal", "a plan places its own", "live/protective_orders.py", [("for terms in missing if terms not in self._refused)", "for terms in missing if terms in self._refused)")], [FAULTS]),
    Mutant("a stop is canceled before its successor stands", "both follow at once", "live/protective_orders.py", [("in outbox.unsettled or is_closing or waits):", "in outbox.unsettled or is_closing):")], [FAULTS]),
    Mutant("a stop of the same price is taken for one of the whole position", "its price is what counts", "live/protective_orders.py", [("if terms not in self.standing()]\n", "if (terms.symbol, terms.trigger) not in {(each.symbol, each.trigger) for each in self.standing()}]\n")], [FAULTS]),
    Mutant("a missing stop raises no alarm", "its price is watched here", "live/account.py", [("(self._protective_orders.missing, _PROTECTED_WITHIN,", "({}, _PROTECTED_WITHIN,")], [FAULTS]),
    Mutant("an entry is sent without its stop", "the stop follows at once", "live/account.py", [("[] if sending.reduce_only else protection_of(account, order, sending.quantity, market)", "[]")], [FAULTS]),
    Mutant("a followed account is never compared", "the venue pushes each change", "live/account.py", [("return interval_elapsed(self._looked_at + every, every, self._context.clock.now())", "return False")], [FAULTS]),
    Mutant("sent orders are resolved only at a start", "the answer says what became of them", "live/account.py", [("steps = [self._outbox.resolve, self._outbox.poll,", "steps = [self._outbox.poll,")], [FAULTS]),
    Mutant("an order that is not shown yet is told refused", "the venue had its time", "live/lighter/orders.py", [('return Unknown("the venue took the order and does not show it yet" if answer.is_taken else answer.reason)', 'return Refused("the venue does not show it")')], [FAULTS]),
    Mutant("an order that the venue shows no more is kept", "it will show it again", "live/outbox.py", [("for each in gone if not each.is_protective)", "for each in gone[:0])")], [FAULTS]),
    Mutant("an order is booked before all its trades are shown", "the others follow", "live/outbox.py", [("if traded == state.filled or (traded > state.filled and not state.is_final):", "if True:")], [FAULTS]),
    Mutant("a position that a person turned is waited for", "an order of ours may have done it", "live/domain/reconciliation.py", [("DifferenceKind.FLIPPED: Action.BOOK", "DifferenceKind.FLIPPED: Action.WAIT")], [FAULTS]),
    Mutant("a second stop without our id is left", "the venue cancels it with the position", "live/domain/reconciliation.py", [("DifferenceKind.PROTECTION_DOUBLED: Action.CANCEL", "DifferenceKind.PROTECTION_DOUBLED: Action.WAIT")], [FAULTS]),
    Mutant("an hour is recorded while it lasts", "it has begun", "record/sql/results.py", [("'-infinity') AND hour < $1", "'-infinity') AND hour <= $1")], ["record/test_results_chain.py"]),
    Mutant("a minute that comes late is never recorded", "it was asked for", "market/candles.py", [("stop if not is_latest else candles[-1].open_time + _MINUTE if candles else start", "stop")], [MINUTES]),
    Mutant("a clock that is ahead drops every minute", "they are old", "market/candles.py", [("min(now, newest + _DAY) - self._retention", "now - self._retention")], [MINUTES]),
    Mutant("ticks dropped in a former term delay a recovery", "their numbers only grow", "exchange/tick_processor.py", [("        self._dropped = 0  # ticks that no checkpoint has are numbered anew\n", "")], [SECOND]),
    Mutant("accounts of a former term wait for history", "they are still in doubt", "exchange/tick_processor.py", [("        self._behind.clear()\n", "")], [SECOND]),
    Mutant("a decision cut off by the end of a term keeps its depth", "its commit is in doubt", "exchange/accounts.py", [("        self._decided.clear()  # a change that was cut off at the end of the last term leaves its decision\n", "")], [SECOND]),
    Mutant("unsaved records count as interrupted in the next term", "their process was replaced", "agents/schedule.py", [("        await self._save_unsaved()  # if this process has led before, and lost the lead with the database\n", "")], ["agents/test_schedule.py"]),
    Mutant("ends unsaved in a former term are saved in the next", "they have ended", "agents/external.py", [("        self._unsaved.clear()\n", "")], [TERMS]),
    Mutant("snapshots that a former term could not write were taken", "the statement succeeded", "portfolio/snapshots.py", [("if self._last_term != term:", "if self._last_term is None:")], ["portfolio/test_portfolio.py"]),
    Mutant("a tick of a former term is applied in the next", "its accounts are read again", "composition/leadership.py", [("if self._lock is None or self._applying.locked() or", "if self._lock is None or")], [TERMS]),
    Mutant("models that waited in a former term wait forever", "they are waiting", "agents/schedule.py", [("        self._slots.clear()\n", "")], ["agents/test_schedule.py"]),
    Mutant("entrants of a former term go on", "their configuration is the same", "agents/entrants.py", [("        self._present.clear()\n", "        pass\n")], ["agents/test_entrants.py"]),
    Mutant("a standby's trouble with the database stays", "it does not lead yet", "database/leadership.py", [("            return False\n        self.trouble = None\n", "            return False\n")], ["database/test_leader_lock.py"]),
    Mutant("a standby reports the troubles of its former accounts", "they are its own", "live/exchange.py", [("        await self._accounts.resign()\n        self._live_accounts.clear()\n", "        await self._accounts.resign()\n")], ["live/test_live.py::test_the_troubles_of_a_term_end_with_it"]),
    Mutant("failures of a former term are added to the rows'", "a failure is a failure", "agents/model_warnings.py", [("self._failing = dict(failing)", "self._failing |= failing")], ["agents/test_schedule.py::test_a_new_term_counts_the_failures_that_its_rows_have"]),
    Mutant("a strategy's own file counts twice", "it is in the folder as well", "agents/providers/strategy_process.py", [("list(dict.fromkeys((file, *_modules(file.parent))))", "[file, *_modules(file.parent)]")], [REFUSED]),
    Mutant("blank lines are read to one before the limit", "the first one counts", "market/sources/files.py", [("if number - blank < _BLANK_MAX:", "if number - blank < _BLANK_MAX - 1:")], [REFUSED]),
    Mutant("the last transactions before the reserve are refused", "the reserve is the least", "live/budget.py", [("left - transactions < least", "left - transactions <= least")], [REFUSED]),
    Mutant("a silent book is heard for its last moment only", "the limit is over", "live/market.py", [("        if now - self._book_at > SILENCE_MAX:", "        if now - self._book_at >= SILENCE_MAX:")], ["live/test_live_limits.py"]),
    Mutant("the books of a new stream wait for those of the last", "they were just subscribed to", "live/market.py", [("self._book_at = self._subscribed_at = None", "self._book_at = None")], ["live/lighter/test_venue_stream.py"]),
    Mutant("a subscription outlasts its stream", "the next one replaces it", "live/lighter/frames.py", [("self._awaited, self.following = set(awaited), 0", "self._awaited = set(awaited)")], ["live/test_live_streams.py"]),
    Mutant("a jump of the clock between two terms is followed in the second", "no tick has followed it", "exchange/tick_processor.py", [("        self._jumps.jump()\n", "")], [SECOND]),
    Mutant("a jump of the clock before a term moves its hour", "no tick has followed it", "portfolio/hour_bounds.py", [("        self._jumps.jump()\n", "")], ["portfolio/test_hour_bounds.py"]),
    Mutant("an alarm that has ended is reported by the next leader", "nobody has reported it", "operations/alarms.py", [("                self._unsent.pop(notice.cause, None)\n", "")], [ALARMS]),
    Mutant("the count of snapshots is of the last ones", "there are no newer ones", "portfolio/snapshots.py", [("        self._created = 0\n        if not due:", "        if not due:")], ["portfolio/test_portfolio.py"]),
    Mutant("a revoked token keeps its streams", "it was valid when they began", "operations/access.py", [("known.id == credential.id and known.revoked_at is None", "known.id == credential.id")], ["security/test_access.py"]),
    Mutant("a revoked token still opens the doors of operators", "its secret is right", "operations/access.py", [("    if credential.revoked_at is not None:\n        raise KeyRevoked", "    if False:\n        raise KeyRevoked")], ["api/agents/test_operator_tokens.py"]),
    Mutant("a request is shortened once less", "five is the limit", "agents/conversation.py", [("if self._refusals > REFUSALS_MAX:", "if self._refusals >= REFUSALS_MAX:")], [AGENTS]),
    Mutant("the wait for keys is limited for each answer", "each answer is a wait", "agents/conversation.py", [("WAIT_LIMIT_S - self._waited_s", "WAIT_LIMIT_S + 5")], [AGENTS]),
    Mutant("an attempt is repeated once less", "three are made", "agents/providers/client.py", [("if progress.failures > RETRIES_MAX", "if progress.failures >= RETRIES_MAX")], [AGENTS]),
    Mutant("the pause after failures doubles without an end", "the source is away", "agents/providers/taapi.py", [("min(self._next_rest * 2, REST_MAX)", "self._next_rest * 2")], [AGENTS]),
    Mutant("one more process of a strategy may run", "the first is its own", "agents/providers/confinement.py", [("if len(started) > PROCESSES_MAX:", "if len(started) > PROCESSES_MAX + 1:")], [AGENTS]),
    Mutant("what a strategy prints is logged without a bound", "it is read in parts", "agents/providers/strategy_process.py", [("            self._output_left -= len(kept)\n", "")], [AGENTS]),
    Mutant("a provider is asked once more in a backtest", "the first request is none again", "backtest/answers.py", [("if attempt == ATTEMPTS_MAX:", "if attempt > ATTEMPTS_MAX:"), ("range(1, ATTEMPTS_MAX + 1)", "range(1, ATTEMPTS_MAX + 2)")], [REFUSED]),
    Mutant("a download of exactly the largest size is refused", "it is too long", "market/sources/downloads.py", [("if size > bytes_max:", "if size >= bytes_max:")], [REFUSED]),
    Mutant("a row of exactly the largest size is refused", "it is too long", "database/embedded/dumps.py", [("if len(self._rest) > ROW_BYTES_MAX:", "if len(self._rest) >= ROW_BYTES_MAX:")], [REFUSED]),
    Mutant("files for just enough connections refuse a start", "there are too few", "api/connections.py", [("if allowed < min(connections_max, _CONNECTIONS_LEAST):", "if allowed <= min(connections_max, _CONNECTIONS_LEAST):")], [REFUSED]),
    Mutant("a read of candles reaches back as far as it is asked to", "its answer is bounded", "market/candles.py", [("max(start, earliest)", "start")], [MINUTES]),
    Mutant("the bounds of answers change places", "both are bounds", "portfolio/analytics.py", [("payloads, RUN_ANSWERS_BYTES_MAX, ANSWERS_BYTES_MAX)", "payloads, ANSWERS_BYTES_MAX, RUN_ANSWERS_BYTES_MAX)")], ["portfolio/test_analytics.py"]),
    Mutant("a small gap is searched once less", "the first search counts", "live/reconciler.py", [("self._gap_tries <= _GAP_TRIES_MAX", "self._gap_tries < _GAP_TRIES_MAX")], [VENUES]),
    Mutant("awaited funding is tolerated of the whole account", "it is paid on all", "live/reconciler.py", [("_FUNDING_MAX * sum(", "2 * _FUNDING_MAX * sum(")], [VENUES]),
    Mutant("a stream may be silent for less than its limit", "twenty seconds are silence", "live/socket.py", [("if self._clock.now() - self._received_at > _SILENCE_MAX:", "if self._clock.now() - self._received_at >= _SILENCE_MAX:")], [VENUES]),
    Mutant("a nonce that another used ends an order", "the venue refused it", "live/lighter/orders.py", [("                    continue  # another transaction used up this nonce; the venue did not consider our order\n", "                    pass\n")], [VENUES]),
    Mutant("a canceled order is looked at once", "its end was told", "live/hyperliquid/orders.py", [("            if missed > 1 and error is not None:", "            if missed or error is not None:")], [VENUES]),
    Mutant("a close is sent again for as long as its order is open", "it can only reduce", "live/outbox.py", [(" and self._context.clock.now() < sent.created_at + _PLACING_MAX:", ":")], [VENUES]),
    Mutant("an attempt is awaited without an end", "its server answers at last", "agents/providers/client.py", [("async with self._slots, asyncio.timeout(limit_s), post", "async with self._slots, asyncio.timeout(None), post")], [AGENTS]),
    Mutant("the processes of a strategy are awaited for longer", "they end at last", "agents/providers/strategy_process.py", [("asyncio.timeout(END_LIMIT_S)", "asyncio.timeout(2 * END_LIMIT_S)")], [AGENTS]),
    Mutant("the answer to a transaction is awaited without an end", "it is lost or late", "live/lighter/transactions.py", [("timeout(self._send_limit_s)", "timeout(None)")], [VENUES]),
    Mutant("an invocation that has traded waits to its very end", "its orders count", "agents/conversation.py", [("self._ends_at_s - asyncio.get_running_loop().time() - ANSWER_S", "self._ends_at_s - asyncio.get_running_loop().time()")], [AGENTS]),
    Mutant("trades are read once less", "the first read is none again", "live/outbox.py", [("for read in range(_READS_MAX):", "for read in range(_READS_MAX - 1):")], [VENUES]),
)
# fmt: on

MUTANTS: Final = (
    Mutant(
        "the lock of the chain's marks is dropped",
        "the lock of the chain itself looks like enough",
        "record/sql/results.py",
        [("    await conn.execute(LOCK_MARKS)\n", "")],
        [pair("snapshot", "snapshot"), pair("snapshot", "snapshot elsewhere")],
    ),
    Mutant(
        "a change is announced before its commit",
        "dashboards would see it a round trip earlier",
        "exchange/accounts.py",
        [
            (
                "        try:\n            await self._writer.write(posting)\n",
                "        if posting.positions or posting.trades or posting.resting or posting.starts_run:\n"
                "            self._events.publish(PositionsChanged(account.changed_at, (account.id,)))\n"
                "        try:\n            await self._writer.write(posting)\n",
            ),
            (
                "        self.tally.add(posting)\n"
                "        if posting.positions or posting.trades or posting.resting or posting.starts_run:\n"
                "            self._events.publish(PositionsChanged(account.changed_at, (account.id,)))\n",
                "        self.tally.add(posting)\n",
            ),
        ],
        [pair("order", "tick")],
    ),
    Mutant(
        "loss baselines are recorded in any term",
        "a leader measures only while it leads",
        "operations/sql/loss_baselines.py",
        [("WHERE (SELECT term FROM service_state) = $8 AND", "WHERE $8::bigint IS NOT NULL AND")],
        [pair("order", "second leader"), pair("measure", "second leader")],
    ),
    Mutant(
        "a loss limit's halt is written in any term",
        "a halt is never wrong",
        "exchange/halts.py",
        [("if command.term is not None and not await hold_term(conn, command.term):", "if False:")],
        [pair("order", "second leader")],
    ),
    Mutant(
        "a halt whose acknowledgement was lost is written again",
        "ON CONFLICT already makes it idempotent",
        "exchange/halts.py",
        [("if await store.select_command_state(conn, command.id) is not None:", "if False:")],
        [TERMS],
    ),
    Mutant(
        "a halt that is not written yet is lifted by reading the others",
        "it is written before they are read",
        "exchange/halts.py",
        [("            halts += [unsaved.halt for unsaved in self._unsaved if _key(unsaved.halt) not in known]\n", "")],
        ["operations/test_halt_at_once.py"],
    ),
    Mutant(
        "a rule lifts its halt before that is written",
        "it is lifted in memory, too",
        "exchange/halts.py",
        [
            (
                "        async with self._rows:\n            await self._save()\n            async with self._database.transaction()",
                "        async with self._rows:\n            async with self._database.transaction()",
            )
        ],
        [SAFETY],
    ),
    Mutant(
        "the outcome of a command is written in any term",
        "whoever carries it out knows what became of it",
        "exchange/sql/halts.py",
        [
            (
                "UPDATE commands SET finished_at = now(), outcome = $2\n"
                "WHERE id = $1 AND finished_at IS NULL AND (SELECT term FROM service_state) = $3",
                "UPDATE commands SET finished_at = now(), outcome = $2\n"
                "WHERE id = $1 AND finished_at IS NULL AND ($3::bigint IS NULL OR true)",
            ),
            (
                "progress = $2\nWHERE id = $1 AND finished_at IS NULL AND (SELECT term FROM service_state) = $3",
                "progress = $2\nWHERE id = $1 AND finished_at IS NULL AND ($3::bigint IS NULL OR true)",
            ),
        ],
        [TERMS],
    ),
    Mutant(
        "a loss limit's command expires",
        "every command is good for ten minutes",
        "exchange/sql/halts.py",
        [("term IS NULL AND asked_at < now()", "asked_at < now()")],
        [TERMS],
    ),
    Mutant(
        "a loss limit's command is carried out after trading was resumed",
        "it was asked for, so it is done",
        "operations/operator_commands.py",
        [("if command.term is not None and not self._halts.is_limited(command.account_id):", "if False:")],
        [TERMS],
    ),
    Mutant(
        "a loss limit gives up closing after a minute",
        "as a person's flatten does",
        "operations/operator_commands.py",
        [("if is_late and command.term is None:", "if is_late:")],
        [TERMS],
    ),
    Mutant(
        "a resume after a person's halt forgives losses",
        "whoever resumes has looked",
        "operations/loss_limits.py",
        [("            if halt.cause not in LIMITS:\n                continue\n", "")],
        ["operations/test_loss_limits.py"],
    ),
    Mutant(
        "postings are written in any term",
        "the sequence number excludes a second writer",
        "exchange/sql/ledger.py",
        [("    AND (SELECT term FROM service_state) = $2\n", "    AND $2::bigint IS NOT NULL\n")],
        [pair("order", "second leader"), pair("take over", "order"), pair("tick with stop", "second leader")],
    ),
    Mutant(
        "postings do not name the sequence on which they were decided",
        "the lock of the account excludes a second writer",
        "exchange/sql/ledger.py",
        [("WHERE accounts.id = c.id AND accounts.sequence = c.sequence_before\n", "WHERE accounts.id = c.id\n")],
        [pair("recover", "late commit")],
    ),
    Mutant(
        "an account in doubt is not fenced before it is reread",
        "the connection of the lost statement is closed",
        "exchange/accounts.py",
        [("if not await store.update_account_fenced(conn, account_id, term):", "if conn is None:")],
        [pair("recover at a tick", "late commit")],
    ),
    Mutant(
        "a term is looked at and not held",
        "it was right a moment ago",
        "database/leadership.py",
        [("WHERE term = $1 FOR SHARE", "WHERE term = $1")],
        ["database/test_leader_lock.py"],
    ),
    Mutant(
        "a process on a replica leads",
        "whoever has the lock leads",
        "database/leadership.py",
        [("CASE WHEN pg_is_in_recovery() THEN false ELSE pg_try_advisory_lock($1) END", "pg_try_advisory_lock($1)")],
        ["commands/test_replica.py"],
    ),
    Mutant(
        "a term begins without the lock of the accounts",
        "the term in each posting is enough",
        "exchange/accounts.py",
        [
            (
                "            await store.lock_accounts(conn)",
                "            # await store.lock_accounts(conn)",
            )
        ],
        [pair("take over", "order"), pair("take over", "order elsewhere"), pair("order", "second leader")],
    ),
    Mutant(
        "memory changes before the commit",
        "the next order of the account sees it earlier",
        "exchange/accounts.py",
        [
            (
                "        try:\n            await self._writer.write(posting)\n",
                "        self._accounts[account.id] = account\n"
                "        try:\n            await self._writer.write(posting)\n",
            )
        ],
        [pair("order", "lost statement")],
    ),
    Mutant(
        "an account whose commit is not confirmed is not in doubt",
        "what is not confirmed has not happened",
        "exchange/accounts.py",
        [
            (
                "        except (Unavailable, InternalError):\n            self.mark_missed(account.id)\n",
                "        except (Unavailable, InternalError):\n",
            )
        ],
        [pair("order", "lost acknowledgement")],
    ),
    Mutant(
        "the last processed tick only moves forward in time",
        "time does",
        "exchange/sql/accounts.py",
        [
            (
                "WHERE term = $4 AND processed_tick <= $5\n",
                "WHERE term = $4 AND (processed_until IS NULL OR processed_until < $1)\n",
            ),
            (
                "WHERE EXISTS (SELECT FROM service_state WHERE term = $4 AND processed_tick <= $5)",
                "WHERE EXISTS (SELECT FROM service_state WHERE term = $4)",
            ),
        ],
        [SEEN],
    ),
    Mutant(
        "postings do not store the tick that their account has seen",
        "the date of the change says it",
        "exchange/accounts.py",
        [("        if posting is not None and seen is not None:\n", "        if False:\n")],
        [SEEN],
    ),
    Mutant(
        "the date of the last change says which ticks were seen",
        "as it did before there was a column",
        "exchange/tick_processor.py",
        [("moment.at <= account.seen_to(since)", "moment.at <= account.changed_at")],
        [SEEN],
    ),
    Mutant(
        "orders keep the seen tick of the account's last change",
        "nothing has changed since then",
        "exchange/accounts.py",
        [
            (
                "account, seen = self._accounts[account_id], seen or self.processed\n",
                "account = self._accounts[account_id]\n",
            )
        ],
        [SEEN],
    ),
    Mutant(
        "a tick that a start has caught up on is applied again",
        "the feed gives each tick once",
        "exchange/tick_processor.py",
        [("self._is_caught_up and until - tick.at <= STALE_AFTER)", "False)")],
        [SEEN],
    ),
    Mutant(
        "a clock that was set leaves a gap",
        "its dates say so",
        "exchange/tick_processor.py",
        [("            self._follow_jump(jump)\n", "            pass\n")],
        [SEEN],
    ),
    Mutant(
        "a start knows nothing of a clock that was set",
        "a date is a date",
        "exchange/accounts.py",
        [("        jump = origin[1] - state.origin_at\n", "        pass\n")],
        [SEEN],
    ),
    Mutant(
        "an exit waits for the date of a clock that was ahead",
        "the latency is not over",
        "exchange/domain/tick_rules.py",
        [("not interval_elapsed(due, latency, moment.at)", "moment.at < due")],
        [SEEN],
    ),
    Mutant(
        "a successor whose clock is behind begins at its own date",
        "it was never there before",
        "exchange/domain/tick_order.py",
        [("        return Resumption(now, DateSpan(last, last + (now - at)))\n", "        return Resumption(at)\n")],
        [SEEN],
    ),
    Mutant(
        "a successor on another machine believes its own clock",
        "another clock says nothing about this one",
        "exchange/domain/tick_order.py",
        [("        jump = now - last - elapsed\n", "        pass\n")],
        [SEEN],
    ),
    Mutant(
        "a clock that is behind by less than the outage repeats what was seen",
        "some of those dates are new",
        "exchange/domain/tick_order.py",
        [("unseen(spans, at, min(now, last))", "unseen(spans, at, now)")],
        [SEEN],
    ),
    Mutant(
        "a recovery drops the ticks that the others saw meanwhile",
        "the source's history has them",
        "exchange/tick_processor.py",
        [
            (
                "            while kept := [each for each in self._kept if each[0] > number]:",
                "            while kept := []:",
            )
        ],
        [SEEN],
    ),
    Mutant(
        "recoveries ask a failed source again at once",
        "it may be back",
        "exchange/tick_processor.py",
        [("self._clock.steady_s() + _CATCH_UP_EVERY.total_seconds()", "self._clock.steady_s()")],
        [SEEN],
    ),
    Mutant(
        "a jump of the clock begins a new hour of the bounds",
        "the hour is another one",
        "portfolio/hour_bounds.py",
        [("self._jumps.jump(tick.at) is not None", "self._jumps.jump(tick.at) == 0")],
        ["portfolio/test_hour_bounds.py"],
    ),
    Mutant(
        "a violated constraint fails every posting of its statement",
        "none of them was written",
        "exchange/ledger_writer.py",
        [
            (
                "        except LedgerViolated as error:\n"
                "            await self._commit_apart(batch, error)\n"
                "            return\n"
                "        except Unavailable as error:",
                "        except (LedgerViolated, Unavailable) as error:",
            )
        ],
        ["exchange/test_exchange_faults.py"],
    ),
    Mutant(
        "reservations outlive their term",
        "they are settled when the invocations end",
        "agents/budgets.py",
        [("        self._costs = {}\n        self._reserved = {}\n", "        self._costs = {}\n")],
        ["agents/test_budgets.py"],
    ),
    Mutant(
        "an invocation that began yesterday is charged to today",
        "it ends today",
        "agents/budgets.py",
        [(" or floor_time(invocation.started_at, DAY) != self._day:", ":")],
        ["agents/test_budgets.py"],
    ),
    Mutant(
        "the end of a gap is the tick after it",
        "that tick is applied next",
        "exchange/tick_processor.py",
        [("next_tick(tick.at - _INSTANT))\n", "next_tick(tick.at))\n")],
        [pair("tick after a gap", "lost statement")],
    ),
    Mutant(
        "candles are shown to agents as they were at first",
        "they have closed",
        "backtest/market.py",
        [("if known is None or known[0] != places:", "if known is None:")],
        ["backtest/test_history.py"],
    ),
    Mutant(
        "the ledger of an hour's equity is that of its first snapshot",
        "it was recorded with the hour",
        "portfolio/sql/snapshots.py",
        [("        sequence = CASE WHEN s.last_at > h.last_at THEN s.sequence ELSE h.sequence END,\n", "")],
        ["portfolio/test_audit.py"],
    ),
    Mutant(
        "exactly three quarters of an hourly bound hold nobody",
        "the bound is for more",
        "portfolio/hour_bounds.py",
        [("if abs(moved) < CLOSED_AT * most:", "if abs(moved) <= CLOSED_AT * most:")],
        ["portfolio/test_hour_bounds.py"],
    ),
    Mutant(
        "events that a former term did not relay are relayed in the next",
        "they are not written yet",
        "database/relay.py",
        [("        self._is_open = False\n        self._waiting.clear()\n", "        self._is_open = False\n")],
        ["database/test_relay.py"],
    ),
    Mutant(
        "what was saved in a former term counts as saved",
        "it was confirmed",
        "operations/loss_limits.py",
        [("        self._saved = {}\n        self._due", "        self._due")],
        [LOSSES],
    ),
    Mutant(
        "failures of long ago count as in a row",
        "they are failures",
        "core/schedulers.py",
        [
            (
                "status.failures_in_a_row = 0 if error is None else",
                "status.failures_in_a_row = status.failures_in_a_row if error is None else",
            )
        ],
        ["core/test_schedulers.py"],
    ),
    Mutant(
        "events during the write of a record are lost",
        "what waited is written",
        "database/relay.py",
        [("        del self._waiting[: len(events)]\n", "        self._waiting.clear()\n")],
        ["database/test_relay.py"],
    ),
    Mutant(
        "the deadline of a view is a date",
        "it is told as one",
        "agents/external.py",
        [("return self._clock.steady_s() > self._ends_s", "return self._clock.now() > self.deadline")],
        ["api/agents/test_external_agents.py"],
    ),
    Mutant(
        "a clock set back a little repeats a run",
        "the time comes again",
        "core/schedulers.py",
        [("floor_time(due if due - every < now < due else now, every)", "floor_time(now, every)")],
        ["core/test_schedulers.py"],
    ),
    Mutant(
        "a former leader reads on where it had stopped following",
        "it knows that record",
        "database/relay.py",
        [("        self._after = self._written_s = None\n\n", "        self._written_s = None\n\n")],
        ["database/test_relay.py"],
    ),
    Mutant(
        "a day that comes again begins anew",
        "it is another day",
        "operations/domain/loss_limits.py",
        [("begins = day > baseline.day or", "begins = day != baseline.day or")],
        [LOSSES],
    ),
    Mutant(
        "a removed account is a gain of the others",
        "its equity is gone",
        "operations/loss_limits.py",
        [("equities) - withdrawn", "equities) + withdrawn")],
        [LOSSES],
    ),
    Mutant(
        "ticks of a clock that was ahead stay cached",
        "they were seen",
        "market/feed.py",
        [("        self._recent.clear()\n", "")],
        ["market/test_market.py"],
    ),
    Mutant(
        "a key may decide once more a minute",
        "the first one is free",
        "agents/external.py",
        [("count >= decisions_per_minute:", "count > decisions_per_minute:")],
        ["api/agents/test_external_agents.py"],
    ),
    Mutant(
        "a decision that a restart resumed does not count for its minute",
        "it began before",
        "agents/external.py",
        [("invocation.started_at, 1", "invocation.started_at, 0")],
        ["api/agents/test_external_agents.py"],
    ),
    Mutant(
        "cycles that another leader has counted are missed",
        "they are over",
        "agents/external.py",
        [("        self._unsaved.clear()\n        self._cycles.clear()\n", "        self._unsaved.clear()\n")],
        ["api/agents/test_external_agents.py"],
    ),
    Mutant(
        "orders wait for a clock that was set back",
        "their moment is to come",
        "market/feed.py",
        [("            waiter.moment -= span\n", "            pass\n")],
        ["market/test_market.py"],
    ),
    Mutant(
        "accounts in doubt keep the dates of before the clock was set",
        "they have seen nothing since",
        "exchange/accounts.py",
        [
            (
                "                self._in_doubt[account_id] = "
                "since._replace(tick=since.tick._replace(at=since.tick.at + jump))\n",
                "                pass\n",
            )
        ],
        [SEEN],
    ),
    Mutant(
        "dates that an account in doubt has missed count as applied",
        "the others have seen them",
        "exchange/accounts.py",
        [("spans = cut_out(self._spans, first.tick.at, max(first.tick.at, self.processed.at))", "spans = self._spans")],
        [SEEN],
    ),
    Mutant(
        "an hour is recorded as soon as it is over",
        "nothing writes to it any more",
        "record/results.py",
        [("floor_time(now - SETTLED_AFTER,", "floor_time(now,")],
        ["record/test_results_chain.py"],
    ),
    Mutant(
        "callers of a closed writer wait forever",
        "the service ends anyway",
        "exchange/ledger_writer.py",
        [
            (
                "        for _, written in waiting:\n"
                '            _fail(written, Unavailable("The service is stopping."))\n',
                "",
            )
        ],
        ["exchange/test_exchange_faults.py::test_a_posting_that_waits_when_the_writer_closes_is_unavailable"],
    ),
    Mutant(
        "a decision is dated after the tick that waits for it",
        "it is made now",
        "exchange/tick_processor.py",
        [("            return min(now, self._arrived - _INSTANT)\n", "            return now\n")],
        [SEEN],
    ),
    Mutant(
        "a second happens twice in a replay",
        "only earlier ones were applied",
        "exchange/tick_processor.py",
        [("if until is None or tick.at > until:", "if until is None or tick.at >= until:")],
        [SEEN],
    ),
    Mutant(
        "the removal of an account is certain without confirmation",
        "a repeated one finds nothing to remove",
        "exchange/accounts.py",
        [
            (
                "            except Unavailable:\n                self.mark_missed(account_id)\n                raise\n",
                "            except Unavailable:\n                raise\n",
            )
        ],
        [pair("removal", "lost acknowledgement")],
    ),
    Mutant(
        "an account in doubt always has rows",
        "it has just been changed",
        "exchange/accounts.py",
        [("        if not rows:", "        if False:")],
        [pair("removal", "lost acknowledgement")],
    ),
    Mutant(
        "an open view is shown without a look at the term",
        "it is in memory",
        "agents/external.py",
        [
            (
                "        await opened.record.require_term()  # another leader may have executed an order on it",
                "        pass",
            )
        ],
        [pair("webhook", "webhook elsewhere")],
    ),
    Mutant(
        "a recovery begins at today's marks",
        "they are the last known ones",
        "exchange/tick_processor.py",
        [("first.tick.at, until.at, first.marks)", "first.tick.at, until.at, self._accounts.marks)")],
        [SEEN],
    ),
    Mutant(
        "a checkpoint ignores accounts in doubt",
        "they are reread at the next start anyway",
        "exchange/accounts.py",
        [
            (
                "        first = min([LastSeen(self.processed, self.marks), *doubts], key=lambda seen: seen.tick)\n",
                "        first = LastSeen(self.processed, self.marks)\n",
            )
        ],
        [SEEN],
    ),
    Mutant(
        "a decision does not wait for the tick in progress",
        "the account's lock is enough",
        "exchange/tick_processor.py",
        [
            (
                "        while self._is_applying:\n            await self._turn.wait()\n        self._deciding += 1\n",
                "        self._deciding += 1\n",
            )
        ],
        [pair("tick with stop", "order"), pair("tick with limit fill", "order"), pair("invocation at a tick", "stop")],
    ),
    Mutant(
        "an order is placed without a look for its first answer",
        "client order ids are unique in the table",
        "exchange/idempotent_orders.py",
        [
            (
                "return [*filter(None, [await self._first_answer(each) for each in orders])] or await place(orders)",
                "return await place(orders)",
            )
        ],
        [pair("order", "same order"), pair("order", "lost acknowledgement")],
    ),
    Mutant(
        "a retry does not wait for the change that its first caller left",
        "a cancelled caller's order is cancelled, too",
        "exchange/idempotent_orders.py",
        [
            (
                "left.add_done_callback(lambda _: self._placing.pop(key).set_result(None))",
                "self._placing.pop(key).set_result(None)",
            )
        ],
        [pair("order", "retry")],
    ),
    Mutant(
        "an invocation closes its record without its pending order",
        "what has no answer has not happened",
        "agents/recorder.py",
        [
            (
                "            await self._settle(self.model.id)  # the order's outcome is read from the books\n",
                "            pass\n",
            )
        ],
        [pair("invocation", "cancellation"), pair("invocation at a tick", "cancellation")],
    ),
    Mutant(
        "a view with an order of unknown outcome counts as undecided",
        "only what is recorded counts",
        "agents/external.py",
        [("return self.record.has_pending_order or any(", "return any(")],
        ["agents/test_webhooks.py"],
    ),
    Mutant(
        "snapshots of a clock that was set back go into recorded hours",
        "a snapshot is of the time that it names",
        "portfolio/sql/snapshots.py",
        [("CASE WHEN g.created_at < m.hour + interval '1 hour'\n", "CASE WHEN false\n")],
        ["record/test_results_chain.py"],
    ),
    Mutant(
        "snapshots are written in any term",
        "they only read the accounts",
        "portfolio/sql/snapshots.py",
        [("OR coalesce((SELECT term FROM service_state), 0) = $9", "OR true")],
        [TERMS],
    ),
    Mutant(
        "a season is closed on the rows that there are",
        "its end is over",
        "portfolio/seasons.py",
        [("    if until < rules.end <= now:\n", "    if False:\n")],
        ["seasons/test_season_card.py"],
    ),
    Mutant(
        "the first record of results is read without the chain's lock",
        "the marks are locked",
        "record/results.py",
        [("            await lock_chain(conn)  # a state that changed", "            # a state that changed")],
        [pair("first record", "lifted halt")],
    ),
    Mutant(
        "a halt is in force once it is written",
        "memory follows the rows",
        "exchange/halts.py",
        [("        self._set((*self.in_force, halt))\n        return command\n", "        return command\n")],
        [SAFETY],
    ),
    Mutant(
        "a term goes live with the ticks of its beginning",
        "the next tick follows at once",
        "exchange/tick_processor.py",
        [("        await self._catch_up_until(self._seen_until)\n        # Nothing", "        # Nothing")],
        [pair("take over", "touched stop")],
    ),
    Mutant(
        "funding of an hour is booked at every tick after it",
        "the unique index refuses a second one",
        "exchange/domain/account_update.py",
        [("funding=position.funding + amount, funded_until=boundary)", "funding=position.funding + amount)")],
        [pair("tick with funding", "tick")],
    ),
    Mutant(
        "a standby does not follow what a leader has changed",
        "it reads the rows when it leads",
        "exchange/accounts.py",
        [
            (
                "                    self._accounts.update(await store.select_accounts(conn, account_id))\n            self.version",
                "                    pass\n            self.version",
            )
        ],
        [pair("follow", "order")],
    ),
    Mutant(
        "a webhook is asked again with a view on which it has ordered",
        "an open view has no decision yet",
        "agents/webhooks.py",
        [("        if opened.has_decided:\n            return\n", "")],
        [pair("webhook", "cancellation"), pair("webhook", "lost statement")],
    ),
    Mutant(
        "the cost of an invocation is not added to the day's",
        "the next cycle reads the rows",
        "agents/budgets.py",
        [("        self._spent[model_id] = self._spent_by(self._costs[model_id])\n", "")],
        [pair("invocation", "order")],
    ),
    Mutant(
        "the reservation of an interrupted invocation is not counted",
        "nobody knows what it cost",
        "agents/sql/invocations.py",
        [("        cost_usd = greatest(cost_usd, reserved_usd),\n", "")],
        [TERMS],
    ),
    Mutant(
        "an invocation is announced before its commit",
        "dashboards would see it a round trip earlier",
        "agents/recorder.py",
        [
            (
                "        has_row = True\n",
                "        has_row = True\n        if self.is_closed:\n"
                "            self._events.publish(ConversationsChanged(at=self._ended_at(), model_id=self.model.id))\n",
            ),
            (
                "        if self._is_saved and has_row:\n"
                "            self._events.publish(ConversationsChanged(at=self._ended_at(), model_id=self.model.id))\n",
                "        if self._is_saved and has_row:\n",
            ),
        ],
        [pair("invocation", "order")],
    ),
    Mutant(
        "an anchor is marked before it is sent",
        "it would otherwise be sent twice",
        "record/anchors.py",
        [
            (
                "                    await self._sink.send(anchor)\n"
                "                    async with self._database.writing() as conn:\n"
                "                        await update_anchor_sent(conn, anchor.position)\n",
                "                    async with self._database.writing() as conn:\n"
                "                        await update_anchor_sent(conn, anchor.position)\n"
                "                    await self._sink.send(anchor)\n",
            )
        ],
        [pair("anchor", "sink down"), pair("anchor", "cancellation")],
    ),
    Mutant(
        "an anchor confirms the later ones, too",
        "the sink has received the newest head",
        "record/sql/chain.py",
        [("SET sent_at = now() WHERE position = $1", "SET sent_at = now() WHERE position >= $1")],
        [pair("anchor", "sink down")],
    ),
    Mutant(
        "events of a record that was not confirmed are dropped",
        "followers need only the newest",
        "database/relay.py",
        [("        events = tuple(self._waiting)\n", "        events, self._waiting[:] = tuple(self._waiting), ()\n")],
        [pair("relay", "lost statement")],
    ),
    Mutant(
        "events of a record that was written unconfirmed are published again",
        "each record has its own events",
        "database/relay.py",
        [("view.events[max(0, known) :]", "view.events")],
        [pair("relay", "lost acknowledgement")],
    ),
    Mutant(
        "a season is opened after its start",
        "the operator knows when it begins",
        "portfolio/seasons.py",
        [("    if rules.start <= now:\n", "    if False:\n")],
        [pair("open season", "started season")],
    ),
    Mutant(
        "seasons are opened without a lock",
        "operators do not open two at once, and hours are recorded later",
        "portfolio/sql/seasons.py",
        [("    await lock_chain(conn)\n", "")],
        [pair("open season", "season elsewhere"), pair("open season", "started season")],
    ),
    Mutant(
        "a season is closed before its end",
        "its rows are complete",
        "portfolio/seasons.py",
        [('    if now < rules.end and not (rules.stopping == "decided" and is_decided):\n', "    if False:\n")],
        [pair("close season", "lost statement")],
    ),
    Mutant(
        "a season is closed on a result of before an amendment",
        "the rules are the same season's",
        "portfolio/seasons.py",
        [("    if season != read:\n", "    if False:\n")],
        ["seasons/test_season_card.py"],
    ),
    Mutant(
        "a part that the venue filled is booked only at the end of its order",
        "an order is filled or it is not",
        "live/outbox.py",
        [("if each[1].is_final or each[1].filled > each[0].filled)", "if each[1].is_final)")],
        [live_pair("live parts", "synchronization")],
    ),
    Mutant(
        "an unknown order is looked up as an expired one at once",
        "the venue does not show it",
        "live/lighter/orders.py",
        [(" and (self._api.answered_at or expires_at) > expires_at:", ":")],
        ["live/test_live.py"],
    ),
    Mutant(
        "a call ends when its client disconnects",
        "nobody reads its answer",
        "api/connections.py",
        [("            access_log=None,\n", "            access_log=None,\n            handler_cancellation=True,\n")],
        ["api/rpc/test_rpc.py"],
    ),
    Mutant(
        "new records are sent although others have changed",
        "a record is written once",
        "api/state_broadcast.py",
        [("kept != known[: len(kept)] or ", "")],
        ["api/test_new_records.py"],
    ),
    Mutant(
        "a strategy sees the day's lowest equity of the last snapshot",
        "snapshots are taken often",
        "backtest/advance.py",
        [("return values.lowest() if lowest is None else min(lowest, values.lowest())", "return lowest")],
        ["backtest/test_function.py::test_a_view_has_the_record_until_then"],
    ),
    Mutant(
        "a database of a backtest has the snapshots of whole hours",
        "later ones come with the next hour",
        "backtest/engine.py",
        [("            self.take_snapshots(followed, min(self._reached, self.last) + 1)", "            pass")],
        ["backtest/test_history.py::test_whoever_reads_between_hours_finds_every_snapshot"],
    ),
    Mutant(
        "a position that closes late in a backtest leaves no value",
        "an idle account has one an hour",
        "backtest/engine.py",
        [("followed.hours[-1].last != followed.account.cash", "followed.hours[-1].last == followed.account.cash")],
        ["backtest/test_function.py::test_the_curve_has_what_a_close_left_late_in_the_last_hour"],
    ),
    Mutant(
        "the lowest value of a position is its last one",
        "it comes at the end",
        "backtest/values.py",
        [("[min(steps), max(steps), steps[-1]]", "[steps[-1]]")],
        ["backtest/test_values.py"],
    ),
    Mutant(
        "an idle account's day begins with its next order",
        "nothing has happened to it since",
        "backtest/accounts.py",
        [("return known.hour <= now < known.hour + _HOUR", "return known.hour <= now")],
        ["backtest/test_function.py::test_the_day_of_an_account_begins_at_midnight_also_if_nothing_has_happened_since"],
    ),
    Mutant(
        "a difference opens what it should stop while the venue cannot be asked about it",
        "it may have an explanation",
        "live/reconciler.py",
        [('"; ".join(map(str, self._settled(_wrong(differences)))) or self.trouble', "self.trouble")],
        ["live/test_live.py::test_a_difference_stops_new_orders_also_while_nothing_can_be_asked_about_it"],
    ),
    Mutant(
        "an account waits as long as its start",
        "a task has the context of what starts it",
        "core/tasks.py",
        [("start(_keep(work, name), name, Context())", "start(_keep(work, name), name)")],
        ["live/test_live.py::test_an_account_waits_seconds_for_the_venues_limit_and_not_as_long_as_its_start"],
    ),
    *_KINDS,
)
