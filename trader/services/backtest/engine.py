"""Engine of a backtest: the guard and the exchange for the decisions of its accounts, in event time.

An account's orders go one after the other, each to the first book after its latency, as in a service.
"""

from datetime import datetime

from trader.clock import iso, moment_of
from trader.domain.agents.guard import Approved, Refusal, judge
from trader.domain.agents.messages import failed, order_outcome, plan_outcome, refused
from trader.domain.agents.tools import Change
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.ledger import Posting
from trader.domain.exchange.orders import ExitPlan, Order
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.markets import canonical_symbol, refusal_to_trade, untimely
from trader.errors import InvalidInput
from trader.services.backtest.accounts import LATE, Invocation, ModelAccount, WaitingOrder
from trader.services.backtest.runner import EventTimeRunner
from trader.services.exchange.idempotent_orders import checked


class Engine(EventTimeRunner[ModelAccount]):
    """Advances the accounts of models through market time."""

    def decide(self, followed: ModelAccount, second: int, now: datetime) -> None:
        """Ask a model for decisions, unless its previous ones are still being executed."""
        if followed.invocation is not None:
            followed.missed += 1
            return
        followed.decisions += 1
        decisions = self.ask(followed, second, now)
        if not decisions:
            return
        followed.invocation = Invocation(followed.model, now, decisions)
        self._execute(followed, Moment(now, *self.prices(second)), second)

    def _execute(self, followed: ModelAccount, moment: Moment, second: int) -> None:
        """Execute the remaining decisions through the guard and the exchange, until an order must wait for its book."""
        invocation = followed.invocation
        assert invocation is not None
        while invocation.left:
            number, decision = invocation.left.popleft()
            if not isinstance(decision, Change):
                continue
            symbol = canonical_symbol(decision.symbol)
            if symbol not in self.market.markets:
                continue
            context = self.context(followed, moment, second, viewed_at=invocation.started_at)
            verdict = judge(decision, symbol, context, followed.limits)
            match verdict:
                case ExitPlan():
                    refusal = self._set_plan(followed, symbol, verdict, moment, second)
                    followed.report(moment.at, number, decision, plan_outcome(verdict, refusal))
                case Approved():
                    followed.ordered = number, decision
                    self._order(followed, verdict.order(followed.account.id, invocation.id, number), moment, second)
                case Refusal():
                    followed.report(moment.at, number, decision, refused(verdict))
            if followed.waiting is not None:
                return
        followed.end_invocation(moment.at)

    def _set_plan(self, followed: ModelAccount, symbol: str, plan: ExitPlan, moment: Moment, second: int) -> str | None:
        """Replace the exit plan of a position. Return why it is refused, or None."""
        refusal = refusal_to_trade(moment.quotes.get(symbol), symbol, moment.at)
        if refusal is not None:
            return refusal
        posting = rules_of_exchange.set_exit_plan(followed.account, symbol, plan, moment, self.rules)
        if isinstance(posting, str):
            return posting
        self.post(followed, posting, second)
        return None

    def post(self, followed: ModelAccount, posting: Posting | None, second: int) -> None:
        """Apply a posting, and record the answer to the order of a decision."""
        super().post(followed, posting, second)
        if posting is not None and posting.answer is not None and followed.ordered is not None:
            followed.report(posting.answer.at, *followed.ordered, order_outcome(posting.answer))
            followed.ordered = None

    def _order(self, followed: ModelAccount, order: Order, moment: Moment, second: int) -> None:
        """Place an order at once, or queue it for the first book after its latency."""
        try:
            order = checked(order, self.market.markets)
        except InvalidInput as error:
            assert followed.ordered is not None, "a decision placed it"
            followed.report(moment.at, *followed.ordered, failed(str(error)))
            followed.ordered = None
            return
        refusal = self._refusal_to_wait(order, moment, second)
        if refusal is not None:
            self.post(followed, rules_of_exchange.refuse(followed.account, order, refusal, moment.at), second)
        elif self._latency:
            followed.waiting = WaitingOrder(order, moment.at + self._latency)
        else:
            self._place(followed, order, moment, second)

    def _refusal_to_wait(self, order: Order, moment: Moment, second: int) -> str | None:
        """Return why no book can come for an order, or why there is none now where it need not wait; else None."""
        ends_at, last = moment_of(self.last), self.market.last_tick(min(second, self.last))
        if self._latency:
            if moment.at + self._latency > ends_at or last == self.last:
                return f"The replay ended at {iso(ends_at)}; there are no more prices"
            if last is not None and (why := untimely(moment_of(last), moment.at)) is not None:
                return f"The last price is of {iso(moment_of(last))}, {why}"
            return None
        return refusal_to_trade(moment.quotes.get(order.symbol), order.symbol, moment.at)

    def release(self, followed: ModelAccount, moment: Moment, second: int) -> None:
        """Place the order that waited for this tick, or refuse it after too long a wait; then execute the rest."""
        assert followed.waiting is not None
        order, due = followed.waiting
        if moment.at - due > LATE:
            refusal = f"No price of {order.symbol} came in time"
        elif order.symbol in moment.updated:
            refusal = None
        elif second == self.last:
            refusal = f"The replay ended at {iso(moment.at)}; there are no more prices"
        else:
            return
        followed.waiting = None
        now = Moment(moment.at, moment.quotes, moment.marks)
        if refusal is None:
            self._place(followed, order, now, second)
        else:
            self.post(followed, rules_of_exchange.refuse(followed.account, order, refusal, now.at), second)
        self._execute(followed, now, second)

    def _place(self, followed: ModelAccount, order: Order, moment: Moment, second: int) -> None:
        funding_rate = self.market.funding_rate
        self.post(followed, rules_of_exchange.place(followed.account, order, moment, self.rules, funding_rate), second)
