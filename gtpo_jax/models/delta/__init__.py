"""Gated delta nets: layers whose memory of earlier positions is a matrix per head."""
