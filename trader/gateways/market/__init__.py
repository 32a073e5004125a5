"""Where market data comes from: made (`synthetic`), recorded (`replay`) or met (`venue`)."""
