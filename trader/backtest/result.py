"""Models in the result of a backtest: training cutoff, contamination, and the cost of their answers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from trader.agents.domain.models import Model, contamination
from trader.agents.providers.cassette import Cassette
from trader.agents.strategy_files import LoadedStrategy
from trader.api.schemas.evidence import GetEvidenceOutput
from trader.backtest.accounts import ModelAccount
from trader.backtest.models import MASKED, Chosen
from trader.backtest.run import Backtest
from trader.backtest.sources import RecordingStrategySource
from trader.core.clock import iso
from trader.core.statistics import max_drawdown
from trader.exchange.domain.account import equity
from trader.market.domain.markets import Market, SimulatedMarket
from trader.portfolio.evidence import EvidenceReport
from trader.seasons.page import RankedModel

_WORDS: Mapping[str, str] = {
    "after cut-off": "the period is after the end of its training data, {cutoff}",
    "before cut-off": "the period begins before the end of its training data, {cutoff}: it may know these prices",
    "unknown": "the models file does not give the end of its training data: it may know these prices",
}


def model_value(model: Model, starts_at: datetime) -> dict[str, Any]:
    """Return the provider, training cutoff and contamination of a model; code has no contamination."""
    cutoff = model.configuration.training_cutoff
    return {
        "provider": model.provider,
        "model": model.router_model_name,
        "trainingCutoff": None if cutoff is None else cutoff.isoformat(),
        "contamination": contamination(cutoff, starts_at) if model.is_ai else None,
    }


def account_value(standing: RankedModel, followed: ModelAccount, starts_at: datetime) -> dict[str, Any]:
    """Return the figures of an account; its drawdown is of the last equity of each hour."""
    refused = [{"rule": rule, "count": count, "reason": reason} for rule, count, reason in followed.refusals()]
    return {
        "id": standing.account.model_id,
        "variant": standing.account.variant,
        **model_value(followed.model, starts_at),
        "equity": standing.account.equity,
        "returnPercent": standing.return_percent,
        "maxDrawdownPercent": standing.drawdown,
        "trades": standing.account.trades,
        "tradesWithinMinute": standing.account.within_minute,
        "decisions": standing.account.invocations,
        "refused": refused,
        "gross": standing.account.gross,
        "fees": standing.account.fees + standing.account.liquidation_fees,
        "funding": standing.account.funding,
        "modelCostUsd": standing.account.model_cost,
    }


def strategy_value(chosen: Chosen) -> dict[str, Any] | None:
    """Return the file, class, parameters and digest of the strategy; None without one."""
    for model, source in chosen.models:
        if isinstance(source, RecordingStrategySource) and isinstance(source.strategy, LoadedStrategy):
            strategy, params = source.strategy, dict(model.configuration.params)
            return {
                "file": str(strategy.file),
                "class": strategy.class_name,
                "params": params,
                "sha256": strategy.digest,
            }
    return None


def baselines_value(run: Backtest) -> list[dict[str, Any]]:
    """Return equity, return and maximal drawdown of each baseline account."""
    values, marks = [], run.marks()
    for followed in run.baselines:
        capital, worth = followed.account.run.initial_capital, equity(followed.account, marks)
        fall = max_drawdown([float(capital), *(float(value.last) for value in followed.hours)])
        values.append(
            {
                "id": followed.baseline.id,
                "name": followed.baseline.name,
                "equity": worth,
                "returnPercent": float(100 * (worth - capital) / capital),
                "maxDrawdownPercent": 0.0 if fall is None else fall.percent,
            }
        )
    return values


def capacity_value(rows: Mapping[str, SimulatedMarket], run: Backtest) -> dict[str, Any]:
    """Return each simulated market's depth in a calm book and its largest execution, both in quote currency."""
    largest = run.largest_executions()
    return {symbol: {"calmDepth": row.calm.depth, "largestExecution": largest[symbol]} for symbol, row in rows.items()}


