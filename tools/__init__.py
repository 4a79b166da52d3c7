"""Command-line tools: they import everything below, nothing imports them."""
