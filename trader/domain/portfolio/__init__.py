"""Statistics of equity series and trades."""
