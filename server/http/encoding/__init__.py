"""How rows are written: forms, types and layouts."""
