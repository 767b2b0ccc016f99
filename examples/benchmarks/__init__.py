"""Measurements that the documentation quotes; each module prints a table.

You may want `step`, `memory` and `host_offload`: they time a step, count the bytes of a
training run, and keep a state in the host's memory. The other modules are the laboratory
of this package's maintainers.
"""
