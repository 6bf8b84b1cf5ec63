"""How fast the planner is, and how near to its own lower bound: recorded models and a generated graph on 2 to 16
devices, with slow and fast links between types, with memory limits and without.
"""
