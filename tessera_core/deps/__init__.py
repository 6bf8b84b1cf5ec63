"""From accesses to dependencies: collects what each kernel reads and writes, by the best evidence there
is, and derives the read-after-write, write-after-read and write-after-write edges between kernels.
"""
