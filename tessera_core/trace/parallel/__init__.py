"""Tensor parallelism: one rank's shard of a model, with the collectives that join the ranks as ops.

``shares`` says who gets how much, ``plan`` what a model declares, ``published`` reads the plans that the library
``transformers`` publishes, ``shard`` cuts a model, ``collectives`` are the operators, and ``ties`` finds the kernels
between two collectives.
"""
