"""The request handlers.

- `solve`: `POST /solve` and `POST /sweeps`.
- `jobs`: `/jobs` and its event streams.
- `results`: `GET /jobs/{id}/result`, in several formats.
- `health`: `/livez`, `/readyz` and `/metrics`.
- `common`: parts of the OpenAPI document, and the error for an unknown job.
"""
