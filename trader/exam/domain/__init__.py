"""Laws, worlds and scores: pure values and functions."""
