"""From a model to a program: the dispatcher tracer, the formation of kernels, the interception of
Triton launches and the catalogue of models that can be traced by name.
"""
