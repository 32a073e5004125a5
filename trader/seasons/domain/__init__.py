"""The plan of a season: how long it must be to distinguish entrants."""
