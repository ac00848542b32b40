"""A server of the training API of Tinker: clients hold the loop, this samples, learns and keeps."""
