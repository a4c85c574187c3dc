"""What replay raises."""


class ReplayError(RuntimeError):
    """Rows were not replayed, or do not fit the model."""
