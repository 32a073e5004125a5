"""Shapes of all answers and stream messages, written by hand and independent of the service's structs."""

from collections.abc import Mapping

from support.shapes import (
    Shape,
    anything,
    boolean,
    color,
    count,
    decimal,
    holding_time,
    hour,
    iso,
    number,
    text,
    uuid,
)

VARIANT = ("Apex", "Trendsurfer", "Contrarian", "Sovereign")
SIDE = ("LONG", "SHORT")
SYMBOL = ("BTC", "ETH", "SOL")
FIGURE = (number, "N/A", "Infinity")
INTERVAL = {"low": number, "high": number}
VERDICT = ("better", "worse", "not distinguishable yet")
_MODEL_HEAD = {"modelId": text, "modelName": text, "variant": VARIANT}
NEIGHBOUR = {"modelId": text, "verdict": VERDICT, "smallestDifference": (number, None), "reason": (text, None)}

REPLICATES = {
    "modelIds": [text],
    "hours": count,
    "lowestPercent": number,
    "highestPercent": number,
    "spreadPercent": number,
    "noisePercent": (number, None),
}
DECLARED = {"model": text, "version?": text, "promptDigest?": text}
SEASON = {
    "number": count,
    "state": ("announced", "running", "ended", "closed"),
    "digest": text,
    "openedAt": iso,
    "rules": {
        **dict.fromkeys(("name", "stopping"), text),
        **dict.fromkeys(("start", "end", "lastEntry"), iso),
        **{name: [text] for name in ("markets", "entrants", "compare", "disqualify")},
        **dict.fromkeys(("capital", "takerFeeBps", "makerFeeBps", "alpha", "coverageMinPercent"), number),
        **dict.fromkeys(("latencyMs", "replicates", "ageMinHours"), count),
        **dict.fromkeys(("hourLossMaxPercent", "hourGainMaxPercent"), number),
        "primary": ({"entrant": text, "against": text, "alpha": number}, None),
    },
    "amendments": [
        {"at": iso, "reason": text, "digest": text, "changes": [{"rule": text, "before": anything, "after": anything}]}
    ],
    "closedAt?": iso,
    "seedDigest?": text,
    "seed?": text,
}
CONTAMINATION = ("after cut-off", "before cut-off", "unknown")

