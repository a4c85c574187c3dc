"""What runs in the API process."""
