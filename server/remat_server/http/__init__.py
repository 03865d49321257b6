"""The HTTP interface of the service.

- `app`: creates the FastAPI application.
- `state`: the parts of the application that request handlers use.
- `routes`: the request handlers.
- `auth`: API keys, job owners and request rates.
- `bodies`: reads request bodies within limits.
- `intake`: validates request bodies and submits jobs.
- `middleware`: request ids, log lines, security headers, and allowed hosts.
- `problem_responses`: errors as responses with problem documents.
- `metrics`: Prometheus metrics.
- `static`: the web page.
"""
