from polyreme.display.notebook import RunHandle as Run

API_VERSION: int

__all__ = ["API_VERSION", "Run"]
