"""The service from outside: what goes over the `wire`, the `connection`, and the `client` on it."""
