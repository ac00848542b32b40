"""Verifies mathematical answers."""
