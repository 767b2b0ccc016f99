"""Measurements that the documentation quotes; each module prints a table."""
