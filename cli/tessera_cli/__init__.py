"""Who asks: the `tessera` command. It parses arguments, calls `tessera_core` and prints; it holds no
algorithm, and importing it loads neither torch nor Triton.
"""