EXIT_PLAN = {
    "stop": (number, None),
    "target": (number, None),
    "invalidation": (text, None),
    "invalidationPrice": (number, None),
    "timeExit": (iso, None),
}
POSITION = {
    "id": uuid,
    "modelId": text,
    "modelName": text,
    "modelVariant?": VARIANT,
    "symbol": SYMBOL,
    "side": SIDE,
    "quantity": decimal,
    "entryPrice": decimal,
    "leverage?": decimal,
    "exitPlan": EXIT_PLAN,
    "confidence?": number,
    "openedAt": iso,
    "currentPrice": decimal,
    "notional": decimal,
    "unrealizedPnl": decimal,
    "liquidationPrice?": decimal,
    "manual?": boolean,
}
POSITION_EVENT = {
    "modelId": text,
    "modelName": text,
    "modelVariant?": VARIANT,
    "color?": text,
    "positions": [POSITION],
    "totalUnrealizedPnl": number,
    "availableCash": number,
}
TRADE = {
    "id": uuid,
    "modelId": text,
    "modelName": text,
    "modelVariant?": VARIANT,
    "modelRouterName": (text, None),
    "modelKey": text,
    "side": SIDE,
    "symbol": SYMBOL,
    "quantity": number,
    "entryPrice": number,
    "exitPrice": number,
    "leverage?": number,
    "grossPnl": number,
    "fees": number,
    "funding": number,
    "netPnl": number,
    "closeReason": (
        "order",
        "limit",
        "stop",
        "invalidation",
        "target",
        "time",
        "liquidation",
        "reset",
        "operator",
        "manual",
        "ended",
    ),
    "confidence?": number,
    "openedAt": iso,
    "closedAt": iso,
    "holdingTime": holding_time,
    "timestamp": iso,
    "manual?": boolean,
}
TOOL_CALL_TYPE = (
    "CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN", "HOLDING", "FETCH_INDICATORS", "FETCH_ORDER_BOOK", "NOTE",
)  # fmt: skip
INVOCATION = {
    "id": uuid,
    "modelId": text,
    "modelName": text,
    "modelVariant": VARIANT,
    "modelLogo": (text, None),
    "response": (text, None),
    "responsePayload?": [text],
    "status": ("completed", "failed", "timeout"),
    "failureReason": (text, None),
    "endedBy": (text, None),
    "steps": count,
    "inputTokens": (count, None),
    "outputTokens": (count, None),
    "unmeteredAttempts?": count,
    "costIsPartial?": True,
    "costIsEstimated?": True,
    "costUsd?": number,
    "declaredUsage?": {
        "model?": text,
        "steps?": count,
        "inputTokens?": count,
        "outputTokens?": count,
        "costUsd?": number,
    },
    "durationMs": count,
    "timestamp": iso,
    "toolCalls": [
        {
            "id": uuid,
            "type": TOOL_CALL_TYPE,
            "status": ("ok", "rejected", "failed"),
            "metadata": {"raw": anything, "decisions": [anything], "results": [anything]},
            "timestamp": iso,
        }
    ],
}
LIVE_PORTFOLIO = {
    "lastUpdatedAt": iso,
    "modelsUpdated": count,
    "snapshotsCreated": count,
    "snapshots": [
        {
            **_MODEL_HEAD,
            "netPortfolio": number,
            "cash": number,
            "unrealizedPnl": number,
            "createdAt": iso,
        }
    ],
}
RUNNING_CANDLE = {"symbol": SYMBOL, "time": iso, "open": number, "high": number, "low": number, "close": number}
ORDER = {
    "id": uuid,
    "clientOrderId?": text,
    "accountId": text,
    "symbol": SYMBOL,
    "side": ("buy", "sell"),
    "type": ("market", "limit"),
    "status": ("filled", "partial", "resting", "rejected", "cancelled"),
    "reason?": text,
    "requestedQuantity": number,
    "totalQuantity": number,
    "averagePrice": (number, None),
    "totalFees": number,
    "realizedPnl": number,
    "fills": [{"quantity": number, "price": number, "fee": number, "maker": boolean, "timestamp": iso}],
    "timestamp": iso,
    "manual?": boolean,
}
ACCOUNT = {
    "accountId": text,
    "runId": (uuid, None),
    "exists": boolean,
    "quoteCurrency": text,
    "initialCapital": number,
    "cashBalance": number,
    "equity": number,
    "availableCash": number,
    "borrowedBalance": number,
    "marginBalance": number,
    "maintenanceMargin": number,
    "totalRealizedPnl": number,
    "totalUnrealizedPnl": number,
    "totalFees": number,
    "totalFundingPnl": number,
    "totalInsurance": number,
    "positions": [
        {
            "symbol": SYMBOL,
            "side": SIDE,
            "quantity": number,
            "avgEntryPrice": number,
            "markPrice": number,
            "notional": number,
            "margin": number,
            "leverage": number,
            "unrealizedPnl": number,
            "realizedPnl": number,
            "liquidationPrice": (number, None),
            "exitPlan": EXIT_PLAN,
        }
    ],
    "openOrders": [
        {
            "id": uuid,
            "symbol": SYMBOL,
            "side": ("buy", "sell"),
            "quantity": number,
            "remaining": number,
            "limitPrice": number,
            "createdAt": iso,
        }
    ],
}
_JUDGED = {
    "hours": count,
    "differencePercent": (number, None),
    "interval": (INTERVAL, None),
    "verdict": VERDICT,
    "pValue": (number, None),
    "smallestDifference": (number, None),
    "daysNeeded": (count, None),
    "reason": (text, None),
}
_DIFFERENCE = {
    **_JUDGED,
    "reference": ("ruleAgent", "holdNothing", "buyAndHold", "bestOther"),
    "referenceId": (text, None),
    "eValue": (number, None),
    "verdictBefore?": VERDICT,
    "pValueBefore?": (number, None),
}

