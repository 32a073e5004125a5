"""Constants of the paths within a minute, fitted to the first half of recorded candles and printed.

scripts/benchmark path_constants [folder of kline files]

The second market is drawn beside the first, the third beside both: its tilts hold for the tilts of the second that
stand in the package, so those are replaced first.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.candles import FOLDER
from support.market_fidelity import paths_together

from trader.domain.market.markets import MARKETS
from trader.gateways.market.books import Grid
from trader.gateways.market.files import Minutes, find_files, read_market
from trader.gateways.market.minute_paths import CANDIDATES, MinutePaths, corners
from trader.gateways.market.path_constants import EDGE_SHARES, LEAD_RULES, OWN_RULES
from trader.gateways.market.walks import CELLS, KINDS, cell, walk_pool

Floats = NDArray[np.float64]
SEED = -1
"""Of the paths of the leaders; no seed that is judged."""
FIT_ROUNDS = 300
FIT_POWER = 1.5
"""Expectation maximisation converges faster with its factors raised to a power above 1."""
TILT_ROUNDS = 8
RIDGE = 0.02
GROUP = 32
BLOCK = 16
"""So many minutes are drawn at once."""


def shares_of_cells(paths: Mapping[str, MinutePaths], recorded: Mapping[str, Minutes]) -> Floats:
    """Return the part of the range in each cell, a row for each class of minutes, over all markets."""
    shares = np.zeros((len(EDGE_SHARES) + 1, CELLS))
    for symbol, minutes in recorded.items():
        grid = Grid(MARKETS[symbol])
        for place in range(len(minutes) // 2):
            row = minutes[place]
            low, high, opened, close = corners(grid, row)
            if high > low:
                number = cell(opened - low, close - low, high - low)
                shares[paths[symbol].kinds[place], number] += (high - low) / row.open
    parts: Floats = shares / shares.sum(axis=1, keepdims=True)
    return parts


def fit_kinds(shares: Floats) -> Floats:
    """Return the weights of the kinds whose mixture has these shares. A cell and its mirror image are one.

    What is fitted are weights of 32 successive families each. Some kinds have fewer, so these lie across two kinds, and
    neighbours are weighted alike.
    """
    pool = walk_pool()
    families = np.array(pool.families)
    groups = np.minimum(np.arange(len(pool.kinds)) // GROUP, len(KINDS) - 1)
    sizes = np.bincount(groups)
    wanted, rows = [], []
    for number in range(CELLS // 2 + 1):
        half = 0.5 if number == CELLS // 2 else 1.0  # the cell in the middle is its own mirror image
        walks = np.array(pool.members[number], dtype=np.int64) >> 1
        share = half * (shares[number] + shares[CELLS - 1 - number])
        if share and len(walks):
            wanted.append(share)
            rows.append(np.bincount(groups[families[walks]], half * pool.parts[walks], minlength=len(sizes)) / sizes)
    by_cell = np.array(rows)
    weights = np.full(len(sizes), 1 / len(sizes))
    for _ in range(FIT_ROUNDS):
        mixture = np.maximum((by_cell * weights).sum(axis=1), 1e-300)
        weights *= (by_cell.T * (wanted / mixture)).sum(axis=1) ** FIT_POWER
        weights /= weights.sum()
    by_kind: Floats = np.bincount(pool.kinds, (weights / sizes)[groups], minlength=len(KINDS)).astype(float)
    return by_kind


def payoffs(paths: MinutePaths, grid: Grid, minutes: Minutes, leaders: int) -> tuple[Floats, Floats]:
    """Return what the groups of rules earn on candidates of each minute, and the reaches of the minutes."""
    groups = np.cumsum([0, *map(len, [*LEAD_RULES] * 4 * leaders + [*OWN_RULES])])[:-1]
    random, kept, reaches = np.random.default_rng(0), [], []
    moving = [place for place in range(len(minutes) // 2) if len({*corners(grid, minutes[place])[:2]}) > 1]
    for begin in range(0, len(moving), BLOCK):
        places = np.array(moving[begin : begin + BLOCK])
        numbers = random.random((len(places), CANDIDATES + 1))
        candidates = paths.candidates(places, tuple(range(leaders)), numbers)
        kept.append(np.add.reduceat(candidates.payoffs, groups, axis=-1)[candidates.fit].astype(np.float32))
        reaches.append(candidates.reaches[candidates.fit])
    return np.concatenate(kept), np.concatenate(reaches)


def fit_tilts(earned: Floats, reaches: Floats) -> Floats:
    """Return the tilts with which each group of rules earns nothing on average, by Newton's method."""
    parts, tilts = reaches / reaches.sum(), np.zeros(earned.shape[2])
    for _ in range(TILT_ROUNDS):
        logits = earned @ tilts
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        means = (weights[:, :, None] * earned).sum(axis=1)
        squares = np.einsum("nmi,nmj->ij", (weights * parts[:, None])[:, :, None] * earned, earned, optimize=True)
        slopes = squares - (means * parts[:, None]).T @ means
        ridge = RIDGE * np.diag(slopes)
        gradient = (means * parts[:, None]).sum(axis=0) + ridge * tilts
        tilts -= np.linalg.solve(slopes + np.diag(ridge), gradient)
    return tilts


def show(values: Floats, digits: int) -> None:
    print("    (" + ", ".join(f"{value:.{digits}f}" for value in values) + "),")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/benchmark path_constants", description="Fit the paths' constants.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="kline files of BTC, ETH and SOL")
    recorded = {symbol: read_market(paths) for symbol, paths in find_files(parser.parse_args().folder).items()}
    paths = paths_together(recorded, SEED)
    print("KIND_WEIGHTS")
    for shares in shares_of_cells(paths, recorded):
        show(fit_kinds(shares), 3)
    for leaders, symbol in enumerate(list(recorded)[1:], start=1):
        earned = payoffs(paths[symbol], Grid(MARKETS[symbol]), recorded[symbol], leaders)
        *across, within = np.split(fit_tilts(*earned), np.arange(1, 4 * leaders + 1) * len(LEAD_RULES))
        print(f"LEAD_TILTS of {symbol}")
        for tilts in across:
            show(tilts, 2)
        print(f"OWN_TILTS of {symbol}")
        show(within, 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
