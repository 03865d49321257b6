"""Alembic's entry point: runs migrations in the transaction that `Database.migrate` opened."""

from alembic import context

from remat_server.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,
)
context.run_migrations()
