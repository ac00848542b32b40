"""What a Python program hands over and what it gets back."""
