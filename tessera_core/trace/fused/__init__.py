"""Fused operators that stand for eager code which nobody serves: per-expert loops, expanded masks, naive scans.

Each is a custom op of the namespace ``tessera`` with an implementation that any device runs (``attention``,
``experts``, ``recurrence``); ``table`` says what the tracer knows about them, and needs no PyTorch.
"""
