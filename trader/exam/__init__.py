"""The exam: market states whose law is known, in which every entrant decides once and is scored by expected value.

Read `domain/law.py` (the law of a state, the value of what is held in it, and the oracle), `domain/worlds.py` (how
worlds are drawn), `source.py` (a world as the past of a market), `sitting.py` (an entrant decides in a state),
`pairs.py` (the same in a recording), `folder.py` (what is kept), then `opening.py` and `run.py` (a run). The rest
shows and checks results: `report.py`, `page.py` and `check.py`.
"""
