"""The planning service of remat: an HTTP API, a job store, and workers with a process per solve.

- `cli`: the commands `remat serve`, `remat worker` and `remat keys`.
- `http`: the HTTP API and the web page.
- `store`: the job store in SQLite or PostgreSQL.
- `work`: workers and solving processes.
- `settings`: settings from the environment.
- `problems`: errors as problem documents.
- `logs`: structured logs.
"""
