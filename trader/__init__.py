"""trader: the backend on which AI models trade crypto perpetuals, on paper or live."""

__version__ = "0.1.0"
