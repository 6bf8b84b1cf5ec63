"""The test of a target's dependencies on a GPU: what was concluded from PTX, against what the kernels do."""
