"""Memory of flat buffers, and what is left of a parameter whose memory is freed."""
