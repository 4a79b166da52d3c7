"""Parameters and gradients in shards: buckets, their parameters' states, gradients to p.grad."""
