"""A run's directory: its files, its records, how far it is, and what starts or resumes in it."""
