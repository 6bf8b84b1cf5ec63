"""Times of kernels on devices that nobody measured them on, with intervals that own up to it."""
