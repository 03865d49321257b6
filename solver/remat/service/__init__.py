"""Client of the planning service: `client` is the public `Client`, `connection` the HTTP requests
with retries, and `wire` the JSON documents that client and service exchange."""
