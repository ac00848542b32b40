"""Mixtures of experts: the router, the products of experts, and the module of a layer."""
