"""Times of kernels, links and segments, taken on the hardware at hand."""
