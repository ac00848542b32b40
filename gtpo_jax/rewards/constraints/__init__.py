"""Verifiable instructions: the 25 kinds of IFEval (2311.07911), and verdicts on them."""
