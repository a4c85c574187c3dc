"""Arrays that are sent by reference."""
