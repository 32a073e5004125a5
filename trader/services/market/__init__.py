"""The market feed: one stream of ticks and the marks that follow from it."""
