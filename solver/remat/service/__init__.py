"""The service from outside: what goes over the `wire`, and the `client` that sends it."""
