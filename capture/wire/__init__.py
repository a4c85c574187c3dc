"""What passes between processes. Each message is made and read in one file."""
