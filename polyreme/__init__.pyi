from polyreme.cli.notebook import RunHandle as Run

API_VERSION: int

__all__ = ["API_VERSION", "Run"]
