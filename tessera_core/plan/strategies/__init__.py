"""Ways to use the devices of a cluster, one file for each or for each family, and their comparison."""
