"""Record and replay on NumPy: ops as recipes, regions that drop values and compute them again."""
