"""Processes, devices and signals: start-up, mesh, errors. Importing this package imports no JAX."""
