"""Rewrites the references: `python -m tests.references`."""

from __future__ import annotations

from tests.references import FOLDER, references

found = references()
for file in FOLDER.glob("*.json"):
    if file.name not in found:
        file.unlink()
for name, text in found.items():
    (FOLDER / name).write_text(text, encoding="utf-8")
