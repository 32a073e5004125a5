"""Portfolio: snapshots, histories, statistics, evidence, baselines, the leaderboard, and the rules of a season.

Read `snapshots.py` (the stored data), `run_statistics.py` and `analytics.py` (figures), then `evidence.py` (their
significance).
"""
