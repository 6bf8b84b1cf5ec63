"""From dependencies and times to a plan: cost model, lower bounds, solvers, baselines, and the
independent checker that re-derives every figure that a solver claims.
"""
