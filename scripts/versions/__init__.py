"""Tests of remat in every environment that it promises: `make test-versions`."""
