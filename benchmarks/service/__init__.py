"""How the service holds under load and loss, and what it costs over the library."""
