"""Models that are built partitioned: no rank ever holds more of them than one whole parameter."""
