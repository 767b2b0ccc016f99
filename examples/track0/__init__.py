"""Track 0: a leaderboard of optimizers that two cores settle within an hour.

    python -m examples.track0 MODULE:FACTORY [--name NAME]

| file | its job |
|---|---|
| `workloads.py` | what is trained: four texts that decide, and images |
| `factories.py` | a user's factory: called with rates and axes, and checked |
| `runs.py` | one run: the losses of a workload with a factory, two rates and a seed |
| `losses.py` | the runs of an entry on disk, which a killed row continues |
| `search.py` | two rates, by a star of factor 2 and the parabola through it |
| `row.py` | a row: the search and the fresh seeds |
| `workers.py` | processes that train |
| `table.py` | intervals, verdicts and the table of all rows |
| `entries.py` | the optimizers of the table, each a chain of a few lines or an import |

[The page](../../docs/track0.md) has the protocol, the table, and how to add an entry.
"""
