"""How the stages work: everything between reading one artifact and writing the next. The subpackages
follow the pipeline (`trace`, `ptx`, `deps`, `profile`, `plan`, `execute`, `adapt`) over one
intermediate representation (`program`); `devices` knows the hardware and `report` shows results.
Analysis and planning (`ptx`, `deps`, `plan`, `adapt`) import neither torch nor Triton, so that they
run on a machine that has neither.
"""