_PLAN_OUTCOME = {"planned": count, "byStop": count, "byTarget": count, "byDecision": count, "otherwise": count}
FAILURE_COUNTS = {
    **_MODEL_HEAD,
    "failedWorkflowCount": count,
    "failedToolCallCount": count,
    "failedCount": count,
    "invocationCount": count,
    "failureRate": (number, None),
}
_OVERALL = (
    "accountValue returnPercent winRate biggestWin biggestLoss sharpeRatio maxDrawdown tradeSignalToNoise "
    "costUsd netAfterCost"
)
_OVERALL_COUNTS = ("tradesCount", "inputTokens", "outputTokens")
_ADVANCED = (
    "accountValue avgTradeSize medianTradeSize maxTradeSize avgHoldTimeMinutes medianHoldTimeMinutes "
    "maxHoldTimeMinutes longPercent expectancy recoveryFactor avgConfidence medianConfidence maxConfidence "
    "failureRate profitFactor avgRMultiple decisionQualityScore sharpeRatio sortinoRatio calmarRatio "
    "avgWinDurationMinutes avgLossDurationMinutes costUsd netAfterCost"
)
_ADVANCED_COUNTS = (
    "failedWorkflowCount failedToolCallCount failedCount invocationCount longestWinStreak longestLossStreak "
    "currentStreakCount inputTokens outputTokens"
)
_PAGE = {"nextBefore?": iso, "nextSkip?": count}
HISTORY_POINT = {"timestamp": hour, "value": number}
_PARTIAL = {"unmeteredAttempts?": count, "costIsPartial?": True, "costIsDeclared?": True}
_OVERALL_FIGURES = {
    **_MODEL_HEAD,
    **_PARTIAL,
    **dict.fromkeys(_OVERALL_COUNTS, count),
    **dict.fromkeys(_OVERALL.split(), FIGURE),
    **dict.fromkeys(("sharpeInterval", "winRateInterval"), (INTERVAL, None)),
    "totalPnl": number,
    "startValue": number,
}
_ADVANCED_FIGURES = {
    **_MODEL_HEAD,
    "currentStreakType": ("win", "loss", "none"),
    **_PARTIAL,
    **dict.fromkeys(_ADVANCED_COUNTS.split(), count),
    **dict.fromkeys(_ADVANCED.split(), FIGURE),
    **dict.fromkeys(("sharpeInterval", "profitFactorInterval"), (INTERVAL, None)),
}
_ENTRANT = {
    "entrant": count,
    "fingerprint": (text, None),
    "startedAt": iso,
    "endedAt": (iso, None),
    "coverage": (number, None),
    "ranked": boolean,
    "declared?": DECLARED,
}

