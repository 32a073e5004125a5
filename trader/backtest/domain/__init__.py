"""Corrections of a backtest's figures for the number of trials."""
