"""The machine underneath: start-up, processes, mesh, signals, errors. Importing this package imports no JAX."""
