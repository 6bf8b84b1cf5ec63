"""The intermediate representation of one inference iteration: ops, kernels, buffers and the boxes of
bytes that they touch, and the replay that executes such a record and gives the model's own results.
"""
