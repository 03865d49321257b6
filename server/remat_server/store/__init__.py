"""The job store in SQLite or PostgreSQL, which has the complete state of the service.

- `database`: connections and transactions.
- `tables`: the tables; `migrations` has their history.
- `jobs`: jobs from the user's view: submit, view, list, cancel, delete.
- `leases`: jobs from the worker's view: claim, renew, report, finish, release.
- `events`: the events of each job, for clients that watch it.
- `keys`: API keys.
- `tallies`: counters and histograms for the metrics.
- `upkeep`: periodic deletion of old jobs, and failure of jobs whose workers are lost.
"""
