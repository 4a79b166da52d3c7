"""Facts about graphs and machines: liveness, costs, resident memory. Decides nothing."""
