"""Ways to use the devices of a cluster, one file for each or for each family, and their comparison."""

from tessera_core.plan.strategies.compare import compare

__all__ = ["compare"]
