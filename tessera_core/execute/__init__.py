"""Running a plan: slots and segments, the transports between workers, the pipeline loop, the
verification against the unpartitioned program, and the simulator that writes the same artifacts.
"""
