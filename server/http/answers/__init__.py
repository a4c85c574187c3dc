"""What is sent: responses and streams."""