def capacity_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text line about the trade size at which simulated order books begin to matter."""
    if not value:
        return
    sizes = (
        f"{symbol} {each['calmDepth']:,.0f}, of which the largest execution took "
        f"{100 * float(each['largestExecution']) / each['calmDepth']:.1f} %"
        for symbol, each in value.items()
    )
    yield f"Capacity, the depth of a calm book within 2 basis points: {'; '.join(sizes)}"


def masked_value(hidden: Collection[str] | None, accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the hidden parts and, per model, its figures in the masked market minus those in the real one."""
    if not hidden:
        return None
    by_id = {account["id"]: account for account in accounts}
    pairs = [(by_id[account_id], by_id.get(f"{account_id}{MASKED}")) for account_id in by_id]
    return {
        "hidden": sorted(hidden),
        "maskedMinusPlain": [
            {"id": plain["id"], **{name: masked[name] - plain[name] for name in ("equity", "returnPercent", "trades")}}
            for plain, masked in pairs
            if masked is not None
        ],
    }


def _masked_lines(value: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the text lines about the effect of the mask."""
    if value is None:
        return
    hidden = ", ".join(value["hidden"])
    for each in value["maskedMinusPlain"]:
        yield (
            f"{each['id']}: masked ({hidden}) minus plain: {each['equity']:+,.2f}, "
            f"{each['returnPercent']:+.2f} %, {each['trades']:+d} trades"
        )


def refused_line(account: Mapping[str, Any]) -> str:
    """Return the text line about an account's refused decisions: the rules, each with its last reason."""
    rules = (f"{each['count']:,} {each['rule']} ({each['reason']})" for each in account["refused"])
    return f"{account['id']}: refused: {'; '.join(rules)}"


def evidence_value(report: EvidenceReport) -> GetEvidenceOutput:
    """Return the evidence as `analytics.getEvidence` answers it."""
    return GetEvidenceOutput.of("run", report)


def labelled(standings: Sequence[RankedModel], run: Backtest) -> list[RankedModel]:
    """Return the standings with each AI model's name followed by its contamination label."""
    models = {followed.model.id: followed.model for followed in run.accounts}
    return [
        standing._replace(
            account=msgspec.structs.replace(
                standing.account, name=_labelled_name(models[standing.account.model_id], run.starts_at)
            )
        )
        for standing in standings
    ]


def _labelled_name(model: Model, starts_at: datetime) -> str:
    """Return the name of a model with its contamination label; code has none."""
    if not model.is_ai:
        return model.name
    return f"{model.name} ({_said(contamination(model.configuration.training_cutoff, starts_at))})"


def answers_value(chosen: Chosen, cassette: Cassette) -> dict[str, Any]:
    """Return the location of the answers, the number of requests, and their cost."""
    return {
        "cassette": str(cassette.folder.absolute()),
        "asked": chosen.spending.asked,
        "costUsd": chosen.spending.spent_usd,
        "budgetUsd": chosen.spending.budget_usd,
    }


def listings_value(markets: Mapping[str, Market]) -> dict[str, dict[str, str | None]]:
    """Return when the markets begin and end that do so within the run."""
    return {
        symbol: {
            "beginsAt": None if market.begins_at is None else iso(market.begins_at),
            "endsAt": None if market.ends_at is None else iso(market.ends_at),
        }
        for symbol, market in markets.items()
        if market.begins_at is not None or market.ends_at is not None
    }


def listing_lines(listings: Mapping[str, Mapping[str, str | None]]) -> Iterator[str]:
    """Yield a sentence for each market that begins or ends within the run."""
    for symbol, listing in listings.items():
        if listing["beginsAt"] is not None:
            yield f"{symbol} begins at {listing['beginsAt']}, within the run."
        if listing["endsAt"] is not None:
            yield f"{symbol} ends at {listing['endsAt']}, within the run; positions in it were closed at its last mark."


def model_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text lines about the models."""
    yield from _masked_lines(value["masked"])
    yield from listing_lines(value["listings"])
    for account in value["accounts"]:
        if account["contamination"] is not None:
            words = _WORDS[account["contamination"]].format(cutoff=account["trainingCutoff"])
            yield f"{account['id']}: {_said(account['contamination'])}: {words}"
    answers = value["answers"]
    if answers is not None:
        cost = answers["costUsd"]
        yield f"{answers['asked']} answers were requested, at {cost} USD; all are in {answers['cassette']}"
    if value["ended"] is not None:
        yield f"Ended at {value['to']}: {value['ended']}"
    if not value["complete"] and answers is not None and answers["budgetUsd"] is not None:
        yield (
            f"With --cassette {answers['cassette']} and another --out the same command continues from there, "
            "without repeating requests."
        )


def _said(label: str) -> str:
    return "training cutoff unknown" if label == "unknown" else label
