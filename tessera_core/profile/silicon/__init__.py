"""Times that somebody else measured on real GPUs and published as tables, read where their package lies."""