OUTPUTS: Mapping[str, Shape] = {
    "trading.getTrades": {"trades": [TRADE], **_PAGE},
    "trading.getPositions": [POSITION],
    "trading.getCryptoPrices": {
        "prices": [{"symbol": SYMBOL, "price": number, "timestamp": iso, "change24hPercent?": number, "message?": text}]
    },
    "trading.getPortfolioHistory": {
        "history": [
            {
                "id": text,
                "modelId": text,
                "netPortfolio": number,
                "createdAt": iso,
                "updatedAt": iso,
                "model": {"name": text, "variant": VARIANT, "openRouterModelName": text},
            }
        ],
        "resolution": ("1m", "5m", "15m", "1h", "4h", "1d"),
    },
    "trading.getTrade": {
        "trade": {
            "id": uuid,
            "modelId": text,
            "modelName": text,
            "modelVariant?": VARIANT,
            "symbol": SYMBOL,
            "side": SIDE,
            "status": ("OPEN", "CLOSED"),
            "quantity": number,
            "entryPrice": number,
            "exitPrice": (number, None),
            "leverage": (number, None),
            "margin": number,
            "grossPnl": (number, None),
            "fees": number,
            "funding": number,
            "netPnl": (number, None),
            "closeReason": (text, None),
            "confidence": (number, None),
            "invocationId": (uuid, None),
            "previousId": (uuid, None),
            "nextId": (uuid, None),
            "openedAt": iso,
            "closedAt": (iso, None),
            "exitPlan": EXIT_PLAN,
            "fills": [
                {
                    "side": ("buy", "sell"),
                    "quantity": number,
                    "price": number,
                    "fee": number,
                    "maker": boolean,
                    "cause": text,
                    "timestamp": iso,
                }
            ],
            "excursion": {
                "lowest": number,
                "highest": number,
                "adversePercent": number,
                "favourablePercent": number,
                "interval?": ("1m", "1h"),
            },
        }
    },
    "trading.getCandles": {
        "symbol": SYMBOL,
        "interval": ("1m", "5m", "15m", "1h", "4h", "1d"),
        "times": [iso],
        "open": [number],
        "high": [number],
        "low": [number],
        "close": [number],
        "volume": [(number, None)],
        "nextBefore?": iso,
    },
    "trading.getEquityCurves": {
        "times": [iso],
        "resolution": ("1m", "5m", "15m", "1h", "4h", "1d"),
        "start?": iso,
        "starts?": anything,
        "models": [
            {"id": text, "name": text, "variant": (VARIANT, None), "baseline?": boolean, "values": [(number, None)]}
        ],
    },
    "models.getModels": {
        "models": [
            {
                "id": text,
                "name": text,
                "variant": VARIANT,
                "provider": text,
                "routerModelName": text,
                "logo?": text,
                "color": text,
                "colorChosen?": True,
                "active": boolean,
                "manualSince?": iso,
                "createdAt": iso,
                "invocationCount": count,
                "lastInvokedAt?": iso,
                "warning?": text,
            }
        ],
        "warning?": text,
    },
    "models.getInvocations": {"conversations": [INVOCATION], **_PAGE},
    "models.getConversation": {"messages": [{"role": text, "text": text}]},
    "simulator.placeOrder": {"order": ORDER},
    "simulator.cancelOrder": {"order": ORDER},
    "simulator.getAccount": {"account": ACCOUNT},
    "simulator.resetAccount": {"account": ACCOUNT},
    "operations.resume": {"accountId?": text, "lifted": [text], "message": text},
    "operations.getActivity": {
        "since": iso,
        "costs": [{"day": text, "modelId": text, "usd": number, "isPartial": boolean}],
        "models": [
            {
                **dict.fromkeys(("invocations", "failed"), count),
                **dict.fromkeys(("medianSeconds", "slowSeconds"), number),
                "modelId": text,
                "lastFailure": (text, None),
            }
        ],
        "refusals": [{"rule": text, "calls": count, "models": count}],
        "halts": [
            {
                "accountId?": text,
                **dict.fromkeys(("cause", "reason", "haltedBy"), text),
                "haltedAt": iso,
                "liftedBy": (text, None),
                "liftedAt": (iso, None),
            }
        ],
        "alarms": [
            {
                **dict.fromkeys(("state", "cause", "message"), text),
                "subject": (text, ""),
                "at": iso,
                "since": iso,
            }
        ],
    },
    "operations.halt": {"accountId?": text, "keptIn": text, "message": text, "commandId?": text},
    "simulator.getCompletedTradesFromDB": {
        "trades": [
            {
                "id": uuid,
                "modelId": text,
                "modelName": text,
                "symbol": SYMBOL,
                "direction": SIDE,
                "notional": number,
                "realizedPnl": number,
                "leverage": (number, None),
                "confidence": (number, None),
                "closedAt": iso,
                "invocationId": (uuid, None),
            }
        ],
        **_PAGE,
        "stats": {
            "tradeCount": count,
            "totalRealized": number,
            "expectancy": (number, None),
            "averageLeverage": (number, None),
            "medianLeverage": (number, None),
            "maxLeverage": (number, None),
            "leverageValues": [number],
            "averageConfidence": (number, None),
            "medianConfidence": (number, None),
            "confidenceValues": [number],
        },
    },
    "analytics.getModelStats": (
        {"overall": [{**_OVERALL_FIGURES, "entrants": [{**_OVERALL_FIGURES, **_ENTRANT}]}]},
        {"advanced": [{**_ADVANCED_FIGURES, "entrants": [{**_ADVANCED_FIGURES, **_ENTRANT}]}]},
    ),
    "analytics.getLeaderboard": {
        "start": (iso, None),
        "entries": [
            {
                "rank": (count, None),
                **_MODEL_HEAD,
                "modelIds": [text],
                "replicates": count,
                "since": (iso, None),
                "color": text,
                "pnlPercent": (number, None),
                "pnlAbsolute": number,
                "maxDrawdown": number,
                "startValue": number,
                "endValue": number,
                "tradesCount": count,
                "ci95": (INTERVAL, None),
                "details?": {
                    "ci95Reason": (text, None),
                    "tie": boolean,
                    "verdict": ({"above": (NEIGHBOUR, None), "below": (NEIGHBOUR, None)}, None),
                    "entrant": count,
                    "runNumber": count,
                    "fingerprint": (text, None),
                    "coverage": (number, None),
                    "withinMinute": count,
                    "trainingCutoff": (text, None),
                    "contamination": CONTAMINATION,
                    "owner": (text, None),
                    "costUsd": (number, None),
                    "netAfterCost": (number, None),
                    "declared?": DECLARED,
                    "replicates?": {
                        "modelIds": [text],
                        "lowestPercent": (number, None),
                        "highestPercent": (number, None),
                        "noise": (REPLICATES, None),
                        "costUsd": (number, None),
                    },
                    "offBoard?": text,
                },
            }
        ],
        "window": ("24h", "7d", "30d"),
        "season?": SEASON,
    },
    "analytics.getEvidence": {
        "window": ("24h", "7d", "30d", "run"),
        "start": (iso, None),
        "until": iso,
        "best": (text, None),
        "resolution": {"now": (number, None), "atEnd": (number, None)},
        "marketReturn": (number, None),
        "entrants": [
            {
                **_MODEL_HEAD,
                **_ENTRANT,
                "runNumber": count,
                "trainingCutoff": (text, None),
                "contamination": CONTAMINATION,
                "hours": count,
                "tradesCount": count,
                "losingTradesCount": count,
                "returnPercent": (number, None),
                "interval": (INTERVAL, None),
                "reason": (text, None),
                "amongBest": boolean,
                "differences": [_DIFFERENCE],
                "rank": (dict.fromkeys(("first", "last", "among"), count), None),
                "account": {
                    "runs": count,
                    "startedAt": iso,
                    "returnPercent": number,
                    "entrants": [
                        {
                            "runNumber": count,
                            "entrant": count,
                            "fingerprint": text,
                            "beganAt": iso,
                            "endedAt": (iso, None),
                        }
                    ],
                },
                "ageHours": count,
                "owner": (text, None),
                "replicates?": REPLICATES,
                "offBoard?": text,
                "rankBefore?": (dict.fromkeys(("first", "last", "among"), count), None),
            }
        ],
        "season?": SEASON,
        "primary?": {
            **dict.fromkeys(("entrant", "against"), text),
            "alpha": number,
            **_JUDGED,
        },
    },
    "analytics.getSeason": {"season?": SEASON},
    "analytics.getFailures": {
        **_PAGE,
        "failures": [
            {
                "invocationId": uuid,
                "modelId": text,
                "modelName": text,
                "response": (text, None),
                "responsePayload": anything,
                "createdAt": iso,
                "failureReason": (text, None),
                "toolCalls": [{"id": uuid, "toolCallType": TOOL_CALL_TYPE, "metadata": text, "createdAt": iso}],
                "stepTelemetry?": [
                    {
                        "stepNumber": count,
                        "toolNames": [text],
                        "inputTokens": (count, None),
                        "outputTokens": (count, None),
                        "totalTokens": (count, None),
                        "timestamp": iso,
                    }
                ],
                "totalSteps?": count,
                "totalInputTokens?": count,
                "totalOutputTokens?": count,
            }
        ],
        "modelStats": [FAILURE_COUNTS],
    },
    "analytics.getComparison": {
        "window": ("24h", "7d", "30d", "run"),
        "start": (iso, None),
        "modelIds": [[text]],
        "until": iso,
        "difference": _DIFFERENCE,
        "curve": [
            {
                "at": iso,
                "differencePercent": (number, None),
                "interval": (INTERVAL, None),
            }
        ],
        "agreedHours": number,
        "disagreedHours": number,
        "disagreements": [
            {
                "symbol": text,
                "since": iso,
                "until": iso,
                "side": ("LONG", "SHORT", None),
                "againstSide": ("LONG", "SHORT", None),
            }
        ],
    },
    "analytics.getBehaviour": {
        "behaviour": (
            {
                "since": iso,
                "until": iso,
                "positions": count,
                "timeInMarket": (number, None),
                "holdingTimes": ({"low": number, "median": number, "high": number}, None),
                "withinMinute": count,
                "leverageByVolatility": ([number], None),
                "turnover": (number, None),
                "fees": (number, None),
                "flips": count,
                "stops": _PLAN_OUTCOME,
                "targets": _PLAN_OUTCOME,
                "plansChanged": count,
                "captured": (number, None),
                "alike": (number, None),
                "replicates": [text],
            },
            None,
        )
    },
    "analytics.getTradeTotals": {
        "rows": [
            {
                "key": text,
                "trades": count,
                "won": count,
                "grossPnl": number,
                "fees": number,
                "funding": number,
                "netPnl": number,
            }
        ]
    },
    "analytics.getRunInfo": {
        "runStartTime": (iso, None),
        "tradingMode": ("simulated", "live"),
        "models": count,
        "invocations": count,
        "trades": count,
        "entrants": [{"modelId": text, "invocations": count, "trades": count, **_ENTRANT}],
    },
    "variants.getVariants": {
        "variants": [{"id": VARIANT, "label": text, "description": text, "temperature": number, "color": color}]
    },
    "variants.getVariantStats": {
        "stats": [
            {
                "variantId": VARIANT,
                "label": text,
                "color": color,
                "modelCount": count,
                "totalTrades": count,
                "winRate": (number, None),
                "winRateInterval": (INTERVAL, None),
                "totalPnl": number,
                "avgPnl": (number, None),
            }
        ]
    },
    "variants.getVariantHistory": {
        "variants": [{"variantId": VARIANT, "label": text, "color": color, "history": [HISTORY_POINT]}],
        "aggregate": [HISTORY_POINT],
    },
}
"""The output of every procedure, by its dotted name."""
