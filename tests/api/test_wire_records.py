"""Wire records built from the attributes of domain records."""

from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pytest
from msgspec import Meta
from support.records import FILL, make_model

from trader.api.schemas.analytics import IntervalPercent, Replicates, ReplicatesRow
from trader.api.schemas.common import ENCODER, UNSET, UnsetType, Wire, decoder_of, encoded
from trader.api.schemas.trades import TradeFillView
from trader.core.intervals import ConfidenceInterval
from trader.portfolio.domain.returns import ReplicateNoise
from trader.portfolio.leaderboard import ReplicatesEntry

NOISE = ReplicateNoise(("ada", "eve"), 30, -1.5, 2.25, 0.5, None)


class Figures(Wire):
    run_id: str
    at: str
    total_pnl: Decimal
    label: str | None
    leverage: Decimal | UnsetType = UNSET
    note: str | UnsetType = UNSET


def source(**fields: Any) -> SimpleNamespace:
    known = {
        "run_id": UUID(int=1),
        "at": datetime(2025, 1, 1, tzinfo=UTC),
        "total_pnl": Decimal("1.500"),
        "label": None,
    }
    return SimpleNamespace(**{**known, "leverage": None, "note": "n", "unused": object(), **fields})


def test_ids_and_times_become_text_numbers_lose_zeros_and_none_may_be_absence() -> None:
    assert msgspec.json.decode(ENCODER.encode(Figures.from_attributes(source()))) == {
        "runId": "00000000-0000-0000-0000-000000000001",
        "at": "2025-01-01T00:00:00.000Z",
        "totalPnl": 1.5,
        "label": None,
        "note": "n",
    }


def test_explicit_values_override_the_attributes_of_the_source() -> None:
    figures = Figures.from_attributes(source(leverage=Decimal("5.0")), label="given", note=UNSET)
    assert (figures.label, figures.leverage, figures.note) == ("given", Decimal(5), UNSET)


def test_the_fee_of_a_trades_fill_includes_the_liquidation_fee() -> None:
    fill = msgspec.structs.replace(FILL, fee=Decimal("4.25"), liquidation_fee=Decimal("450.75"))
    assert msgspec.json.decode(ENCODER.encode(TradeFillView.of(fill))) == {
        "side": "buy", "quantity": 1, "price": 50_000, "fee": 455, "maker": False, "cause": "order",
        "timestamp": "2026-03-04T00:00:00.000Z",
    }  # fmt: skip


def test_given_values_take_the_form_of_the_wire_too() -> None:
    figures = Figures.from_attributes(
        source(), at=datetime(2026, 1, 1, tzinfo=UTC), total_pnl=Decimal("0.0120"), note=None
    )
    assert (figures.at, str(figures.total_pnl), figures.note) == ("2026-01-01T00:00:00.000Z", "0.012", UNSET)


def test_a_missing_attribute_is_a_bug() -> None:
    with pytest.raises(AttributeError, match="total_pnl"):
        Figures.from_attributes(SimpleNamespace(run_id="r", at="t", label=None, leverage=None, note=None))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (IntervalPercent.from_attributes(ConfidenceInterval(-1.5, 2.0)), {"low": -1.5, "high": 2.0}),
        (
            ReplicatesRow.from_attributes(
                ReplicatesEntry([make_model("ada"), make_model("eve")], -1.5, 2.25, NOISE, None)
            ),
            {
                "modelIds": ["ada", "eve"],
                "lowestPercent": -1.5,
                "highestPercent": 2.25,
                "noise": {
                    "modelIds": ["ada", "eve"],
                    "hours": 30,
                    "lowestPercent": -1.5,
                    "highestPercent": 2.25,
                    "spreadPercent": 0.5,
                    "noisePercent": None,
                },
                "costUsd": None,
            },
        ),
    ],
)
def test_records_of_named_tuples_fit_their_types(record: Wire, expected: dict[str, Any]) -> None:
    text = ENCODER.encode(record)
    assert msgspec.json.decode(text) == expected
    assert msgspec.json.decode(text, type=type(record)) is not None


def test_the_noise_of_replicates_fits_its_type() -> None:
    sent = ENCODER.encode(Replicates.from_attributes(NOISE))
    assert msgspec.json.decode(sent, type=Replicates).model_ids == ["ada", "eve"]


class Inner(Wire):
    share: Annotated[float, Meta(ge=0, le=1)] | None


class Outer(Wire):
    name: str
    count: int
    amount: Decimal | None
    inner: list[Inner]
    notes: dict[str, Any]


RIGHT: dict[str, Any] = {
    "name": "a",
    "count": 1,
    "amount": Decimal("0.10"),
    "inner": (Inner(share=0.5), Inner(share=None)),
    "notes": {"x": None},
}


def test_an_output_that_matches_its_type_is_encoded() -> None:
    text = b'{"name":"a","count":1,"amount":0.10,"inner":[{"share":0.5},{"share":null}],"notes":{"x":null}}'
    assert encoded(Outer(**RIGHT), decoder_of(Outer)) == text


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 1},
        {"name": None},
        {"name": UNSET},  # the field is missing
        {"count": "1"},
        {"count": 1.5},
        {"amount": Decimal("NaN")},
        {"amount": Decimal("Infinity")},
        {"inner": [Inner(share=1.01)]},
        {"inner": [Inner(share=-0.01)]},
        {"inner": [Inner(share=float("nan"))]},
        {"inner": [Inner(share=0.5), {"shares": 1}]},
        {"inner": None},
        {"notes": {"x": [{"y": float("inf")}]}},
        {"notes": []},
    ],
)
def test_an_output_that_does_not_match_its_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        encoded(Outer(**RIGHT | wrong), decoder_of(Outer))
